"""Files that are there whole or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

from edge_sdk.errors import EdgeError


def write_atomically(path: Path, data: bytes) -> None:
    """Replace ``path`` by a file with ``data``, durably: after a crash it is the old one or the new one.

    Raises:
        EdgeError: the file cannot be written; what was there before is still there.
    """
    try:
        replace(path, data)
    except OSError as error:
        raise EdgeError(f"{path} cannot be written: {error.strerror}") from None


def replace(path: Path, data: bytes) -> None:
    """As :func:`write_atomically`, for who tells of an OSError in words of his own."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        _sync_folder(path.parent)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def _sync_folder(path: Path) -> None:
    """Make the names in a folder durable; without it a power cut may bring the old file back."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def check_writable(path: Path) -> None:
    """Raise EdgeError, before work that may take days, if its result could not be written to ``path``."""
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise EdgeError(f"{path} cannot be written: give the path of a file in a folder that can be")
