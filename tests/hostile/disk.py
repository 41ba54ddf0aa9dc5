"""What lies on a disk: data sets, a device's work folder, a run's configuration."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from edge_sdk.data import load, prepare
from edge_sdk.errors import DataError, EdgeError, ProtocolError, RunError
from edge_sdk.manifest import Input
from edge_sdk.protocol import Incoming
from edge_sdk.protocol.messages import Join, Offer, decode_from_device, encode, to_number
from edge_sdk.workspace import Workspace
from edge_server.config import make_config, read_toml
from hostile.decoder import Decoder
from hostile.mutations import METHODS, Draw, members_of, mutated, mutated_json, mutated_npz, zip_of
from hostile.wire import REF


class _Disk:
    """A temporary folder, made when it is first needed."""

    def __init__(self) -> None:
        self._made: tuple[int, tempfile.TemporaryDirectory[str]] | None = None

    @property
    def path(self) -> Path:
        # A forked process has a folder of its own.
        if self._made is None or self._made[0] != os.getpid():
            self._made = (os.getpid(), tempfile.TemporaryDirectory(prefix="hostile-"))
        return Path(self._made[1].name)

    def folder(self, name: str, files: Mapping[str, bytes]) -> Path:
        folder = self.path / name
        folder.mkdir(exist_ok=True)
        for file, data in files.items():
            (folder / file).write_bytes(data)
        return folder


DISK = _Disk()


def _data_set(
    name: str, file: str, shape: tuple[int, int, int], others: Mapping[str, bytes] | None = None
) -> Callable[[bytes], None]:
    wanted = Input(shape, (0.0,) * shape[0], (1.0,) * shape[0])

    def read(data: bytes) -> None:
        folder = DISK.folder(name, {file: data, **(others or {})})
        dataset = load(folder / file if file.endswith(".npz") else folder, split="train", input=wanted)
        for index in range(min(len(dataset), 3)):
            prepare(dataset, np.array([index]), wanted, 10)

    return read


def _idx(shape: tuple[int, ...]) -> bytes:
    header = bytes([0, 0, 8, len(shape)]) + b"".join(extent.to_bytes(4, "big") for extent in shape)
    return (
        header
        + bytes(range(int(np.prod(shape)) % 256)) * 1
        + bytes(int(np.prod(shape)) - int(np.prod(shape)) % 256)
    )


def _npz(**arrays: Any) -> bytes:
    path = DISK.path / "seed.npz"
    np.savez(path, **arrays)
    return path.read_bytes()


def _images(suffix: str) -> tuple[Callable[[bytes], None], list[bytes]]:
    from PIL import Image

    Image.init()
    pixels = np.random.default_rng(0).integers(0, 256, (9, 7, 3), np.uint8)
    path, seeds = DISK.path / f"seed{suffix}", []
    for mode in ("RGB", "L"):
        Image.fromarray(pixels).convert(mode).save(path)
        seeds.append(path.read_bytes())
    wanted = Input((3, 8, 8), (0.0,) * 3, (1.0,) * 3)

    def read(data: bytes) -> None:
        folder = DISK.path / f"images{suffix}"
        (folder / "cat").mkdir(parents=True, exist_ok=True)
        (folder / "cat" / f"one{suffix}").write_bytes(data)
        prepare(load(folder, input=wanted), np.array([0]), wanted, 10)

    return read, seeds


_KEY = {"run": "f" * 32, "round": 3, "attempt": 1, "kind": "train", "hop": 0}
_OFFER = Offer(**_KEY, blob=REF, examples=5)


def _notes(data: bytes) -> None:
    """The notes of a work folder; each may be any of them."""
    folder = DISK.folder("work", dict.fromkeys(("newest.json", "pending.json", "carried.json"), data))
    workspace = Workspace(folder)
    try:
        for read in (lambda: workspace.newest, lambda: workspace.pending):
            read()
        if workspace.newest is not None:
            workspace.blob(workspace.newest.model)
        workspace.residual(_OFFER), workspace.velocity(_OFFER)
        workspace.keep(b"a blob")
        workspace.clear_pending(accepted=True)
        workspace.keep(b"another")
    finally:
        workspace.close()


def _seeds_of_notes() -> list[bytes]:
    folder = DISK.folder("seeds of notes", {})
    workspace = Workspace(folder)
    workspace.set_pending(_OFFER, b"update", residual=b"residual", velocity=b"velocity")
    seeds = [(folder / "pending.json").read_bytes()]
    workspace.clear_pending(accepted=True)
    seeds.append((folder / "carried.json").read_bytes())
    workspace.close()
    return [*seeds, json.dumps({"bundle": "a" * 64, "model": "b" * 64}).encode()]


def _identity(data: bytes) -> None:
    """The files by which a device is known: what they say must be fit for a message and a topic."""
    folder = DISK.path / "identity"
    shutil.rmtree(folder, ignore_errors=True)
    DISK.folder("identity", {"install": data, "id": data})
    workspace = Workspace(folder)
    try:
        join = Join(sdk="", install=workspace.install, boot="0" * 16, nonce="0" * 16, examples=1)
        assert decode_from_device("join", encode(join)) == join
        workspace.device_id(None)
    finally:
        workspace.close()


def _partial(data: bytes) -> None:
    """The map of an unfinished download, beside a file that may be shorter than it says."""
    ref = msgspec.structs.replace(REF, chunk=1024, size=40_000)
    folder = DISK.path / "downloads"
    DISK.folder("downloads", {})
    (folder / "partial").mkdir(exist_ok=True)
    (folder / "partial" / f"{ref.hash}.map").write_bytes(data)
    (folder / "partial" / f"{ref.hash}.part").write_bytes(data[:3000])
    workspace = Workspace(folder)
    try:
        storage = workspace.partial(ref)
        assert storage is not None
        try:
            incoming = Incoming(ref, limit=ref.size, storage=storage)
            incoming.next_range(16)
            with contextlib.suppress(ProtocolError):
                incoming.finish()
            assert incoming.next_range(1) is not None, "a download that is not whole asks for nothing"
        finally:
            storage.close()
    finally:
        workspace.close()


_CONFIGS = [
    b"""fleet = "lab-3"
