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


def test_a_link_stays_a_link_and_leads_to_what_is_written(tmp_path):
    (tmp_path / "disk").mkdir()
    for name, there in (("a", True), ("b", False)):
        held, link = tmp_path / "disk" / name, tmp_path / name
        if there:
            held.write_bytes(b"old")
        link.symlink_to(held)
        files.write_whole(link, lambda file: file.write(b"new"))
        assert link.is_symlink()
        assert held.read_bytes() == b"new"
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a", "a", "b", "b", "disk"]


@pytest.mark.skipif(os.name == "nt", reason="permissions of POSIX")
def test_a_file_that_only_its_owner_may_read_stays_so_while_it_is_written_and_after(tmp_path):
    path = tmp_path / "a"
    path.touch(0o600)
    modes = []
    files.write_whole(path, lambda file: modes.append(os.fstat(file.fileno()).st_mode & 0o777))
    assert [*modes, path.stat().st_mode & 0o777] == [0o600, 0o600]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="pipes with names")
def test_nothing_takes_the_place_of_a_device_or_a_pipe(tmp_path):
    """As root, `--out /dev/null` replaced /dev/null by a file."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    for name in ("pipe", "link"):
        with pytest.raises(ValueError, match="is a device or a pipe"):
            files.write_whole(tmp_path / name, lambda file: file.write(b"new"))
    assert (tmp_path / "pipe").is_fifo()


def test_a_folder_is_refused_by_name_and_a_name_may_be_as_long_as_the_disk_takes(tmp_path):
    with pytest.raises(IsADirectoryError, match="directory"):
        files.write_whole(tmp_path, lambda file: file.write(b"new"))
    for letter in "aé":
        path = tmp_path / (letter * (250 // len(letter.encode())))
        files.write_whole(path, lambda file: file.write(b"new"))
        assert path.read_bytes() == b"new"
    assert not [*tmp_path.parent.glob(".*.part")]


def test_json_may_begin_with_the_mark_that_windows_writes(tmp_path):
    (tmp_path / "a.json").write_bytes(b'\xef\xbb\xbf{"grid": 1}')
    assert files.read_json(tmp_path / "a.json") == {"grid": 1}
