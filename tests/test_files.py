"""Whole files: atomic, durable, clear about what went wrong."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from fedscale import files
from fedscale.files import StoreError

MEMORY = "fsspec+memory://bucket/some/results"


def everything(folder):
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*"))


@pytest.mark.parametrize("name", ["plain", "a b", "ünï", "x=1", "100%", "a%20b", "q?"])
def test_a_plain_path_is_taken_as_it_is(tmp_path, name):
    place = files.write_bytes(tmp_path / name, "figures/x.png", b"abc")
    assert (tmp_path / name / "figures" / "x.png").read_bytes() == b"abc"
    assert Path(place).read_bytes() == b"abc"
    assert everything(tmp_path) == [name, f"{name}/figures", f"{name}/figures/x.png"]


def test_relative_paths_and_uris_name_the_same_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    files.write_bytes("a b", "x", b"1")
    files.write_bytes((tmp_path / "a b").as_uri(), "y", b"2")
    files.write_bytes(f"file://{tmp_path}/a b", "z", b"3")
    assert everything(tmp_path) == ["a b", "a b/x", "a b/y", "a b/z"]


def test_join_keeps_the_query_of_a_uri_last():
    assert files.join("s3://b/x?region=eu", "y", "z") == "s3://b/x/y/z?region=eu"
    assert files.join("results/", "y") == "results/y"
    assert files.join("what?", "y") == "what?/y"


def test_an_object_store_gets_no_temporary_names():
    system, folder = files.locate(MEMORY)
    files.write_bytes(MEMORY, "a/x", b"1")
    files.write_bytes(MEMORY, "a/x", b"22")
    with system.open_input_file(f"{folder}/a/x") as source:
        assert source.read() == b"22"
    found = system.get_file_info(files.fs.FileSelector(folder, recursive=True))
    assert [info.base_name for info in found if info.is_file] == ["x"]


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="reads what is synced from /proc")
def test_the_file_is_on_the_disk_before_its_name_appears(tmp_path, monkeypatch):
    seen = []
    sync = os.fsync

    def watch(handle):
        target = os.readlink(f"/proc/self/fd/{handle}")
        seen.append((target, (tmp_path / "new" / "x").exists()))
        sync(handle)

    monkeypatch.setattr(os, "fsync", watch)
    files.write_bytes(tmp_path / "new", "x", b"1")
    folder, data, after = seen
    assert folder == (str(tmp_path), False)
    assert Path(data[0]).name.startswith(".x.") and data[0].endswith(".tmp") and not data[1]
    assert after == (str(tmp_path / "new"), True)


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    files.write_bytes(tmp_path, "x", b"old")

    def full(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StoreError, match=r"x: No space left on device$"):
        files.write_bytes(tmp_path, "x", b"new")
    assert (tmp_path / "x").read_bytes() == b"old"
    assert everything(tmp_path) == ["x"]


def test_a_real_size_limit_is_one_line(tmp_path):
    code = f"""
from fedscale import files
try:
    files.write_bytes({str(tmp_path)!r}, "x", bytes(100_000))
except files.StoreError as error:
    print(error)
"""

    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))

    done = subprocess.run(
        [sys.executable, "-B", "-c", code], capture_output=True, text=True, preexec_fn=limit
    )
    assert done.stdout == f"{tmp_path}/x: File too large\n", done.stderr
    assert everything(tmp_path) == []


@pytest.mark.parametrize("inside", ["", "new", "new/er/folder"])
def test_check_writable_leaves_nothing(tmp_path, inside):
    files.check_writable(tmp_path / inside)
    assert everything(tmp_path) == []


def test_check_writable_keeps_what_is_there(tmp_path):
    (tmp_path / "results").mkdir()
    files.check_writable(tmp_path / "results")
    assert everything(tmp_path) == ["results"]


def test_check_writable_in_an_object_store_leaves_no_file():
    place = "fsspec+memory://probed/results"
    files.check_writable(place)
    system, folder = files.locate(place)
    selector = files.fs.FileSelector(folder, recursive=True, allow_not_found=True)
    assert [info for info in system.get_file_info(selector) if info.is_file] == []


@pytest.mark.parametrize("place", ["file/results", "file", "nowhere://x", "s3:///x", "gs:/x://"])
def test_places_that_cannot_be_written_are_one_line(tmp_path, monkeypatch, place):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError) as caught:
        files.check_writable(place)
    assert str(caught.value).startswith(f"{place}: ") and "\n" not in str(caught.value)
    assert everything(tmp_path) == ["file"]


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may write everywhere")
def test_a_folder_without_permission(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(StoreError, match="Permission denied"):
        files.check_writable(tmp_path / "results")
    tmp_path.chmod(0o700)
