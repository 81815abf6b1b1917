"""Sweeps by Ray Tune: grid, search, reuse, resume after a kill, what is printed and written."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from tiny_run import config, untimed, words

import fedscale
from fedscale.interrupt import resume_command

ROOT = Path(__file__).parent.parent
SCRIPT = str(ROOT / "sweeps" / "dfrost_eps.py")
SMALL = words(rounds=2, eval_every=1)


def command(results, *flags, keys=SMALL):
    places = ["--results", str(results), "--address", "local"]
    return [sys.executable, SCRIPT, *places, "--seeds", "0", *flags, *keys]


def run(results, *flags, keys=SMALL):
    return subprocess.run(
        command(results, *flags, keys=keys), capture_output=True, text=True, timeout=280
    )


@pytest.fixture(scope="module")
def grid(tmp_path_factory):
    results = tmp_path_factory.mktemp("a folder with spaces") / "results"
    return results, run(results)


def test_grid_ends_with_table_figure_and_records(grid):
    results, done = grid
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    for epsilon in ("0.001", "0.01", "0.1", "1", "index-wise mean"):
        assert re.search(rf"│ +{re.escape(epsilon)} +│|{epsilon}", done.stdout)
    assert "run 5/5" in done.stdout and "accuracy %" in done.stdout
    assert (results / "figures" / "dfrost_eps.png").stat().st_size > 10_000
    assert (results / "figures" / "dfrost_eps.svg").exists()
    rounds = pd.read_parquet(results / "dfrost_eps" / "rounds")
    assert rounds.groupby("run_id", observed=True)["round"].apply(list).map(len).eq(2).all()
    assert rounds["run_id"].nunique() == 5
    assert len(pd.read_parquet(results / "dfrost_eps" / "clients")) == 5 * 2 * 8
    runs = fedscale.load(results / "dfrost_eps", "runs")
    assert (runs["status"] == "completed").all()
    assert sorted(runs.loc[runs["label"] == "", "merge.epsilon"]) == [0.001, 0.01, 0.1, 1]
    assert runs.loc[runs["label"] != "", "merge.name"].tolist() == ["mean"]


def test_a_trial_computes_what_a_single_run_computes(grid):
    results, _ = grid
    keys = {"merge.epsilon": 0.1, "local.prompt_lr": 0.03, "workers": 0}
    c = config(rounds=2, eval_every=1, **keys)
    alone = fedscale.run(c)
    stored = fedscale.load(results / "dfrost_eps", where={"run_id": c.run_id})
    columns = list(untimed(alone.rounds).columns)
    plain = alone.rounds[columns].where(alone.rounds[columns].notna(), np.nan)
    pd.testing.assert_frame_equal(stored[columns], plain, check_dtype=False)


def test_complete_runs_are_reused(grid):
    results, _ = grid
    before = fedscale.load(results / "dfrost_eps", "runs")
    done = run(results)
    assert done.returncode == 0 and "5 of 5 runs are complete" in done.stdout
    pd.testing.assert_frame_equal(fedscale.load(results / "dfrost_eps", "runs"), before)


def test_dry_run_starts_and_writes_nothing(tmp_path):
    done = run(tmp_path / "none", "--scale", "paper", "--dry-run", keys=[])
    assert done.returncode == 0 and done.stderr == ""
    for line in ("data.name = five", "backbone.name = vit_b32", "data.clients = 50", "runs: 5"):
        assert line in done.stdout
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--seeds", "0,0"], "seeds=0,0"),
        (["--seeds", "-1"], "seeds=-1"),
        (["--seeds", "a"], "seeds=a"),
        (["--num-samples", "0"], "0"),
        (["--search", "random"], "'grid', 'optuna'"),
        (["--scale", "huge"], "'offline', 'paper'"),
        (["merge.epsilon=0.3"], "merge.epsilon=0.3"),
        (["seed=3"], "--seeds 3"),
        (["--fresh", "--resume"], "--fresh"),
        (["--address", "nowhere"], "address=nowhere"),
        (["rounds=0"], "rounds=0"),
        (["--results", "/proc/none"], "results=/proc/none"),
        (["backbone.weights=/none.safetensors"], "backbone.weights=/none.safetensors"),
        (["--workers", "1000"], "workers=1000"),
        (["--workers", "8", "cpus_per_worker=1024"], "workers=8"),
    ],
)
def test_bad_flags_are_one_line(flags, says, tmp_path):
    code = (
        "import sys, runpy; sys.argv = sys.argv[1:];"
        f"runpy.run_path({SCRIPT!r}, run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, SCRIPT, *flags],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
    )
    assert done.returncode == 2, done.stdout
    assert done.stderr.count("\n") == 1 and says in done.stderr


def test_search_asks_optuna_and_reports_every_suggestion(tmp_path):
    done = run(tmp_path, "--search", "optuna", "--num-samples", "3", "--workers", "0")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    runs = fedscale.load(tmp_path / "dfrost_eps", "runs")
    searched = runs[runs["label"] == ""]["merge.epsilon"]
    assert len(searched) == 3 and searched.nunique() == 3 and searched.between(1e-3, 10).all()
    assert (runs["status"] == "completed").all() and len(runs) == 4


def test_resume_after_a_kill_equals_an_undisturbed_sweep(grid, tmp_path):
    whole, _ = grid
    started = subprocess.Popen(
        command(tmp_path), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    folder = tmp_path / "dfrost_eps"
    limit = time.monotonic() + 200
    while not list(folder.glob("rounds/*/*.parquet")) and time.monotonic() < limit:
        time.sleep(0.1)
    os.kill(started.pid, signal.SIGKILL)
    started.wait()
    assert list(folder.glob("rounds/*/*.parquet"))
    done = run(tmp_path, "--resume")
    assert done.returncode == 0, done.stderr
    for table in ("rounds", "clients"):
        a, b = (untimed(fedscale.load(p / "dfrost_eps", table)) for p in (whole, tmp_path))
        pd.testing.assert_frame_equal(a, b, check_exact=True)


def test_a_diverged_point_is_counted_and_the_sweep_goes_on(tmp_path):
    keys = [*SMALL, "local.optimizer=sgd", "local.lr=1e30"]
    done = run(tmp_path, "--workers", "0", keys=keys)
    assert done.returncode == 0, done.stderr
    assert "5 diverged" in done.stdout or done.stdout.count("1 diverged") >= 4
    runs = fedscale.load(tmp_path / "dfrost_eps", "runs")
    assert (runs["status"] == "diverged").sum() >= 4
    assert runs["reason"].str.contains("client").sum() >= 4


def test_the_command_that_goes_on(monkeypatch):
    monkeypatch.setattr("sys.argv", ["sweeps/x.py", "--fresh", "--results", "a b", "rounds=2"])
    assert resume_command() == "python sweeps/x.py --results 'a b' rounds=2 --resume"
