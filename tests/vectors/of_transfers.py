"""Topics, and a blob in chunks: which of those that arrive are taken, and what is granted next."""

from __future__ import annotations

import hashlib
import json
import struct
from typing import Any

from vectors.plain import document
from vectors.specified import HASH

SIZE, CHUNK = 4 * 1024 + 100, 1024
BLOB = b"".join(hashlib.sha256(bytes([n])).digest() for n in range(132))[:SIZE]
HASH_OF_BLOB = hashlib.sha256(BLOB).hexdigest()
REF = {"hash": HASH_OF_BLOB, "size": SIZE, "chunk": CHUNK}


def topics() -> str:
    base, model = "edge/v1/lab-3", f"edge/v1/lab-3/model/{HASH}"
    built = [
        {"of": "up", "device": "pi-7", "type": "join", "topic": f"{base}/up/pi-7/join"},
        {"of": "up", "device": "pi-7", "type": "chunk", "topic": f"{base}/up/pi-7/chunk"},
        {"of": "down", "device": "a.b_c-D", "type": "task", "topic": f"{base}/down/a.b_c-D/task"},
        {"of": "all", "type": "who", "topic": f"{base}/all/who"},
        *(
            {"of": "model", "hash": HASH, "index": index, "topic": f"{model}/{index // 256}/{index}"}
            for index in (0, 255, 256, 2_097_151)
        ),
        *({"of": "block", "hash": HASH, "block": n, "topic": f"{model}/{n}/+"} for n in (0, 8191)),
    ]
    longest = "x" * 64
    ours = [
        {"topic": "edge/v1/lab-3/up/pi-7/join", "direction": "up", "device": "pi-7", "type": "join"},
        {"topic": "edge/v1/lab-3/down/pi-7/chunk", "direction": "down", "device": "pi-7", "type": "chunk"},
        {"topic": "edge/v1/lab-3/all/finished", "direction": "all", "device": "", "type": "finished"},
        {"topic": f"{model}/1/256", "direction": "model", "device": "", "type": "chunk"},
        {"topic": f"{base}/up/{longest}/offer", "direction": "up", "device": longest, "type": "offer"},
    ]
    others = [
        "",
        "edge/v1/lab-3",
        f"{base}/",
        f"{base}/up/pi-7",
        f"{base}/up/pi-7/join/x",
        f"{base}/up//join",
    ]
    others += [
        f"{base}/up/../join",
        f"{base}/up/a..b/join",
        f"{base}/up/+/join",
        f"{base}/up/{longest}x/join",
    ]
    others += ["edge/v1/lab/up/pi-7/join", "edge/v1/lab-33/up/pi-7/join", "edge/v2/lab-3/up/pi-7/join"]
    others += [f"/{base}/up/pi-7/join", f"{base}/sideways/pi-7/join", f"{base}/UP/pi-7/join", f"{model}/1"]
    others += [f"{base}/all/pi-7/who", f"{base}/up/pi-7\n/join", f"{base}/up/\uff50i/join", "$SYS/broker"]
    allowed = ["a", "7", "pi-7", "a.b.c", "A_b-C", "a.", "x" * 64]
    refused = ["", ".", "..", ".a", "a..b", "-a", "_a", "x" * 65, "a/b", "a+", "#", "$a", "a b", "a\n", "a\0"]
    refused += ["\u0430", "d\u00e9", "\uff41", "\u0661", "a\u200bb", "a\\b", "a:b", "a%2fb"]
    return document(
        {
            "built": [{"fleet": "lab-3", **vector} for vector in built],
            "ours": [{"fleet": "lab-3", **vector} for vector in ours],
            "others": [{"fleet": "lab-3", "topic": topic} for topic in others],
            "ids": [{"id": text} for text in allowed],
            "ids_refused": [{"id": text} for text in refused],
        }
    )


def chunk(index: int, part: bytes, *, blob: str = HASH_OF_BLOB, magic: bytes = b"EDC1") -> bytes:
    digest = hashlib.sha256(part).digest()[:16]
    return magic + bytes.fromhex(blob) + struct.pack(">I", index) + digest + part


def part(index: int) -> bytes:
    return BLOB[index * CHUNK : (index + 1) * CHUNK]


