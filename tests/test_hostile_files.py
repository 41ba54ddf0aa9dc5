"""Input that once did harm: each is refused, in words, at once and in little memory."""

import io
import struct
import tracemalloc
import zipfile
import zlib

import numpy as np
import pytest
import zstandard

from edge_sdk.bundle import Bundle
from edge_sdk.codec import unpack
from edge_sdk.data import load
from edge_sdk.errors import BundleError, DataError, EdgeError, ProtocolError, RunError, TensorError
from edge_sdk.manifest import Parameter
from edge_sdk.protocol import Incoming
from edge_sdk.protocol.messages import Ref
from edge_sdk.runtime import open_runtime
from edge_sdk.tensors import TensorSpec, decode, encode
from edge_sdk.workspace import Workspace
from edge_server.config import make_config, read_toml

MB = 1 << 20


@pytest.fixture
def allocated():
    """Bytes that are allocated at the most from here on."""
    tracemalloc.start()
    yield lambda: tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()


def array(values) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, values)
    return buffer.getvalue()


def npz(path, images: bytes, kind=zipfile.ZIP_STORED, more=()):
    with zipfile.ZipFile(path, "w", kind) as archive:
        for name, data in [("images.npy", images), ("labels.npy", array(np.zeros(3, np.int64))), *more]:
            archive.writestr(name, data)
    return path


def header(text: str) -> bytes:
    line = text.encode() + b" " * (-(len(text) + 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(line)) + line


HEADERS = {
    "not closed": "{'descr': '|u1', 'fortran_order': False, 'shape': (3,), }'''",
    "a shape beyond 64 bits": f"{{'descr': '|u1', 'fortran_order': False, 'shape': (0, {10**30}), }}",
    "nested in signs": "-" * 9000 + "1",
    "a dtype of 5000 digits": f"{{'descr': '{'9' * 5000}', 'fortran_order': False, 'shape': (0,), }}",
}


@pytest.mark.parametrize("text", HEADERS.values(), ids=HEADERS)
def test_an_array_whose_header_is_no_header_is_a_data_error(tmp_path, text):
    with pytest.raises(DataError):
        load(npz(tmp_path / "x.npz", header(text)))


def test_a_damaged_lzma_member_is_a_data_error(tmp_path):
    path = npz(tmp_path / "x.npz", array(np.zeros((3, 2, 2), np.uint8)), zipfile.ZIP_LZMA)
    data = bytearray(path.read_bytes())
    data[60:80] = b"\xff" * 20
    path.write_bytes(data)
    with pytest.raises(DataError):
        load(path)


def test_a_member_whose_name_is_not_utf8_is_a_data_error(tmp_path):
    path = npz(tmp_path / "x.npz", array(np.zeros((3, 2, 2), np.uint8)), more=[("\u00e9.npy", b"")])
    path.write_bytes(path.read_bytes().replace("\u00e9".encode(), b"\xff\xfe"))
    with pytest.raises(DataError):
        load(path)


def test_an_array_that_bzip2_made_small_allocates_no_more_than_it_declares(tmp_path, allocated):
    path = npz(tmp_path / "x.npz", bytes(100 * MB), zipfile.ZIP_BZIP2)
    data = bytearray(path.read_bytes())
    for magic, offset in ((b"PK\3\4", 22), (b"PK\1\2", 24)):
        place = data.index(magic) + offset
        data[place : place + 4] = struct.pack("<I", 100_000)
    path.write_bytes(data)
    tracemalloc.reset_peak()
    with pytest.raises(DataError):
        load(path)
    assert allocated() < 64 * MB


def members_in_one_another(size: int) -> bytes:
    """A zip of 64 stored members: the content of each has all that follow it."""
    rest, entries = bytes(size), []
    for number in reversed(range(64)):
        name = f"m{number:02}".encode()
        sizes = zlib.crc32(rest), len(rest), len(rest)
        rest = struct.pack("<4s5H3L2H", b"PK\3\4", 10, 0, 0, 0, 0, *sizes, len(name), 0) + name + rest
        entries.append((name, sizes, len(rest)))
    directory = b"".join(
        struct.pack(
            "<4s6H3L5H2L", b"PK\1\2", 10, 10, 0, 0, 0, 0, *sizes, len(name), 0, 0, 0, 0, 0, len(rest) - end
        )
        + name
        for name, sizes, end in entries
    )
    return rest + directory + struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 64, 64, len(directory), len(rest), 0)


