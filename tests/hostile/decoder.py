"""What a decoder under test is, and the golden vectors as its honest seeds."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edge_sdk.errors import EdgeError
from hostile.mutations import Mutation

VECTORS = Path(__file__).parents[1] / "vectors"


@dataclass(frozen=True)
class Decoder:
    """One decoder and all that is done at once with what it has read.

    Attributes:
        read: takes bytes; AssertionError where what was taken is not what it should be.
        seeds: honest inputs.
        refuses: the errors that it documents.
        inside: mutations that leave a container sound, so that what is in it is reached.
    """

    name: str
    read: Callable[[bytes], None]
    seeds: list[bytes]
    refuses: tuple[type[EdgeError], ...]
    inside: tuple[Mutation, ...] = field(default=())


def vectors(name: str) -> dict[str, list[dict[str, Any]]]:
    document: dict[str, list[dict[str, Any]]] = json.loads((VECTORS / name).read_text(encoding="utf-8"))
    return document