COUNT = 5
CHUNKS = {str(index): chunk(index, part(index)) for index in range(COUNT)}
# Right in themselves, but nothing that this transfer misses.
FOREIGN = {
    "of another blob": chunk(0, part(0), blob=HASH),
    "cut otherwise": chunk(0, BLOB[:2048]),
    "too short": chunk(0, part(0)[:-1]),
    "the last too long": chunk(4, BLOB[-CHUNK:]),
    "beyond the end": chunk(5, part(0)),
    "far beyond the end": chunk(0xFFFFFFFF, part(0)),
    "another chunk's number": chunk(4, part(3)),
}
DAMAGED = {
    "nothing": b"",
    "a header without a part": CHUNKS["0"][:56],
    "cut in its header": CHUNKS["0"][:55],
    "cut in its part": CHUNKS["0"][:-1],
    "longer than its hash says": CHUNKS["0"] + b"\0",
    "another magic": chunk(0, part(0), magic=b"EDC2"),
    "a bit of the part flipped": CHUNKS["0"][:-1] + bytes([CHUNKS["0"][-1] ^ 1]),
    "a bit of the hash flipped": CHUNKS["0"][:40] + bytes([CHUNKS["0"][40] ^ 1]) + CHUNKS["0"][41:],
}
FORGED = {"forged 2": chunk(2, part(0))}


def grant(missing: set[int], window: int) -> list[int] | None:
    """``start`` and ``stop`` of the grant for the first missing range of at most ``window`` chunks."""
    if not missing:
        return None
    start = stop = min(missing)
    while stop in missing and stop - start < window:
        stop += 1
    return [start, stop]


def transfer(fact: str, window: int, arriving: list[str]) -> dict[str, Any]:
    """What a receiver makes of the payloads that arrive, one after the other."""
    missing, parts, steps = set(range(COUNT)), {}, []
    first = grant(missing, window)
    for name in arriving:
        number = name.removeprefix("forged ")
        taken = name in CHUNKS | FORGED and int(number) in missing
        if taken:
            missing.discard(int(number))
            parts[int(number)] = (CHUNKS | FORGED)[name][56:]
        whole = None
        if not missing:
            whole = "right" if b"".join(parts[index] for index in range(COUNT)) == BLOB else "wrong"
        if whole == "wrong":
            missing = set(range(COUNT))
        steps.append({"payload": name, "taken": taken, "whole": whole, "grant": grant(missing, window)})
    return {"fact": fact, "window": window, "grant": first, "steps": steps}


def upload() -> dict[str, Any]:
    """The server's side, in time: what it grants at its ticks."""
    offer = {"type": "offer", "run": "f" * 32, "round": 1, "attempt": 0, "kind": "train", "blob": REF}
    return {
        "fact": "the chunks 1 and 3 are lost; a range is granted again 6 s after its last chunk",
        "offer": json.dumps({**offer, "examples": 9}, separators=(",", ":")),
        "steps": [
            {"at": "0.0", "grants": [[0, 5]]},
            {"at": "1.0", "payload": "0"},
            {"at": "1.0", "payload": "4"},
            {"at": "1.0", "payload": "2"},
            {"at": "6.9", "grants": []},
            {"at": "7.1", "grants": [[1, 2]]},
            {"at": "7.2", "payload": "2"},
            {"at": "7.2", "payload": "1"},
            {"at": "7.2", "grants": [[3, 4]]},
            {"at": "8.0", "payload": "3"},
            {"at": "8.0", "grants": []},
        ],
    }


def transfers() -> str:
    payloads = {**CHUNKS, **FOREIGN, **DAMAGED, **FORGED}
    return document(
        {
            "blob": [{"hex": BLOB.hex(), "ref": json.dumps(REF, separators=(",", ":")), "chunks": COUNT}],
            "payloads": [
                {
                    "payload": name,
                    "hex": payload.hex(),
                    "is": "damaged" if name in DAMAGED else "foreign" if name in FOREIGN else "of the blob",
                }
                for name, payload in payloads.items()
            ],
            "downloads": [
                transfer("in order", 2, list("01234")),
                transfer("the last first", 16, list("43210")),
                transfer("lost and doubled", 3, list("0200142133")),
                transfer("others, and damage, in between", 16, ["0", *FOREIGN, "2", *DAMAGED, "1", "4", "3"]),
                transfer(
                    "forged, so that all is fetched again", 16, ["forged 2", *"0213", "2", *"4", *"01234"]
                ),
            ],
            "uploads": [upload()],
        }
    )
