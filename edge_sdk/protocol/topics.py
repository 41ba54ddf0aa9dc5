"""Topics under ``edge/v1/<fleet>/`` and the ids that may enter them. At most seven slashes (AWS)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from edge_sdk.errors import ProtocolError

ROOT = "edge/v1"
BLOCK = 256
"""Chunks in one block of a published blob; below any broker's queue for one subscriber."""

_ID = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_-]|\.(?!\.)){0,63}", re.ASCII)


def check_id(text: str, what: str = "device id") -> str:
    """Return ``text`` if it may stand in a topic and in a path, else raise ProtocolError.

    ASCII only, so that no two ids look alike; no ``/ + # $ ..``, not empty, at most 64 characters.

    >>> check_id("jetson-07")
    'jetson-07'
    """
    if not _ID.fullmatch(text):
        raise ProtocolError(
            f"{what} {text[:80]!r} is not allowed: 1 to 64 ASCII letters, digits, '_', '-' and single '.', "
            "starting with a letter or digit"
        )
    return text


@dataclass(frozen=True, slots=True)
class Topics:
    """The topics of one fleet."""

    fleet: str

    def __post_init__(self) -> None:
        check_id(self.fleet, "fleet")

    @property
    def base(self) -> str:
        """What all topics of the fleet begin with."""
        return f"{ROOT}/{self.fleet}"

    def up(self, device: str, kind: str) -> str:
        """Written by one device, read by the server."""
        return f"{self.base}/up/{device}/{kind}"

    def down(self, device: str, kind: str) -> str:
        """Written by the server, read by one device."""
        return f"{self.base}/down/{device}/{kind}"

    def all(self, kind: str) -> str:
        """Written by the server, read by every device."""
        return f"{self.base}/all/{kind}"

    def chunk(self, blob: str, index: int) -> str:
        """One retained chunk of a blob that the server has published."""
        return f"{self.base}/model/{blob}/{index // BLOCK}/{index}"

    def block(self, blob: str, block: int) -> str:
        """The subscription that takes one block of a published blob."""
        return f"{self.base}/model/{blob}/{block}/+"

    def parse(self, topic: str) -> Address | None:
        """Take a topic apart; None if it is not one of this fleet's."""
        parts = topic.removeprefix(self.base + "/").split("/")
        if not topic.startswith(self.base + "/"):
            return None
        match parts:
            case ["up" | "down" as direction, device, kind] if _ID.fullmatch(device):
                return Address("up" if direction == "up" else "down", device, kind)
            case ["all", kind]:
                return Address("all", "", kind)
            case ["model", _, _, _]:
                return Address("model", "", "chunk")
        return None


@dataclass(frozen=True, slots=True)
class Address:
    """What a topic says: the direction, the device (empty for ``all`` and ``model``), the kind."""

    direction: Literal["up", "down", "all", "model"]
    device: str
    kind: str