def test_members_that_lie_in_one_another_allocate_no_more_than_the_file(allocated):
    data = members_in_one_another(2 * MB)
    tracemalloc.reset_peak()
    with pytest.raises(BundleError):
        Bundle.read(data)
    assert allocated() < 64 * MB


def test_a_file_of_a_million_empty_tensors_costs_little_memory(allocated):
    entries = ",".join(f'"{n:x}":{{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}' for n in range(200_000))
    data = struct.pack("<Q", len(entries) + 2) + b"{" + entries.encode() + b"}"
    tracemalloc.reset_peak()
    with pytest.raises(TensorError):
        decode(data, [TensorSpec("w", (1,))])
    assert allocated() < 64 * MB + len(data)


@pytest.mark.parametrize("behind", [b"junk", b"\x28\xb5\x2f\xfd\x20\x00\x01\x00\x00"])
def test_what_stands_behind_the_one_frame_is_refused(behind):
    parameters = (Parameter("w", (1,), "float32", "mean"),)
    frame = zstandard.ZstdCompressor().compress(encode({"w": np.ones(1, np.float32)}))
    with pytest.raises(TensorError):
        unpack(frame + behind, parameters, "fp32", "zstd", limit=4096)


def test_an_integer_that_the_codec_does_not_make_is_refused():
    parameters = (Parameter("w", (1,), "float32", "mean"),)
    sent = {"w": np.array([-128], np.int8), "scale/w": np.ones(1, np.float32)}
    with pytest.raises(TensorError):
        unpack(encode(sent), parameters, "int8", "none", limit=4096)


def test_an_announcement_of_two_million_chunks_costs_little_memory(allocated):
    with pytest.raises(ProtocolError):
        Incoming(Ref(hash="a" * 64, size=1 << 31, chunk=1024), limit=1 << 31)
    assert allocated() < 64 * MB


def png(side: int) -> bytes:
    def part(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">2I5B", side, side, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + part(b"IHDR", head) + part(b"IDAT", zlib.compress(b"")) + part(b"IEND", b"")


def test_an_image_of_more_pixels_than_any_model_takes_is_refused_before_it_is_made(tmp_path):
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "x.png").write_bytes(png(8_000))
    with pytest.raises(DataError, match="over the limit"):
        load(tmp_path)[0]


TOML = {
    "nested": b"a = " + b"[" * 3000,
    "a number of 5000 digits": b"rounds = " + b"9" * 5000,
}


@pytest.mark.parametrize("text", TOML.values(), ids=TOML)
def test_a_configuration_that_is_no_toml_is_a_run_error(tmp_path, text):
    (tmp_path / "run.toml").write_bytes(text)
    with pytest.raises(RunError):
        read_toml(tmp_path / "run.toml")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("participants", 10**400),
        ("max_norm", float("inf")),
        ("proximal", float("inf")),
        ("clip_norm", float("inf")),
    ],
)
def test_a_setting_that_is_no_number_to_reckon_with_is_a_run_error(name, value):
    with pytest.raises(RunError, match=name):
        make_config({"fleet": "a", "rounds": 3, name: value})


@pytest.mark.parametrize("content", [b"\xff", b"", b"not hexadecimal", b"a" * 33])
def test_an_install_key_that_is_none_is_a_sentence_or_made_anew(tmp_path, content):
    (tmp_path / "install").write_bytes(content)
    try:
        workspace = Workspace(tmp_path)
    except EdgeError:
        return
    assert 16 <= len(workspace.install) <= 32
    assert set(workspace.install) <= set("0123456789abcdef")
    workspace.close()


def test_an_id_that_is_no_text_is_a_sentence(tmp_path):
    (tmp_path / "id").write_bytes(b"\xff")
    with pytest.raises(EdgeError):
        Workspace(tmp_path).device_id(None)


@pytest.mark.parametrize("name", ["newest", "pending", "carried"])
def test_a_note_that_is_nested_without_end_is_no_note(tmp_path, name):
    (tmp_path / f"{name}.json").write_bytes(b'{"a":' + b"[" * 3000)
    workspace = Workspace(tmp_path)
    assert workspace.newest is None
    assert workspace.pending is None
    workspace.keep(b"a blob")
    workspace.close()


def test_a_program_that_is_no_onnx_is_a_bundle_error(paper):
    bundle = Bundle.build(paper.manifest, paper.weights, {f"onnx/{name}": b"ttttt" for name in "tepm"})
    with pytest.raises(BundleError, match="predict program"):
        open_runtime(bundle).predict(np.zeros((1, *paper.manifest.input.shape), np.float32))
