"""Ctrl-C: once in order, twice at once; what was committed stays, and --resume goes on."""

import re
import shlex
import signal
import subprocess
import time

import pandas as pd
import pytest
from test_sweep import command, run
from tiny_run import untimed, words

import fedscale
from fedscale.interrupt import resume_command

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
KEYS = words(rounds=4, eval_every=1)


def interrupted(results, times):
    """Run the sweep until its first round is recorded, then send SIGINT so often."""
    pipe = subprocess.PIPE
    process = subprocess.Popen(command(results, keys=KEYS), stdout=pipe, stderr=pipe, text=True)
    limit = time.monotonic() + 200
    while not list(results.glob("dfrost_eps/rounds/*/*.parquet")) and time.monotonic() < limit:
        time.sleep(0.1)
    for _ in range(times):
        process.send_signal(signal.SIGINT)
        time.sleep(0.3)
    out, errors = process.communicate(timeout=200)
    assert "Traceback" not in errors
    return process.returncode, out


def test_once_stops_in_order_and_resume_ends_what_was_begun(tmp_path):
    status, out = interrupted(tmp_path / "a", 1)
    assert status == 130
    assert re.search(r"stopped; \d of 5 runs are complete", out)
    line = next(line for line in out.splitlines() if line.startswith("go on with: "))
    assert shlex.split(line)[-1] == "--resume" and "sweeps/dfrost_eps.py" in line
    assert run(tmp_path / "a", "--resume", keys=KEYS).returncode == 0
    assert run(tmp_path / "b", keys=KEYS).returncode == 0
    for table in ("rounds", "clients"):
        a, b = (untimed(fedscale.load(tmp_path / p / "dfrost_eps", table)) for p in "ab")
        pd.testing.assert_frame_equal(a, b, check_exact=True)


def test_twice_stops_at_once_and_loses_nothing(tmp_path):
    status, out = interrupted(tmp_path, 2)
    assert status == 130
    assert out.count("stopping in order") == 1 and "go on with: " in out
    rounds = fedscale.load(tmp_path / "dfrost_eps")
    assert len(rounds) and (rounds.groupby(["run_id", "round"], observed=True).size() == 1).all()


def test_the_command_that_goes_on(monkeypatch):
    monkeypatch.setattr("sys.argv", ["sweeps/x.py", "--fresh", "--results", "a b", "rounds=2"])
    assert resume_command() == "python sweeps/x.py --results 'a b' rounds=2 --resume"
