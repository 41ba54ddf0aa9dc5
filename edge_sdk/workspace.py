"""A device's work folder: its identity, the blobs that it has, and its finished but unsent update.

Only one client uses a folder at a time; everything in it is written whole or not at all.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
from pathlib import Path
from typing import TypeVar

import msgspec

from edge_sdk.errors import ProtocolError, RunError
from edge_sdk.files import replace
from edge_sdk.partial import FLUSH_EVERY, Partial, writing
from edge_sdk.protocol import check_id, chunk_count
from edge_sdk.protocol.messages import Key, Offer, Ref
from edge_sdk.tensors import sha256

_T = TypeVar("_T", bound=msgspec.Struct)

KEPT_BLOBS = 8
"""Blobs kept: the bundle, the newest models, an update, what rounds hand on; the least recently used goes
first."""
KEPT_PARTIALS = 2
"""Unfinished downloads kept: a run's bundle and its model."""
LEFT = ".*.????????"
"""Names of files that were never finished."""
_TOKEN = re.compile("[0-9a-f]{16,32}")
_NEXT = 2 * 10**9  # ns; the coarsest file system counts in steps of 2 s


class Newest(msgspec.Struct, frozen=True):
    """The newest model on the device: hex SHA-256 of its bundle and of its weights."""

    bundle: str
    model: str


class Carried(msgspec.Struct, frozen=True):
    """What an accepted update leaves for the next of its run, by SHA-256; None for what there is not."""

    residual: str | None = None
    velocity: str | None = None


class Halfway(msgspec.Struct, frozen=True):
    """Local training that has not come to its end: which one, the epochs that are done, and what they have
    come to, by SHA-256; no velocity without local momentum."""

    training: str
    epochs: int
    weights: str
    velocity: str | None


class _Pending(msgspec.Struct, frozen=True):
    """A finished update that no receipt has come for yet, and what it will leave if it counts."""

    offer: Offer
    carried: Carried


class _Committed(msgspec.Struct, frozen=True):
    """What the last accepted updates have left: those of one attempt, and all before it."""

    run: str
    round: int
    attempt: int
    carried: Carried
    before: Carried

    @property
    def attempt_of(self) -> tuple[str, int, int]:
        """Run, round and attempt."""
        return self.run, self.round, self.attempt


