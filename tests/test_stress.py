"""Stores that fill up, vanish, turn read-only or have others at work in them: nothing is lost."""

import errno
import glob
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from tiny_run import config, finish, orchestrator, same, untimed, words

from fedscale import store
from fedscale.files import StoreError

ROOT = Path(__file__).parent.parent
HERE = os.path.dirname(__file__)


@pytest.fixture
def disk(tmp_path):
    """A disk of its own, of 2 MB."""
    place = tmp_path / "disk"
    place.mkdir()
    asked = ["mount", "-t", "tmpfs", "-o", "size=2000k", "tmpfs", str(place)]
    try:
        mounted = os.geteuid() == 0 and subprocess.run(asked, capture_output=True).returncode == 0
    except FileNotFoundError:
        mounted = False
    if not mounted:
        pytest.skip("no disk of its own: only the superuser may mount one")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def remount(disk, how):
    subprocess.run(["mount", "-o", f"remount,{how}", str(disk)], check=True)


def partial(folder):
    return [p for p in folder.rglob("*") if p.name.startswith(".")]


@pytest.fixture(scope="module")
def whole():
    """An undisturbed run of three commits."""
    return finish(orchestrator(config(rounds=3, eval_every=1)))


def assert_whole_after_resume(root, whole):
    again = finish(orchestrator(whole.config, str(root), resume=True))
    assert same(again.payload(), whole.payload())
    assert store.completed(root, "tiny") == {whole.config.run_id}
    for name in ("rounds", "clients"):
        plain = untimed(pd.DataFrame(whole.tables[name]))
        plain = plain.where(plain.notna(), np.nan)
        stored = store.load(root / "tiny", name)[list(plain.columns)]
        pd.testing.assert_frame_equal(stored, plain, check_dtype=False)


# Disks


def test_a_full_disk_keeps_what_was_written_and_the_run_goes_on(disk, whole):
    run = orchestrator(whole.config, str(disk))
    run.advance()
    committed = store.load(disk / "tiny").drop(columns="status")
    free = shutil.disk_usage(disk).free
    (disk / "others").write_bytes(bytes(max(0, free - 8192)))
    with pytest.raises(StoreError, match="No space left on device") as caught:
        finish(run)
    assert "\n" not in str(caught.value) and partial(disk) == []
    kept = store.load(disk / "tiny").drop(columns="status")
    pd.testing.assert_frame_equal(kept[: len(committed)], committed)
    (disk / "others").unlink()
    assert_whole_after_resume(disk, whole)


@pytest.mark.parametrize(
    "fails", [n if n == 6 else pytest.param(n, marks=pytest.mark.slow) for n in range(12)]
)
def test_whichever_write_fails_nothing_is_lost(tmp_path, monkeypatch, whole, fails):
    """The n-th file and all after it meet a full disk."""
    count = 0

    def sync(handle, known=os.fsync):
        nonlocal count
        if os.path.isfile(f"/proc/self/fd/{handle}"):
            count += 1
            if count > fails:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        known(handle)

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", sync)
        with pytest.raises(StoreError, match="No space left on device"):
            finish(orchestrator(whole.config, str(tmp_path)))
    assert partial(tmp_path) == []
    if (tmp_path / "tiny" / "runs").exists() and fails > 1:
        assert list(store.load(tmp_path / "tiny", "runs")["run_id"]) == [whole.config.run_id]
        rounds = list(store.load(tmp_path / "tiny")["round"])
        assert rounds == list(range(1, len(rounds) + 1))
    assert_whole_after_resume(tmp_path, whole)


@pytest.mark.slow
def test_a_disk_that_turns_read_only_is_one_line_and_the_run_goes_on_later(disk, whole):
    run = orchestrator(whole.config, str(disk))
    run.advance()
    remount(disk, "ro")
    with pytest.raises(StoreError, match="Read-only file system") as caught:
        finish(run)
    assert "\n" not in str(caught.value)
    assert list(store.load(disk / "tiny")["round"]) == [1]
    remount(disk, "rw")
    assert_whole_after_resume(disk, whole)


