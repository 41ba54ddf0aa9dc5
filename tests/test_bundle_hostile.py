"""Files that are no honest bundle: each is refused before anything in it is used. No PyTorch here."""

import io
import json
import struct
import zipfile

import numpy as np
import pytest

from edge_sdk.bundle import Bundle
from edge_sdk.errors import BundleError, TensorError
from edge_sdk.manifest import Input, Manifest, Parameter, Programs

PROGRAMS = Programs(
    train="onnx/train.onnx", evaluate="onnx/e.onnx", predict="onnx/p.onnx", embed="onnx/f.onnx"
)
WEIGHTS = {"head.weight": np.ones((2, 4), np.float32), "steps": np.array(3)}


def honest() -> Bundle:
    manifest = Manifest(
        name="tiny",
        input=Input((1, 2, 2), (0.0,), (1.0,)),
        classes=2,
        parameters=(
            Parameter("head.weight", (2, 4), "float32", "mean"),
            Parameter("steps", (), "int64", "counter"),
        ),
        head=("head.weight",),
        feature_size=4,
        runtimes={"onnx": PROGRAMS},
    )
    return Bundle.build(manifest, WEIGHTS, {path: path.encode() * 9 for path in PATHS})


PATHS = tuple(getattr(PROGRAMS, field) for field in PROGRAMS.__struct_fields__)


