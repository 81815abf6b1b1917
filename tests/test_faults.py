"""Ctrl-C, kills and losses in real sweeps: the records end as those of an undisturbed one."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pandas as pd
import psutil
import pytest
import test_sweep
from tiny_run import untimed, words

import fedscale

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

ROOT = Path(__file__).parent.parent
KEYS = words(rounds=6, eval_every=1)


command = partial(test_sweep.command, keys=KEYS)


def run(words, timeout=600):
    return subprocess.run(words, capture_output=True, text=True, timeout=timeout)


def start(words):
    """Start a sweep as a terminal does: in a process group of its own."""
    return subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def await_rounds(results, count, limit=400):
    end = time.monotonic() + limit
    while len(list(results.glob("*/rounds/*/*.parquet"))) < count:
        assert time.monotonic() < end, f"no {count} rounds within {limit} s"
        time.sleep(0.02)


def below(process):
    return psutil.Process(process.pid).children(recursive=True)


def same_tables(a, b):
    for table in ("runs", "rounds", "clients"):
        left, right = (untimed(fedscale.load(place / "dfrost_eps", table)) for place in (a, b))
        pd.testing.assert_frame_equal(left, right, check_exact=True)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    results = tmp_path_factory.mktemp("whole")
    done = run(command(results))
    assert done.returncode == 0, done.stderr
    return results


def test_ctrl_c_once_ends_in_order_and_the_command_it_prints_goes_on(whole, tmp_path):
    sweep = start(command(tmp_path))
    await_rounds(tmp_path, 9)
    os.killpg(sweep.pid, signal.SIGINT)
    said, errors = sweep.communicate(timeout=120)
    assert sweep.returncode == 130 and errors == ""
    assert "stopping in order (Ctrl-C again stops at once)" in said
    assert re.search(r"stopped; \d of 5 runs are complete", said)
    rest = shlex.split(said.split("go on with: ")[1])
    assert rest[0] == "python" and rest[-1] == "--resume"
    assert rest[1].endswith("sweeps/dfrost_eps.py")
    before = len(list(tmp_path.glob("*/rounds/*/*.parquet")))
    assert 9 <= before < 5 * 6
    again = run([sys.executable, *rest[1:]])
    assert again.returncode == 0, again.stderr
    same_tables(whole, tmp_path)


def test_ctrl_c_twice_stops_at_once(tmp_path):
    sweep = start(command(tmp_path))
    await_rounds(tmp_path, 3)
    started = below(sweep)
    os.killpg(sweep.pid, signal.SIGINT)
    time.sleep(0.3)
    os.killpg(sweep.pid, signal.SIGINT)
    said, errors = sweep.communicate(timeout=120)
    assert sweep.returncode == 130 and errors == ""
    assert said.count("stopping in order") == 1 and "go on with: python" in said
    rounds = fedscale.load(tmp_path / "dfrost_eps")
    assert len(rounds) and (rounds.groupby(["run_id", "round"], observed=True).size() == 1).all()
    assert not psutil.wait_procs(started, timeout=20)[1]


def test_ctrl_c_before_anything_ran_stops(tmp_path):
    sweep = start(command(tmp_path))
    while not (tmp_path / "dfrost_eps" / "_lock").exists():
        time.sleep(0.01)
    os.killpg(sweep.pid, signal.SIGINT)
    said, errors = sweep.communicate(timeout=120)
    assert sweep.returncode == 130 and errors == ""
    assert "0 of 5 runs are complete" in said and "go on with: python" in said


def test_a_search_goes_on_after_its_driver_is_killed_again_and_again(tmp_path):
    flags = ["--search", "optuna", "--num-samples", "5", "--workers", "0"]
    alone = f"cpus_per_worker={len(os.sched_getaffinity(0))}"  # one trial at a time
    keys = [*words(rounds=4, eval_every=1), alone]
    done = run(command(tmp_path / "whole", *flags, keys=keys))
    assert done.returncode == 0, done.stderr
    fired = tmp_path / "fired"
    for count in (2, 9, 15):
        sweep = start(command(fired, *flags, "--resume", keys=keys))
        await_rounds(fired, count)
        sweep.kill()
        sweep.communicate()
    done = run(command(fired, *flags, "--resume", keys=keys))
    assert done.returncode == 0 and done.stderr == "", done.stderr
    same_tables(tmp_path / "whole", fired)
    journals = [
        json.loads((place / "dfrost_eps" / "_search.json").read_text())["events"]
        for place in (tmp_path / "whole", fired)
    ]
    assert journals[0] == journals[1]
    kinds = [(kind, number) for kind, number, _ in journals[1]]
    assert len(set(kinds)) == len(kinds) == 10
    runs = fedscale.load(fired / "dfrost_eps", "runs")
    assert (runs["label"] == "").sum() == 5 and (runs["status"] == "completed").all()
    done = run(command(fired, *flags[:3], "6", *flags[4:], "--resume", keys=keys))
    assert done.returncode == 0 and "run 1/1" in done.stdout  # one more is one more


def test_a_run_whose_workers_always_die_fails_with_the_reason_and_the_sweep_goes_on(
    whole, tmp_path
):
    sweep = start(command(tmp_path))
    failed, end = [], time.monotonic() + 400
    while not failed and time.monotonic() < end:
        for process in below(sweep):
            try:
                if process.cmdline()[:1] and process.cmdline()[0].startswith("ray::ClientWorker"):
                    process.kill()
            except psutil.NoSuchProcess:
                continue
        if list(tmp_path.glob("*/runs/*/*.parquet")):
            runs = fedscale.load(tmp_path / "dfrost_eps", "runs")
            failed = runs.loc[runs["status"] == "failed", "run_id"].tolist()
    said, errors = sweep.communicate(timeout=600)
    runs = fedscale.load(tmp_path / "dfrost_eps", "runs").set_index("run_id")
    assert len(failed) == 1 and sweep.returncode == 1 and errors == ""
    reason = runs.loc[failed[0], "reason"]
    assert "6 losses in a row, the last: " in reason and f"{failed[0]}: failed: " in said
    assert sorted(runs["status"]) == ["completed"] * 4 + ["failed"]
    done = run(command(tmp_path, "--resume"))
    assert done.returncode == 0, done.stderr
    same_tables(whole, tmp_path)


def test_a_trial_whose_process_is_killed_twice_comes_to_its_end(whole, tmp_path):
    sweep = start(command(tmp_path))
    for count in (2, 5):
        await_rounds(tmp_path, count)
        trials = [p for p in below(sweep) if "ray::ResourceTrainable" in " ".join(p.cmdline())]
        for trial in trials:
            trial.kill()
        psutil.wait_procs(trials, timeout=20)
    said, errors = sweep.communicate(timeout=600)
    assert sweep.returncode == 0, said + errors
    same_tables(whole, tmp_path)


def test_random_kills_leave_the_records_as_they_are():
    chaos = [sys.executable, str(ROOT / "benchmarks" / "chaos.py")]
    done = run([*chaos, "--kills", "5", "--rounds", "4", "--minutes", "9"], timeout=1100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "kills: 5 (" in done.stdout
    assert "runs, rounds, clients equal: True (10 runs, 40 rounds)" in done.stdout
