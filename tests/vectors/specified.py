"""docs/protocol.md as tables: the fields of every message, and which values each type of field may have."""

from __future__ import annotations

import json
from typing import Any

HASH, OTHER = "ab" * 32, "0123456789abcdef" * 4
REF = {"hash": HASH, "size": 2_000_000, "chunk": 122_880}

# The type of each field in its order, and its default where it has one.
_KEY = {
    "run": "token",
    "round": "count",
    "attempt": "count",
    "kind": "kind",
    "hop": ("count", 0),
}
FIELDS: dict[str, dict[str, Any]] = {
    "join": {
        "protocol": ("integer", 1),
        "sdk": "text",
        "install": "token",
        "boot": "token",
        "nonce": "token",
        "examples": "count",
        "lease": ("seconds or null", None),
    },
    "here": {"nonce": "token", "examples": "count"},
    "leave": {"nonce": "token"},
    "taken": {**_KEY, "examples": "count or null"},
    "declined": {**_KEY, "reason": "text"},
    "offer": {**_KEY, "blob": "ref", "examples": "count"},
    "report": {**_KEY, "loss": "number", "correct": "count", "examples": "count"},
    "grant": {"blob": "hash", "start": "count", "stop": "count"},
    "who": {"jitter": "seconds", "server": "token", "age": ("seconds", 0)},
    "welcome": {
        "nonce": "token",
        "run": "token",
        "bundle": "ref",
        "model": "ref",
        "heartbeat": "seconds",
        "come_back": ("seconds or null", None),
    },
    "refused": {"nonce": "token", "code": "code", "reason": "text"},
    "task": {
        **_KEY,
        "nonce": "token",
        "bundle": "ref",
        "model": "ref",
        "deadline": "seconds",
        "epochs": ("epochs", 1),
        "batch_size": ("batch", 32),
        "lr": ("number", "0"),
        "weight_decay": ("number", "0"),
        "momentum": ("number", "0"),
        "keep_momentum": ("boolean", False),
        "proximal": ("number", "0"),
        "clip_norm": ("number", "0"),
        "seed": ("count", 0),
        "bounds": ("logs", {}),
        "exponents": ("logs", {}),
        "codec": ("codec", "fp32"),
        "compression": ("compression", "none"),
        "augmentation": ("augmentation or null", None),
        "wants": ("facts", []),
        "covariance": ("covariance", "diagonal"),
        "rank": ("rank", 0),
    },
    "receipt": {**_KEY, "accepted": "boolean", "reason": ("text", ""), "blob": ("hash or null", None)},
    "cancel": {**_KEY, "reason": "text"},
    "finished": {"run": "token", "model": "ref", "reason": ("text", "")},
}


def _choice(*values: str) -> tuple[list[str], list[str]]:
    return [f'"{v}"' for v in values], [f'"{values[0].upper()}"', f'"{values[0]} "', '""', "null", "0"]


def _whole(least: int, most: int) -> tuple[list[str], list[str]]:
    beyond = [str(least - 1), str(most + 1), f"{least}.5", f'"{least}"', "true", "null", "[]"]
    return [str(least), str(most)], beyond


def _or_null(limits: tuple[list[str], list[str]]) -> tuple[list[str], list[str]]:
    return [*limits[0], "null"], [text for text in limits[1] if text != "null"]


_TEXT = (['""', f'"{"x" * 500}"', r'"\u0000\n\\\"\/"'], [f'"{"x" * 501}"', "null", "0"])
_TOKEN = (
    [f'"{"0" * 16}"', f'"{"f" * 17}"', f'"{"9a" * 16}"'],
    [
        f'"{"0" * 15}"',
        f'"{"0" * 33}"',
        f'"{"F" * 16}"',
        rf'"{"0" * 16}\n"',
        f'"{"g" * 16}"',
        '""',
        "null",
        "0",
    ],
)
_HASH = (
    [f'"{OTHER}"'],
    [f'"{HASH[1:]}"', f'"{HASH}a"', f'"{HASH.upper()}"', rf'"{HASH[1:]}\n"', rf'"{HASH}\n"', '""', "0"],
)
_NUMBERS = ["0", "-0", "007", "1e308", "-5e-324", "0.1", "9" * 20, f"-{'1' * 20}.{'1' * 20}e-307", "1E+001"]
_NO_NUMBERS = ["", "1" * 21, "1.", ".5", "+1", "1e", "1e1000", "nan", "Infinity", "0x1p3", "1,5"]
_NO_NUMBERS += [" 1", "1 ", r"1\n", "\u0661"]
_NUMBER = ([f'"{text}"' for text in _NUMBERS], [*[f'"{text}"' for text in _NO_NUMBERS], "0.5", "null"])
_LOGS = (
    ["{}", '{"mean":-62}', '{"mean":62,"statistic":0,"a rule of tomorrow":-1}'],
    ['{"mean":-63}', '{"mean":63}', '{"mean":0.5}', '{"mean":null}', "[]", "null"],
)
_COVARIANCES = _choice("full", "diagonal", "low_rank")

# For each type of field: JSON texts of values that are in its range, and of values that are not.
LIMITS: dict[str, tuple[list[str], list[str]]] = {
    "text": _TEXT,
    "token": _TOKEN,
    "hash": _HASH,
    "number": _NUMBER,
    "count": _whole(0, 1 << 53),
    "seconds": _whole(0, 10_000_000),
    "integer": (["0", "2", "9007199254740992"], ["1.5", '"1"', "true", "null"]),
    "epochs": _whole(1, 10_000),
    "batch": _whole(1, 1 << 20),
    "rank": _whole(0, 1 << 16),
    "size": _whole(1, 1 << 31),
    "chunk": _whole(1024, 1 << 28),
    "logs": _LOGS,
    "boolean": (["true", "false"], ["0", "1", '"true"', "null"]),
    "kind": _choice("train", "evaluate", "describe", "statistics"),
    "code": _choice("id-in-use", "protocol"),
    "codec": _choice("fp32", "fp16", "int8"),
    "compression": _choice("none", "zstd"),
    "covariance": _COVARIANCES,
    "facts": (
        ["[]", '["feature","histogram","descriptor"]'],
        ['["statistics"]', "[null]", '"histogram"', "null"],
    ),
    "sources": (
        ["[]", '["ask"]', '["a source of tomorrow","ask"]'],
        ["[0]", '"ask"', "null", f'["{"x" * 501}"]'],
    ),
    "ref": (
        [json.dumps({**REF, "size": 1, "chunk": 1024}, separators=(",", ":"))],
        ["{}", "null", f'"{HASH}"'],
    ),
    "multiples": (
        ["{}", '{"0":"1"}', '{"1048575":"1e3","9999999":"2.5"}'],
        ['{"10000000":"2"}', '{"":"2"}', '{"-1":"2"}', '{"a":"2"}', '{"1":2}', '{"1":""}', "null"],
    ),
    "augmentation": (['{"multiples":{},"seed":0}'], ['{"multiples":{}}', '{"seed":0}', "{}", "[]"]),
}
for _name in ("count", "seconds", "hash", "augmentation"):
    LIMITS[f"{_name} or null"] = _or_null(LIMITS[_name])
