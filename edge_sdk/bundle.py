"""The bundle: one ``.edge`` file with all that a device needs to train, evaluate and predict.

It is a zip whose members are stored, not compressed, so that no member can expand. docs/bundle.md
specifies it.
"""

from __future__ import annotations

import io
import os
import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from edge_sdk.errors import BundleError, TensorError
from edge_sdk.files import write_atomically
from edge_sdk.manifest import Manifest, Member, parse_manifest
from edge_sdk.tensors import Array, Tensors, check, decode, encode, sha256

MANIFEST = "manifest.json"
WEIGHTS = "weights.safetensors"
MAX_BYTES = 1 << 31
MAX_MANIFEST_BYTES = 8 << 20
MAX_MEMBERS = 64
_MEMBER_NAME = re.compile(r"[a-z0-9_]+(?:[./-][a-z0-9_]+)*")


@dataclass(frozen=True, slots=True)
class Bundle:
    """A bundle in memory, verified: what it says is what it holds.

    Make one with :meth:`read` or :meth:`build`. ``data`` is the file, byte for byte.
    """

    manifest: Manifest
    data: bytes

    @classmethod
    def read(cls, source: str | os.PathLike[str] | bytes) -> Bundle:
        """Read a bundle from a path or from the bytes of one, and verify every member.

        Raises:
            BundleError: the file is missing, over 2 GiB, truncated, tampered with, of an unknown schema,
                or holds a member with a path or a size that the manifest does not declare.
        """
        label = "the bundle" if isinstance(source, bytes) else f"{os.fspath(source)}"
        data = source if isinstance(source, bytes) else _read_bytes(Path(source))
        try:
            members = _members(data)
            if MANIFEST not in members:
                raise BundleError("not a bundle: it has no manifest.json")
            manifest = parse_manifest(members.get(MANIFEST, b""))
            _verify(manifest, members)
            decode(members[WEIGHTS], manifest.specs)
        except (BundleError, TensorError) as error:
            raise BundleError(f"{label}: {error}") from None
        return cls(manifest, data)

    @classmethod
    def build(cls, manifest: Manifest, weights: Mapping[str, Array], programs: Mapping[str, bytes]) -> Bundle:
        """Make a bundle; the same arguments give the same bytes.

        Args:
            manifest: its ``members`` are filled in here.
            weights: one array for each of the manifest's parameters.
            programs: member path to bytes, as the manifest's ``runtimes``, ``backbone`` and ``describe``
                name them.

        Raises:
            TensorError: the weights, or the tensors of the hash, are not those that the manifest declares.
            BundleError: a member's path is not allowed, or a named program is missing.
        """
        check(weights, manifest.specs)
        members = {WEIGHTS: encode(weights), **programs}
        manifest = msgspec.structs.replace(
            manifest, members={name: Member(len(data), sha256(data)) for name, data in members.items()}
        )
        text = msgspec.json.format(msgspec.json.encode(manifest, order="sorted"), indent=1)
        parse_manifest(text)
        _verify(manifest, members)
        return cls(manifest, _zip({MANIFEST: text, **members}))

    @property
    def sha256(self) -> str:
        """Hex SHA-256 of the file: the name by which a run tells bundles apart."""
        return sha256(self.data)

    @property
    def weights(self) -> Tensors:
        """Fresh copies of the weights and buffers, by name."""
        return decode(self.member(WEIGHTS), self.manifest.specs)

    def member(self, name: str) -> bytes:
        """The bytes of one member.

        Raises:
            BundleError: there is no such member.
        """
        try:
            with zipfile.ZipFile(io.BytesIO(self.data)) as archive:
                return archive.read(name)
        except KeyError:
            raise BundleError(f"the bundle {self.manifest.name!r} has no member {name!r}") from None

    def program(self, runtime: str, method: str) -> bytes:
        """The program that ``runtime`` (``onnx``) uses for ``method`` (``train``, ``predict``, …).

        Raises:
            BundleError: the bundle was not exported for that runtime.
        """
        programs = self.manifest.runtimes.get(runtime)
        if programs is None:
            raise BundleError(
                f"the bundle {self.manifest.name!r} holds no {runtime} programs, only "
                f"{', '.join(sorted(self.manifest.runtimes))}: export it with --runtime {runtime}"
            )
        return self.member(getattr(programs, method))

    def backbone(self, runtime: str) -> bytes:
        """The frozen network that ``runtime`` puts before the programs.

        Raises:
            BundleError: the bundle has none, or none for that runtime.
        """
        backbone = self.manifest.backbone
        if backbone is None or runtime not in backbone.programs:
            raise BundleError(f"the bundle {self.manifest.name!r} has no backbone for {runtime}")
        return self.member(backbone.programs[runtime])

    def with_weights(self, weights: Mapping[str, Array]) -> Bundle:
        """The same bundle with new weights, as a run publishes it at its end. Needs no PyTorch.

        Raises:
            TensorError: the weights are not those that the manifest declares.
        """
        names = self.manifest.members.keys() - {WEIGHTS}
        return Bundle.build(self.manifest, weights, {name: self.member(name) for name in sorted(names)})

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the file whole or not at all."""
        write_atomically(Path(path), self.data)


def _read_bytes(path: Path) -> bytes:
    try:
        if path.stat().st_size > MAX_BYTES:
            raise BundleError(f"{path}: larger than the limit of {MAX_BYTES} bytes")
        return path.read_bytes()
    except OSError as error:
        raise BundleError(f"{path}: cannot be read ({error.strerror})") from None


def _members(data: bytes) -> dict[str, bytes]:
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            infos = archive.infolist()
            names = [info.filename for info in infos]
            if len(infos) > MAX_MEMBERS or len(set(names)) != len(names):
                raise BundleError(f"more than {MAX_MEMBERS} members, or one of them twice")
            for info in infos:
                _check_member(info, len(data))
            if sum(info.file_size for info in infos) > len(data):
                raise BundleError("its members lie in one another: together they are larger than the file")
            return {info.filename: archive.read(info) for info in infos}
    except (zipfile.BadZipFile, EOFError, ValueError, NotImplementedError, OSError, RuntimeError) as error:
        raise BundleError(f"not a bundle, or a truncated one ({error})") from None


def _check_member(info: zipfile.ZipInfo, total: int) -> None:
    if not _MEMBER_NAME.fullmatch(info.filename):
        raise BundleError(f"member path {info.filename[:80]!r} is not allowed")
    if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
        raise BundleError(f"member {info.filename} is compressed; bundles store their members")
    if info.file_size > total or (info.filename == MANIFEST and info.file_size > MAX_MANIFEST_BYTES):
        raise BundleError(f"member {info.filename} declares {info.file_size} bytes, over its limit")


def _verify(manifest: Manifest, members: Mapping[str, bytes]) -> None:
    if any(not _MEMBER_NAME.fullmatch(name) for name in members):
        raise BundleError("a member's path is not allowed: lower-case letters, digits, _ . - and / only")
    named = {getattr(p, method) for p in manifest.runtimes.values() for method in p.__struct_fields__}
    if manifest.backbone is not None:
        named |= {*manifest.backbone.programs.values()}
    if manifest.describe is not None:
        named |= {manifest.describe.lsh, *manifest.describe.programs.values()}
    if missing := sorted((named | {WEIGHTS}) - members.keys()):
        raise BundleError(f"member {missing[0]} is missing")
    if manifest.members.keys() != members.keys() - {MANIFEST}:
        raise BundleError("the members are not those that manifest.json lists")
    for name, declared in manifest.members.items():
        if len(members[name]) != declared.size or sha256(members[name]) != declared.sha256:
            raise BundleError(f"member {name} is not the one that manifest.json describes (SHA-256 differs)")
    if manifest.describe is not None:
        decode(members[manifest.describe.lsh], manifest.describe.specs)


def _zip(members: Mapping[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name in sorted(members, key=lambda name: (name != MANIFEST, name)):
            info = zipfile.ZipInfo(name, date_time=(1980, 1, 1, 0, 0, 0))
            info.external_attr = 0o644 << 16
            info.create_system = 3
            archive.writestr(info, members[name])
    return buffer.getvalue()