def test_a_folder_removed_in_the_middle_is_said_and_the_run_starts_over(tmp_path, whole):
    run = orchestrator(whole.config, str(tmp_path / "r"))
    run.advance()
    shutil.rmtree(tmp_path / "r")
    with pytest.raises(StoreError, match="was the results folder removed"):
        finish(run)
    assert store.load(tmp_path / "r" / "tiny", "runs")["status"].tolist() == ["failed"]
    assert_whole_after_resume(tmp_path / "r", whole)


# Others at work

WRITER = """
import sys, time
sys.path.insert(0, sys.argv[1])
import records
from fedscale import store
root, first, limit = sys.argv[2], int(sys.argv[3]), time.monotonic() + float(sys.argv[4])
turn = 0
while time.monotonic() < limit:
    turn += 1
    config = records.config(seed=first + turn % 3, rounds=8, **{f"extra{first}": turn % 3})
    name = records.write(root, "s", config, status="running")
    for table, rows in (
        ("rounds", [records.round_row(r) for r in range(1, 9)]),
        ("clients", [records.client_row(r, k) for r in range(1, 9) for k in range(4)]),
    ):
        store.write_rounds(root, "s", name, table, 1, 8, rows)
    store.write_run(root, "s", records.run_record(config))
    if turn % 2:
        store.discard(root, "s", name)
print(turn)
"""


def writer(root, first, seconds):
    command = [sys.executable, "-c", WRITER, HERE, str(root), str(first), str(seconds)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_a_reader_beside_two_writers_never_fails_nor_sees_half_a_file(tmp_path):
    writers = [writer(tmp_path, first, 2) for first in (10, 20)]
    looks = 0
    while any(process.poll() is None for process in writers):
        # glob.glob, for Path.glob fails when a folder that it has listed is gone
        if len(glob.glob(f"{tmp_path}/s/runs/*/*.parquet")) < 2:
            continue
        looks += 1
        for table in ("rounds", "clients"):
            frame = store.load(tmp_path / "s", table)
            keys = ["run_id", "round"] + (["client"] if table == "clients" else [])
            assert not frame.duplicated(keys).any()
        store.completed(tmp_path, "s")
    turns = [int(process.communicate()[0]) for process in writers]
    assert all(process.returncode == 0 for process in writers)
    assert looks and min(turns) > 1, (looks, turns)
    columns = pq.read_schema(tmp_path / "s" / "all-columns.parquet").names
    assert {"merge.extra10", "merge.extra20"} <= set(columns)
    assert partial(tmp_path) == []


def sweep(script, results):
    return subprocess.Popen(
        [
            *(sys.executable, str(ROOT / "sweeps" / script), "--results", str(results)),
            *("--address", "local", "--workers", "0", "--seeds", "0"),
            *words(rounds=2, eval_every=1),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_of_two_sweeps_at_once_the_same_is_refused_and_another_is_not(tmp_path):
    first = sweep("dfrost_eps.py", tmp_path)
    limit = time.monotonic() + 120
    while not list(tmp_path.glob("dfrost_eps/rounds/*/*")) and time.monotonic() < limit:
        time.sleep(0.05)
    before = {path.name for path in tmp_path.glob("dfrost_eps/runs/*")}
    other, again = sweep("dfrost_lambda.py", tmp_path), sweep("dfrost_eps.py", tmp_path)
    said = again.communicate(timeout=120)[1]
    assert first.poll() is None
    assert again.returncode == 2 and said.count("\n") == 1, said
    assert "another sweep is writing to" in said
    assert before <= {path.name for path in tmp_path.glob("dfrost_eps/runs/*")}
    for process in (first, other):
        assert process.communicate(timeout=280)[1] == ""
        assert process.returncode == 0
    for name in ("dfrost_eps", "dfrost_lambda"):
        runs = store.load(tmp_path / name, "runs")
        assert (runs["status"] == "completed").all()
        assert store.completed(tmp_path, name) == set(runs["run_id"])
