"""Files that are there whole or not at all."""

import pytest

from edge_sdk.errors import EdgeError
from edge_sdk.files import check_writable, write_atomically


def test_a_file_replaces_the_one_before(tmp_path):
    write_atomically(tmp_path / "a", b"one")
    write_atomically(tmp_path / "a", b"two")
    assert (tmp_path / "a").read_bytes() == b"two"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_folders_on_the_way_are_made(tmp_path):
    write_atomically(tmp_path / "b" / "c" / "a", b"one")
    assert (tmp_path / "b" / "c" / "a").read_bytes() == b"one"


@pytest.mark.parametrize("check", [check_writable, lambda path: write_atomically(path, b"")])
def test_a_path_that_cannot_be_a_file_is_named(check, tmp_path):
    (tmp_path / "file").write_bytes(b"")
    for path in (tmp_path, tmp_path / "file" / "a"):
        with pytest.raises(EdgeError, match="cannot be written"):
            check(path)
    assert [each.name for each in tmp_path.iterdir()] == ["file"]
