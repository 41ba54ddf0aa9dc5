"""Messages: what they mean with their defaults, each field at its limits and beyond, and what is none."""

from __future__ import annotations

import json
from typing import Any

from vectors.plain import document
from vectors.specified import FIELDS, HASH, LIMITS, REF

NONCE = "0123456789abcdef"
KEY = {"run": "f" * 32, "round": 3, "attempt": 0, "kind": "train"}
SOURCES = {"sources": ["retained", "ask"]}

FROM_DEVICE = ("join", "here", "leave", "taken", "declined", "offer", "report", "grant")
TO_ALL = ("who", "finished")


# A message of each type with the fields that must be there.
LEAST: dict[str, dict[str, Any]] = {
    "join": {"sdk": "kotlin 0.1", "install": "1" * 32, "boot": "2" * 16, "nonce": NONCE, "examples": 600},
    "here": {"nonce": NONCE, "examples": 612},
    "leave": {"nonce": NONCE},
    "taken": {**KEY, "examples": 612},
    "declined": {**KEY, "reason": "not charging"},
    "offer": {**KEY, "blob": REF, "examples": 612},
    "report": {**KEY, "kind": "evaluate", "loss": "20.5", "correct": 58, "examples": 68},
    "grant": {"blob": HASH, "start": 256, "stop": 272},
    "who": {"jitter": 2, "server": "3" * 16},
    "welcome": {"nonce": NONCE, "run": "f" * 32, "bundle": REF, "model": REF, "heartbeat": 20},
    "refused": {"nonce": NONCE, "code": "protocol", "reason": "the server speaks protocol 1"},
    "task": {**KEY, "nonce": NONCE, "bundle": REF, "model": REF, "deadline": 118},
    "receipt": {**KEY, "accepted": True},
    "cancel": {**KEY, "reason": "the round is complete"},
    "finished": {"run": "f" * 32, "model": REF},
}
_TRAIN = {
    "epochs": 2,
    "batch_size": 16,
    "lr": "0.05",
    "weight_decay": "1e-4",
    "momentum": "0.9",
    "keep_momentum": True,
    "proximal": "0.01",
    "clip_norm": "1",
    "seed": 5_417_240_120_937,
    "bounds": {"mean": 6, "statistic": 16, "counter": 40},
    "exponents": {"mean": 34, "statistic": 24},
    "codec": "int8",
    "compression": "zstd",
    "augmentation": {"multiples": {"4": "2.5", "7": "1.333"}, "seed": 9_120_550_271, "stored": False},
}
MORE: list[tuple[str, str, dict[str, Any]]] = [
    ("a check-in", "join", {"protocol": 1, "lease": 600}),
    ("a task that is under way has come again", "taken", {"examples": None}),
    ("of a turn in a chain", "offer", {"hop": 7}),
    ("a report of no examples", "report", {"loss": "0", "correct": 0, "examples": 0}),
    ("a visit later pays", "welcome", {"come_back": 90}),
    ("a task to train, with all its fields", "task", _TRAIN),
    ("a task to train, a turn in a chain", "task", {"hop": 2, "model": {**REF, "sources": ["ask"]}}),
    ("a task to evaluate", "task", {"kind": "evaluate"}),
    ("a task to describe", "task", {"kind": "describe", "round": 0, "wants": ["histogram", "descriptor"]}),
    (
        "a task to describe, with a plan of augmentation",
        "task",
        {
            "kind": "describe",
            "round": 1,
            "wants": ["histogram"],
            "augmentation": {"multiples": {}, "seed": 1},
        },
    ),
    ("a task of statistics", "task", {"kind": "statistics", "covariance": "low_rank", "rank": 16}),
    ("a refusal", "receipt", {"accepted": False, "reason": "round 3 (attempt 0) is closed", "blob": HASH}),
    ("sent to one device", "finished", {"reason": "all rounds are done"}),
    ("text of any language", "declined", {"reason": "Akku leer – 电池 \U0001f50b"}),
]


def text_of(values: dict[str, Any]) -> str:
    return json.dumps(values, separators=(",", ":"), ensure_ascii=False)


def direction(kind: str) -> str:
    return "up" if kind in FROM_DEVICE else "all" if kind in TO_ALL else "down"


def meaning(kind: str, given: dict[str, Any]) -> dict[str, Any]:
    """All fields of a message in their order, with the defaults of those that are not given."""
    whole = {"type": kind}
    for name, declared in FIELDS[kind].items():
        value = given[name] if name in given else declared[1]
        if value is not None and "ref" in declared:
            value = {**SOURCES, **value}
            value = {field: value[field] for field in (*REF, "sources")}
        if value and name == "augmentation":
            value = {"stored": True, **value}
            value = {field: value[field] for field in ("multiples", "seed", "stored")}
        whole[name] = value
    return whole


