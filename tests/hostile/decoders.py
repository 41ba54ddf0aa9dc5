"""Every decoder of what others send or of what lies on a disk."""

from __future__ import annotations

from hostile import disk, results, wire
from hostile.decoder import Decoder


def decoders() -> list[Decoder]:
    """All of them, each with its honest seeds."""
    return [*wire.decoders(), *results.decoders(), *disk.decoders()]
