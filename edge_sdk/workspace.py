"""A device's work folder: its identity, the blobs that it has, and its finished but unsent update.

Only one client uses a folder at a time; everything in it is written whole or not at all.
"""

from __future__ import annotations

import fcntl
import os
import secrets
from pathlib import Path
from typing import TypeVar

import msgspec

from edge_sdk.errors import ProtocolError, RunError
from edge_sdk.files import write_atomically
from edge_sdk.protocol import check_id
from edge_sdk.protocol.messages import Offer
from edge_sdk.tensors import sha256

_T = TypeVar("_T", bound=msgspec.Struct)

KEPT_BLOBS = 8
"""Blobs kept: the bundle, the newest models, an update, what rounds hand on; the least recently used goes
first."""


class Newest(msgspec.Struct, frozen=True):
    """The newest model on the device: hex SHA-256 of its bundle and of its weights."""

    bundle: str
    model: str


class Kept(msgspec.Struct, frozen=True):
    """Tensors that a run's rounds hand on, by their SHA-256: the local velocity, or what codecs lost."""

    run: str
    tensors: str


class Workspace:
    """The folder at ``path``, made where it is missing and locked until :meth:`close`.

    Raises:
        RunError: the folder cannot be written, or another client uses it.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            (self.path / "blobs").mkdir(parents=True, exist_ok=True)
            self._lock = (self.path / "lock").open("w")
        except OSError as error:
            raise RunError(f"the work folder {self.path} cannot be used: {error.strerror}") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            raise RunError(
                f"the work folder {self.path} is in use by another device on this machine"
            ) from None
        self.install = self._once("install", secrets.token_hex(16))

    def close(self) -> None:
        """Let another client use the folder."""
        self._lock.close()

    def device_id(self, given: str | None) -> str:
        """The id that the app gave, or one that is made once and kept.

        Raises:
            ProtocolError: the id may not stand in a topic.
        """
        return check_id(given if given is not None else self._once("id", f"device-{secrets.token_hex(4)}"))

    def blob(self, digest: str) -> bytes | None:
        """The blob with this SHA-256 if it is here and undamaged."""
        path = self._blob_path(digest)
        try:
            data = path.read_bytes()
        except OSError:
            return None
        if sha256(data) != digest:
            path.unlink(missing_ok=True)
            return None
        os.utime(path)
        return data

    def keep(self, data: bytes) -> str:
        """Keep a blob; returns its SHA-256. The least recently used beyond KEPT_BLOBS are removed."""
        digest = sha256(data)
        write_atomically(self._blob_path(digest), data)
        protected = {digest, *self._referenced()}
        blobs = sorted((self.path / "blobs").glob("[0-9a-f]*"), key=lambda path: path.stat().st_mtime)
        for path in blobs[: max(len(blobs) - KEPT_BLOBS, 0)]:
            if path.name not in protected:
                path.unlink(missing_ok=True)
        return digest

    @property
    def newest(self) -> Newest | None:
        """The newest model on the device, if there is one."""
        return self._read("newest.json", Newest)

    def set_newest(self, newest: Newest) -> None:
        """Remember the newest model, whose blobs are kept."""
        write_atomically(self.path / "newest.json", msgspec.json.encode(newest))

    @property
    def pending(self) -> Offer | None:
        """The finished update that no receipt has come for yet."""
        return self._read("pending.json", Offer)

    def set_pending(self, offer: Offer, update: bytes, *, residual: bytes | None = None) -> None:
        """Keep a finished update until its receipt, over restarts.

        Args:
            residual: what the update's codec has lost, for the next update of the run if this one counts.
        """
        self.keep(update)
        (self.path / "pending-residual.json").unlink(missing_ok=True)
        if residual is not None:
            kept = Kept(offer.run, self.keep(residual))
            write_atomically(self.path / "pending-residual.json", msgspec.json.encode(kept))
        write_atomically(self.path / "pending.json", msgspec.json.encode(offer))

    def clear_pending(self, *, accepted: bool) -> None:
        """The update has its receipt; only if it counts, what its codec lost is to be made up for."""
        lost = self.path / "pending-residual.json"
        if accepted and lost.exists():
            lost.replace(self.path / "residual.json")
        lost.unlink(missing_ok=True)
        (self.path / "pending.json").unlink(missing_ok=True)

    def velocity(self, run: str) -> bytes | None:
        """The local velocity that an earlier round of ``run`` has left, if there is one."""
        return self._kept("velocity.json", run)

    def residual(self, run: str) -> bytes | None:
        """What the codec of the run's last accepted update has lost, if there was one."""
        return self._kept("residual.json", run)

    def set_velocity(self, run: str, tensors: bytes) -> None:
        """Keep the local velocity for the next round of ``run``, over restarts."""
        kept = Kept(run, self.keep(tensors))
        write_atomically(self.path / "velocity.json", msgspec.json.encode(kept))

    def _referenced(self) -> set[str]:
        newest, pending = self.newest, self.pending
        kept = {newest.bundle, newest.model} if newest else set()
        for name in ("velocity.json", "residual.json", "pending-residual.json"):
            handed_on = self._read(name, Kept)
            kept |= {handed_on.tensors} if handed_on else set()
        return kept | ({pending.blob.hash} if pending else set())

    def _kept(self, name: str, run: str) -> bytes | None:
        kept = self._read(name, Kept)
        return self.blob(kept.tensors) if kept is not None and kept.run == run else None

    def _blob_path(self, digest: str) -> Path:
        if len(digest) != 64 or not set(digest) <= set("0123456789abcdef"):
            raise ProtocolError(f"{digest[:80]!r} is not a SHA-256")
        return self.path / "blobs" / digest

    def _once(self, name: str, value: str) -> str:
        path = self.path / name
        if not path.exists():
            write_atomically(path, value.encode())
        return path.read_text().strip()

    def _read(self, name: str, kind: type[_T]) -> _T | None:
        try:
            return msgspec.json.decode((self.path / name).read_bytes(), type=kind)
        except (OSError, msgspec.DecodeError):
            return None