class Workspace:
    """The folder at ``path``, made where it is missing and locked until :meth:`close`.

    Raises:
        RunError: the folder cannot be written, another client uses it, or its install key cannot be read.
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
        with writing():
            for unfinished in (*self.path.glob(LEFT), *(self.path / "blobs").glob(LEFT)):
                # A process was killed while it wrote.
                unfinished.unlink(missing_ok=True)
        self.open_bundle = ""
        """SHA-256 of a bundle in use, which stays here whatever else is kept."""
        self.install = self._once("install", secrets.token_hex(16))
        if not _TOKEN.fullmatch(self.install):
            # A disk has lost it; no server would take it.
            with writing():
                (self.path / "install").unlink()
            self.install = self._once("install", secrets.token_hex(16))

    def close(self) -> None:
        """Let another client use the folder."""
        self._lock.close()

    def device_id(self, given: str | None) -> str:
        """The id that the app gave, or one that is made once and kept.

        Raises:
            ProtocolError: the id may not stand in a topic.
            RunError: the one that was kept cannot be read.
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
        with contextlib.suppress(OSError):
            self._mark_used(path)
        return data

    def keep(self, data: bytes) -> str:
        """Keep a blob; returns its SHA-256. The least recently used beyond KEPT_BLOBS are removed.

        Raises:
            RunError: the disk is full, or cannot be written.
        """
        digest = sha256(data)
        path = self._blob_path(digest)
        with writing():
            replace(path, data)
            self._mark_used(path)
            protected = {digest, self.open_bundle, *self._referenced()}
            for other in self._blobs()[:-KEPT_BLOBS]:
                if other.name not in protected:
                    other.unlink(missing_ok=True)
            self._drop_partial(digest)
        return digest

    def partial(self, ref: Ref) -> Partial | None:
        """Where the download of a blob is kept until it is whole; None for one that is too small for that.

        Raises:
            RunError: the disk is full, or cannot be written.
        """
        if chunk_count(ref) <= FLUSH_EVERY:
            return None
        self._blob_path(ref.hash)
        with writing():
            others = [path for path in (self.path / "partial").glob("*.part") if path.stem != ref.hash]
            for path in sorted(others, key=_when)[: 1 - KEPT_PARTIALS]:
                self._drop_partial(path.stem)
        return Partial(self.path / "partial", ref)

    def _drop_partial(self, digest: str) -> None:
        for suffix in (".part", ".map"):
            (self.path / "partial" / f"{digest}{suffix}").unlink(missing_ok=True)

    def _blobs(self) -> list[Path]:
        """The blobs, the least recently used first."""
        return sorted((self.path / "blobs").glob("[0-9a-f]*"), key=_when)

    def _mark_used(self, path: Path) -> None:
        # A file's time is a counter here: a device's clock may stand in 1970.
        last = max(_when(blob) for blob in self._blobs())
        os.utime(path, ns=(last + _NEXT, last + _NEXT))

    @property
    def newest(self) -> Newest | None:
        """The newest model on the device, if there is one."""
        return self._read("newest.json", Newest)

    def set_newest(self, newest: Newest) -> None:
        """Remember the newest model, whose blobs are kept."""
        self._write("newest.json", newest)

    @property
    def pending(self) -> Offer | None:
        """The finished update that no receipt has come for yet."""
        pending = self._read("pending.json", _Pending)
        return pending.offer if pending is not None else None

    def set_pending(
        self, offer: Offer, update: bytes, *, residual: bytes | None = None, velocity: bytes | None = None
    ) -> None:
        """Keep a finished update until its receipt, over restarts.

        Args:
            residual: what the update's codec has lost, for the next update of the run if this one counts.
            velocity: the local velocity, for the next update likewise.
        """
        self.keep(update)
        kept = [self.keep(tensors) if tensors is not None else None for tensors in (residual, velocity)]
        self._write("pending.json", _Pending(offer, Carried(*kept)))
        with writing():
            (self.path / "halfway.json").unlink(missing_ok=True)

    def clear_pending(self, *, accepted: bool) -> None:
        """The update has its receipt; only if it counts, the next of its run goes on from what it left."""
        pending = self._read("pending.json", _Pending)
        if accepted and pending is not None:
            offer = pending.offer
            last = self._read("carried.json", _Committed)
            # Turns of a chain, and a receipt that is repeated, belong to one attempt.
            same = last is not None and last.attempt_of == (offer.run, offer.round, offer.attempt)
            before = last.before if last is not None and same else self._carried(offer)
            committed = _Committed(offer.run, offer.round, offer.attempt, pending.carried, before)
            self._write("carried.json", committed)
        with writing():
            (self.path / "pending.json").unlink(missing_ok=True)

    @property
    def halfway(self) -> Halfway | None:
        """The local training that has not come to its end."""
        return self._read("halfway.json", Halfway)

    def set_halfway(self, training: str, epochs: int, weights: bytes, velocity: bytes | None) -> None:
        """Keep what ``epochs`` of a training have come to, until it has an update or another takes its place.

        Raises:
            RunError: the disk is full, or cannot be written.
        """
        kept = Halfway(
            training,
            epochs,
            weights=self.keep(weights),
            velocity=self.keep(velocity) if velocity is not None else None,
        )
        self._write("halfway.json", kept)

    def residual(self, work: Key) -> bytes | None:
        """What the codec has lost of the accepted update before ``work``, if there was one.

        An attempt that is followed by another at the same round was thrown away, and counts as never made.
        """
        return self._blob_if_any(self._carried(work).residual)

    def velocity(self, work: Key) -> bytes | None:
        """The local velocity that the accepted update before ``work`` has left, as for :meth:`residual`."""
        return self._blob_if_any(self._carried(work).velocity)

    def _carried(self, work: Key) -> Carried:
        last = self._read("carried.json", _Committed)
        if last is None or last.run != work.run:
            return Carried()
        return last.before if last.round == work.round and last.attempt < work.attempt else last.carried

    def _referenced(self) -> set[str]:
        newest, pending = self.newest, self._read("pending.json", _Pending)
        committed = self._read("carried.json", _Committed)
        left = [committed.carried, committed.before] if committed is not None else []
        kept = {newest.bundle, newest.model} if newest is not None else set()
        if (halfway := self.halfway) is not None:
            kept |= {halfway.weights, halfway.velocity or halfway.weights}
        if pending is not None:
            kept.add(pending.offer.blob.hash)
            left.append(pending.carried)
        return kept | {
            digest for one in left for digest in (one.residual, one.velocity) if digest is not None
        }

    def _blob_if_any(self, digest: str | None) -> bytes | None:
        return self.blob(digest) if digest is not None else None

    def _blob_path(self, digest: str) -> Path:
        if len(digest) != 64 or not set(digest) <= set("0123456789abcdef"):
            raise ProtocolError(f"{digest[:80]!r} is not a SHA-256")
        return self.path / "blobs" / digest

    def _write(self, name: str, note: msgspec.Struct) -> None:
        with writing():
            replace(self.path / name, msgspec.json.encode(note))

    def _once(self, name: str, value: str) -> str:
        path = self.path / name
        if not path.exists():
            with writing():
                replace(path, value.encode())
        try:
            return path.read_text("ascii").strip()
        except (OSError, UnicodeDecodeError):
            raise RunError(f"{path} is not a file that can be read as text: remove it") from None

    def _read(self, name: str, kind: type[_T]) -> _T | None:
        try:
            return msgspec.json.decode((self.path / name).read_bytes(), type=kind)
        except (OSError, msgspec.DecodeError, RecursionError):
            return None


def _when(path: Path) -> int:
    return path.stat().st_mtime_ns