def members_of(bundle: Bundle) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(bundle.data)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def zipped(members: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return buffer.getvalue()


def with_manifest(**changes: object) -> bytes:
    members = members_of(honest())
    members["manifest.json"] = json.dumps({**json.loads(members["manifest.json"]), **changes}).encode()
    return zipped(members)


def with_parameter(index: int = 0, **changes: object) -> bytes:
    parameters = json.loads(members_of(honest())["manifest.json"])["parameters"]
    parameters[index] |= changes
    return with_manifest(parameters=parameters)


def test_an_honest_bundle_is_read():
    bundle = Bundle.read(honest().data)
    assert np.array_equal(bundle.weights["head.weight"], WEIGHTS["head.weight"])
    assert bundle.weights["steps"] == 3
    assert bundle.program("onnx", "train") == b"onnx/train.onnx" * 9


def test_the_same_content_gives_the_same_file():
    assert honest().data == honest().data


def test_every_truncation_is_refused():
    data = honest().data
    for length in range(0, len(data), 7):
        with pytest.raises(BundleError):
            Bundle.read(data[:length])


def test_every_flipped_byte_is_refused_or_changes_nothing():
    bundle = honest()
    for position in range(0, len(bundle.data), 3):
        damaged = bytearray(bundle.data)
        damaged[position] ^= 0x41
        try:
            read = Bundle.read(bytes(damaged))
        except BundleError:
            continue
        assert (read.manifest, read.weights.keys()) == (bundle.manifest, bundle.weights.keys())
        assert all(read.member(name) == bundle.member(name) for name in bundle.manifest.members)


def test_bytes_that_are_no_zip_are_refused():
    with pytest.raises(BundleError, match="not a bundle"):
        Bundle.read(b"GIF89a" * 100)


def test_a_compressed_member_is_refused():
    with pytest.raises(BundleError, match="is compressed"):
        Bundle.read(zipped(members_of(honest()), zipfile.ZIP_DEFLATED))


def test_a_bomb_is_refused_before_it_expands():
    bomb = zipped({**members_of(honest()), "bomb": bytes(1 << 26)}, zipfile.ZIP_DEFLATED)
    assert len(bomb) < 1 << 20
    with pytest.raises(BundleError, match="is compressed"):
        Bundle.read(bomb)


@pytest.mark.parametrize(
    "path",
    ["../evil", "/etc/passwd", "a/../../b", "C:\\evil", "a//b", ".hidden", "A", "a/", "a" * 5 + "\u202e"],
)
def test_a_path_that_could_leave_a_folder_is_refused(path):
    with pytest.raises(BundleError):
        Bundle.read(zipped({**members_of(honest()), path: b"x"}))


def test_a_member_twice_is_refused():
    buffer = io.BytesIO(honest().data)
    with zipfile.ZipFile(buffer, "a") as archive, pytest.warns(UserWarning, match="Duplicate"):
        archive.writestr("manifest.json", b"{}")
    with pytest.raises(BundleError, match="twice"):
        Bundle.read(buffer.getvalue())


def test_too_many_members_are_refused():
    many = {f"m{i}": b"" for i in range(65)}
    with pytest.raises(BundleError, match="more than 64 members"):
        Bundle.read(zipped({**members_of(honest()), **many}))


def test_a_member_that_the_manifest_does_not_list_is_refused():
    with pytest.raises(BundleError, match=r"not those that manifest\.json lists"):
        Bundle.read(zipped({**members_of(honest()), "extra": b"x"}))


def test_a_member_of_another_content_is_refused():
    members = members_of(honest())
    members["onnx/train.onnx"] = members["onnx/train.onnx"][::-1]
    with pytest.raises(BundleError, match=r"onnx/train\.onnx is not the one"):
        Bundle.read(zipped(members))


def test_a_missing_program_is_refused():
    members = members_of(honest())
    del members["onnx/p.onnx"]
    with pytest.raises(BundleError, match=r"onnx/p\.onnx is missing"):
        Bundle.read(zipped(members))


def test_a_declared_size_far_beyond_the_file_is_refused():
    data = bytearray(honest().data)
    directory = data.rindex(b"PK\x01\x02")
    data[directory + 20 : directory + 28] = struct.pack("<II", 0xFFFFFF00, 0xFFFFFF00)
    with pytest.raises(BundleError):
        Bundle.read(bytes(data))


HOSTILE_MANIFESTS = {
    "unknown schema": (lambda: with_manifest(schema=2), "has schema 2, this SDK reads schema 1"),
    "no schema": (lambda: with_manifest(schema=None), "not valid"),
    "unknown field": (lambda: with_manifest(surprise=1), "surprise"),
    "unknown task": (lambda: with_manifest(task="detection"), "detection"),
    "one class": (lambda: with_manifest(classes=1), "classes"),
    "giant shape": (lambda: with_parameter(shape=[1 << 31, 1 << 31]), "over the limit"),
    "giant extent": (lambda: with_parameter(shape=[1 << 62]), "not valid"),
    "overflowing shape": (lambda: with_parameter(shape=[1 << 31] * 40), "over the limit"),
    "negative shape": (lambda: with_parameter(shape=[-1, 4]), "not valid"),
    "a head of another shape than its classes": (lambda: with_parameter(shape=[4, 2]), "not linear"),
    "another shape than the weights": (
        lambda: with_parameter(index=1, shape=[2]),
        r"expected int64 \[2\]",
    ),
    "another name than the weights": (lambda: with_parameter(name="tail"), "'tail' is missing|head"),
    "unknown rule": (lambda: with_parameter(rule="sum"), "sum"),
    "a float that is counted": (lambda: with_parameter(rule="counter"), "does not fit its dtype"),
    "unknown dtype": (lambda: with_parameter(dtype="complex64"), "complex64"),
    "no parameters": (lambda: with_manifest(parameters=[], head=[]), "1 to 10000 different"),
    "a head of no parameter": (lambda: with_manifest(head=["other"]), "head"),
    "deviation of 0": (lambda: with_manifest(input={"shape": [1, 2, 2], "mean": [0], "std": [0]}), "above 0"),
    "mean for two channels": (
        lambda: with_manifest(input={"shape": [1, 2, 2], "mean": [0, 0], "std": [1, 1]}),
        "1 channels",
    ),
    "class names for other classes": (lambda: with_manifest(class_names=["a"]), "1 of 2 classes"),
    "giant noise": (
        lambda: with_manifest(noise=[{"name": "noise0", "shape": [1 << 31, 1 << 31]}]),
        "of noise for a sample, over the limit",
    ),
    "much noise in many parts": (
        lambda: with_manifest(noise=[{"name": f"noise{i}", "shape": [1 << 20]} for i in range(17)]),
        "of noise for a sample, over the limit",
    ),
    "a backbone for another runtime": (
        lambda: with_manifest(backbone={"shape": [4], "programs": {"executorch": PATHS[0]}}),
        "a backbone for each runtime",
    ),
    "a backbone for no runtime": (
        lambda: with_manifest(backbone={"shape": [4], "programs": {}}),
        "a backbone for each runtime",
    ),
    "a backbone that is not there": (
        lambda: with_manifest(backbone={"shape": [4], "programs": {"onnx": "onnx/backbone"}}),
        "member onnx/backbone is missing",
    ),
    "giant features": (
        lambda: with_manifest(backbone={"shape": [1 << 13, 1 << 12], "programs": {"onnx": PATHS[0]}}),
        "more than 16777216 numbers an image",
    ),
    "features of 0 numbers": (
        lambda: with_manifest(backbone={"shape": [4, 0], "programs": {"onnx": PATHS[0]}}),
        "not valid",
    ),
    "features without axes": (
        lambda: with_manifest(backbone={"shape": [], "programs": {"onnx": PATHS[0]}}),
        "features have 0 axes",
    ),
    "features of a thousand axes": (
        lambda: with_manifest(backbone={"shape": [1] * 1000, "programs": {"onnx": PATHS[0]}}),
        "features have 1000 axes",
    ),
    "nested a million deep": (
        lambda: zipped({**members_of(honest()), "manifest.json": b"[" * 1_000_000}),
        "not valid",
    ),
    "not JSON": (lambda: zipped({**members_of(honest()), "manifest.json": b"\xff\xfe"}), "not valid"),
}


@pytest.mark.parametrize("case", HOSTILE_MANIFESTS)
def test_a_hostile_manifest_is_refused(case):
    make, message = HOSTILE_MANIFESTS[case]
    with pytest.raises(BundleError, match=message):
        Bundle.read(make())


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(BundleError, match=r"none\.edge: cannot be read"):
        Bundle.read(tmp_path / "none.edge")


def test_weights_of_another_shape_cannot_be_put_in():
    with pytest.raises(TensorError, match=r"head\.weight"):
        honest().with_weights({**WEIGHTS, "head.weight": np.ones((4, 2), np.float32)})


def test_new_weights_leave_the_programs_as_they_were():
    changed = honest().with_weights({**WEIGHTS, "head.weight": np.full((2, 4), 7, np.float32)})
    assert (Bundle.read(changed.data).weights["head.weight"] == 7).all()
    assert all(changed.member(path) == honest().member(path) for path in PATHS)
