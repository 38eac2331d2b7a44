"""One way to write a file: whole or not at all, and on the disk before it takes its place."""

import os

import pytest

from mpkit import files


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_a_write_that_fails_leaves_the_old_file_and_nothing_beside_it(tmp_path, error):
    def write(file):
        file.write(b"half")
        raise error

    files.write_whole(tmp_path / "a", lambda file: file.write(b"old"))
    with pytest.raises(error):
        files.write_whole(tmp_path / "a", write)
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("a", b"old")]


@pytest.mark.parametrize("sync", [True, False])
def test_the_content_is_on_the_disk_before_it_takes_its_place(tmp_path, monkeypatch, sync):
    done, replace = [], os.replace
    monkeypatch.setattr(files.os, "fsync", lambda number: done.append("sync"))
    monkeypatch.setattr(files.os, "replace", lambda *paths: (done.append("replace"), replace(*paths)))
    files.write_whole(tmp_path / "folder" / "a", lambda file: file.write(b"new"), sync=sync)
    assert done == ["sync", "replace"][not sync :]
    assert (tmp_path / "folder" / "a").read_bytes() == b"new"


def test_files_take_their_place_in_one_function():
    found = [path for path in (files.Path(files.__file__).parent).rglob("*.py") if "os.replace(" in path.read_text()]
    assert [path.name for path in found] == ["files.py"]