def accepted() -> list[dict[str, Any]]:
    messages = [("its least", kind, {}) for kind in LEAST] + MORE
    vectors: list[dict[str, Any]] = [
        {
            "fact": fact,
            "direction": "down" if fact == "sent to one device" else direction(kind),
            "type": kind,
            "json": text_of({"type": kind, **LEAST[kind], **given}),
            "means": text_of(meaning(kind, {**LEAST[kind], **given})),
        }
        for fact, kind, given in messages
    ]
    grant = next(vector for vector in vectors if vector["type"] == "grant")
    vectors.append({**grant, "fact": "a grant to a device", "direction": "down"})
    plain = '{"type":"here","nonce":"0123456789abcdef","examples":1}'
    means = text_of(meaning("here", {"nonce": NONCE, "examples": 1}))
    for fact, text in {
        "a field of tomorrow is ignored": plain[:-1] + ',"tomorrow":[1.5e300,{"type":"leave"},null]}',
        "the order of fields is free": '{"examples":1,"nonce":"0123456789abcdef","type":"here"}',
        "white space is free": ' {\r\n\t"type" : "here", "nonce":"0123456789abcdef" , "examples":1 }\n',
        "text may be escaped": plain.replace("here", r"\u0068ere", 1).replace("examples", r"ex\u0061mples"),
    }.items():
        vectors.append({"fact": fact, "direction": "up", "type": "here", "json": text, "means": means})
    vectors.append(
        {
            "fact": "16,384 bytes: pad the text with spaces",
            "direction": "up",
            "type": "here",
            "json": plain,
            "padded_to": 16_384,
            "means": means,
        }
    )
    return vectors


def fields() -> list[dict[str, Any]]:
    """Each field of each message at its limits and beyond; ``@`` stands for the field's value."""
    vectors = []

    def add(kind: str, field: str, type_: str, given: dict[str, Any], *, inside: str = "") -> None:
        inner = {**(given[inside] if inside else given), field: "@"}
        whole = {**given, inside: inner} if inside else inner
        inside_range, beyond = LIMITS[type_]
        vectors.append(
            {
                "direction": direction(kind),
                "type": kind,
                "field": f"{inside}.{field}" if inside else field,
                "is": type_,
                "template": text_of({"type": kind, **whole}).replace('"@"', "@"),
                "accepted": inside_range,
                "refused": beyond,
            }
        )

    for kind, declared in FIELDS.items():
        for name, type_ in declared.items():
            add(kind, name, type_ if isinstance(type_, str) else type_[0], LEAST[kind])
    for name, type_ in {"hash": "hash", "size": "size", "chunk": "chunk", "sources": "sources"}.items():
        add("offer", name, type_, LEAST["offer"], inside="blob")
    task = {**LEAST["task"], "augmentation": {"multiples": {}, "seed": 0}}
    for name, type_ in {"multiples": "multiples", "seed": "count", "stored": "boolean"}.items():
        add("task", name, type_, task, inside="augmentation")
    return vectors


def refused() -> list[dict[str, Any]]:
    """What a receiver drops, and why: ``long``, ``json``, ``type``, ``missing``."""
    here = text_of({"type": "here", **LEAST["here"]})
    vectors: list[dict[str, Any]] = [
        {
            "why": "missing",
            "direction": direction(kind),
            "type": kind,
            "json": text_of({"type": kind, **rest}),
        }
        for kind, given in LEAST.items()
        for rest in ({name: value for name, value in given.items() if name != left} for left in given)
    ]
    for part in REF:
        blob = {name: value for name, value in REF.items() if name != part}
        text = text_of({"type": "offer", **LEAST["offer"], "blob": blob})
        vectors.append({"why": "missing", "direction": "up", "type": "offer", "json": text})

    def add(why: str, text: str | bytes, *, kind: str = "here", toward: str = "up", **more: Any) -> None:
        content = {"json": text} if isinstance(text, str) else {"hex": text.hex()}
        vectors.append({"why": why, "direction": toward, "type": kind, **content, **more})

    add("long", here, padded_to=16_385)
    for text in ["", "{", here[:-1], here + "}", here + "\0", here.replace(":", "="), here.replace('"', "'")]:
        add("json", text)
    add("json", "\ufeff" + here)
    add("json", here[:-1] + ",}")
    add("json", here.replace("612", "0612"))
    add("json", here.replace("612", "NaN"))
    add("json", here.encode("utf-16-le"))
    reason = text_of({"type": "declined", **LEAST["declined"]}).encode()
    for bad in (b"\xff", b"\xc0\xaf", b"\xed\xa0\x80", b"\t", b"\\x41", b"\\ud800"):
        add("json", reason.replace(b"not charging", bad), kind="declined")
    for text in ["null", "[]", '"here"', "0", here.replace("here", "Here"), here.replace("here", "hero")]:
        add("type", text)
    add("type", here.replace('"here"', "null"))
    add("type", here.replace('"type":"here",', ""))
    add("type", here, kind="join")
    add("type", here, toward="down")
    add("type", text_of({"type": "who", **LEAST["who"]}), kind="who")
    add("type", text_of({"type": "key", **KEY}), kind="key")
    return vectors


def numbers() -> list[dict[str, str]]:
    """What the text of a number stands for: the nearest float64."""
    written = {"0.1": 0.1, "-0": -0.0, "007": 7.0, "5e-324": 5e-324, "2.4703282292062327e-324": 0.0}
    written |= {"2.4703282292062328e-324": 5e-324, "1.7976931348623157e308": 1.7976931348623157e308}
    written |= {"9007199254740993": 9007199254740992.0, "0.30000000000000004": 0.1 + 0.2, "1E+2": 100.0}
    return [{"text": text, "float64": value.hex()} for text, value in written.items()]


def messages() -> str:
    beyond = [{"text": text} for text in ("1e309", "-1e309", "1.7976931348623159e308")]
    return document(
        {
            "accepted": accepted(),
            "fields": fields(),
            "refused": refused(),
            "numbers": numbers(),
            "numbers_refused": beyond,
        }
    )