rounds = 40
strategy = "fedavgm"
momentum = 0.9
server_lr = 1.0
participants = 0.1
lr = 0.05
schedule = "cosine"
weight_decay = 1e-4
max_norm = 10
clip_norm = 1.0
proximal = 0.0
seed = 7
deadline = 30.0
codec = "int8"
[bounds]
mean = 6
""",
    b'fleet = "a"\nrounds = 1\nstrategy = "fedadam"\nserver_lr = 0.01\ntau = 1e-3\nbeta2 = 0.99\n',
    b'fleet = "a"\nrounds = 3\nchain = 5\naugmentation = 0.67\nselection = "grouped"\nparticipants = 4\n',
    b'fleet = "a"\nrounds = 3\ncalibration = "ccvr"\ncovariance = "low_rank"\ncovariance_rank = 16\n',
    b'fleet = "a"\nrounds = 3\naggregation = "trimmed_mean"\ntrim = 0.2\ngrace = 0.0\nover_selection = 1.5\n',
    b'fleet = "a"\nrounds = 3\nlocal_momentum = 0.9\nkeep_momentum = true\nschedule = "exponential"\n',
]


def _config(data: bytes) -> None:
    folder = DISK.folder("config", {"run.toml": data})
    config = make_config(read_toml(folder / "run.toml"))
    config.make_strategy().effective_learning_rate(0.1)
    config.precision(10)
    assert 0 <= config.cohort_size(10) <= 10
    assert config.needed() >= 1
    config.facts()
    for round_number in {1, config.rounds}:
        optimiser = config.optimiser_of(round_number)
        for value in (
            optimiser.lr,
            optimiser.weight_decay,
            optimiser.momentum,
            optimiser.proximal,
            optimiser.clip_norm,
        ):
            to_number(value)
    for name in ("deadline", "grace", "patience", "join_timeout", "max_norm", "trim", "tau", "augmentation"):
        assert np.isfinite(getattr(config, name)), f"{name} is not finite"


def _data_sets() -> list[Decoder]:
    wrong, images, labels = (DataError,), _idx((4, 5, 6)), _idx((4,))
    few = {"train-images-idx3-ubyte": images, "train-labels-idx1-ubyte": labels}
    cifar = bytes([3]) + bytes(range(256)) * 12

    def idx(name: str, file: str) -> Callable[[bytes], None]:
        others = {other: data for other, data in few.items() if not file.startswith(other)}
        return _data_set(name, file, (1, 5, 6), others)

    def compressed(draw: Draw, _data: bytes) -> bytes:
        return gzip.compress(mutated(draw, images), 1)

    arrays = [
        _npz(images=np.zeros((3, 5, 6), np.uint8), labels=np.arange(3)),
        _npz(images=np.ones((2, 5, 6, 1), np.float64), labels=np.array([1, 9], np.uint8)),
    ]
    arrays += [zip_of(members_of(arrays[0]), kind) for kind in METHODS]
    tens, hundreds = (
        _data_set(n, f, (3, 32, 32)) for n, f in (("10", "data_batch_1.bin"), ("100", "train.bin"))
    )
    return [
        Decoder("npz", _data_set("npz", "own.npz", (1, 5, 6)), arrays, wrong, (mutated_npz,)),
        Decoder("idx", idx("idx", "train-images-idx3-ubyte"), [images], wrong),
        Decoder("idx_labels", idx("labels", "train-labels-idx1-ubyte"), [labels], wrong),
        Decoder(
            "idx_gz", idx("gz", "train-images-idx3-ubyte.gz"), [gzip.compress(images)], wrong, (compressed,)
        ),
        Decoder("cifar10", tens, [cifar * 2], wrong),
        Decoder("cifar100", hundreds, [b"\1" + cifar], wrong),
    ]


def decoders() -> list[Decoder]:
    """Those of what lies on a disk; images need Pillow."""
    ids = [b"a" * 32, b"device-0a1b2c3d\n", b"0" * 16]
    download = [(40_000).to_bytes(8, "big") + (1024).to_bytes(8, "big") + bytes([255, 255, 0, 255, 127])]
    found = [
        *_data_sets(),
        Decoder("notes", _notes, _seeds_of_notes(), (EdgeError,), (mutated_json,)),
        Decoder("identity", _identity, ids, (EdgeError,)),
        Decoder("partial", _partial, download, ()),
        Decoder("config", _config, _CONFIGS, (RunError, ProtocolError)),
    ]
    with contextlib.suppress(ImportError):
        for suffix in (".png", ".jpg", ".bmp", ".gif", ".tif"):
            read, seeds = _images(suffix)
            found.append(Decoder(f"image_{suffix[1:]}", read, seeds, (DataError,)))
    return found
