"""A sweep whose workers, trials and drivers are killed at random equals an undisturbed one.

Command: python benchmarks/chaos.py

One small sweep runs to its end; then the same sweep runs while SIGKILL meets, at random moments
from a seeded stream, its client workers, its trials' actors (where orchestrators live) and its
driver, alone or with all processes below it, which is started again with --resume. Every second
kill waits until a file of the records or of the state is being written or has just appeared, and
comes at once; some come before anything was committed since the last one, so that what starts
again is killed too. Then the tables are compared, but for what a clock says, and every round must
be there exactly once.
"""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import click
import pandas as pd
import psutil
from rich.console import Console

import fedscale

ROOT = Path(__file__).parent.parent
SWEEP = "dfrost_eps"
CLOCK = ["train_seconds", "merge_seconds", "measure_seconds", "start", "seconds"]
RUNS = 10
"""Four ε and the reference, with two seeds."""
KEYS = [
    "eval_every=1",
    "precision=float32",
    "backbone.weights=random",
    "data.clients=8",
    "data.train_size=40",
    "data.test_size=20",
    "graph.degree=3",
    "merge.steps=5",
    "local.epochs=1",
]
KINDS = ("worker", "trial", "driver", "whole tree")
NAMES = {"worker": "ray::ClientWorker", "trial": "ray::ResourceTrainable"}


def start(results: Path, log: Path, rounds: int) -> subprocess.Popen[bytes]:
    """Start the sweep in a process group of its own."""
    words = [sys.executable, str(ROOT / "sweeps" / f"{SWEEP}.py"), "--address", "local"]
    words += ["--results", str(results), "--seeds", "0,1", "--workers", "2", "--resume"]
    words += [f"rounds={rounds}", *KEYS]
    with log.open("ab") as sink:
        return subprocess.Popen(words, stdout=sink, stderr=sink, start_new_session=True)


def victims(driver: subprocess.Popen[bytes], kind: str) -> list[psutil.Process]:
    """Return the living processes of a kind below a driver, the driver itself for other kinds."""
    try:
        whole = psutil.Process(driver.pid)
        if kind not in NAMES:
            return [whole]
        below = whole.children(recursive=True)
        return [p for p in below if " ".join(p.cmdline()).startswith(NAMES[kind])]
    except psutil.NoSuchProcess:
        return []


def kill(victim: psutil.Process, kind: str) -> None:
    """Kill a process, and what is below it for "whole tree"."""
    below = victim.children(recursive=True) if kind == "whole tree" else []
    for process in [victim, *below]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def files(results: Path) -> set[str]:
    """Return the files of records and states, those that are being written too."""
    found = set()
    for folder, _, names in os.walk(results / SWEEP):
        if "_tune" not in folder:
            found.update(f"{folder}/{name}" for name in names)
    return found


def await_new(results: Path, driver: subprocess.Popen[bytes], seconds: float) -> bool:
    """Wait until a file appears; False after so many seconds, or when the driver ends."""
    seen, limit = files(results), time.monotonic() + seconds
    while time.monotonic() < limit and driver.poll() is None:
        if files(results) - seen:
            return True
        time.sleep(0.001)
    return False


def disturb(
    results: Path, log: Path, rounds: int, kills: int, seed: int, limit: float
) -> tuple[Counter[str], int]:
    """Run the sweep to its end under fire.

    Returns:
        Kills by kind (and "while writing"), and how often the driver was started.
    """
    rng, done, starts = random.Random(seed), Counter[str](), 1
    driver, deadline = start(results, log, rounds), time.monotonic() + limit
    while time.monotonic() < deadline:
        left = kills - sum(done[kind] for kind in KINDS)
        if driver.poll() is not None:
            if complete(results):
                if left > 0:
                    raise SystemExit(f"the sweep ended before {left} more kills: fewer --kills")
                return done, starts
            driver, starts = start(results, log, rounds), starts + 1
        if left <= 0:
            time.sleep(0.2)
            continue
        kind = rng.choices(KINDS, (6, 3, 1, 1))[0]
        # Losses in a row without a commit end a run, so most kills wait for one.
        if rng.random() < 0.7 and not await_new(results, driver, 120):
            continue
        time.sleep(rng.uniform(0, 1))
        if not victims(driver, "worker"):  # before the first there is nothing to disturb
            continue
        writing = rng.random() < 0.5 and await_new(results, driver, 3)
        if found := victims(driver, kind):
            kill(rng.choice(found), kind)
            done[kind] += 1
            done["while writing"] += writing
    kill(psutil.Process(driver.pid), "whole tree")
    raise SystemExit(f"not over after {limit:.0f} s: {dict(done)}, {starts} starts")


def complete(results: Path) -> bool:
    """Whether every run of the sweep is recorded as completed."""
    try:
        runs = fedscale.load(results / SWEEP, "runs")
    except fedscale.StoreError:
        return False
    return len(runs) == RUNS and (runs["status"] == "completed").all()


def differences(a: Path, b: Path, rounds: int) -> list[str]:
    """Return what differs between two sweeps' tables, and rounds that are there twice or never."""
    found = []
    for table in ("runs", "rounds", "clients"):
        left, right = (
            fedscale.load(place / SWEEP, table).drop(columns=CLOCK, errors="ignore")
            for place in (a, b)
        )
        try:
            pd.testing.assert_frame_equal(left, right, check_exact=True)
        except AssertionError as error:
            found.append(f"{table}: {' '.join(str(error).split())}")
    for place in (a, b):
        rows = pd.read_parquet(place / SWEEP / "rounds")
        counts = rows.groupby(["run_id", "round"], observed=True).size()
        if len(counts) != RUNS * rounds or (counts != 1).any():
            found.append(f"{place.name}: {len(counts)} rounds, at most {counts.max()} times")
    return found


@click.command(help=__doc__)
@click.option("--kills", default=30, show_default=True)
@click.option("--rounds", default=20, show_default=True, help="Of each of the 10 runs.")
@click.option("--seed", default=0, show_default=True)
@click.option("--minutes", default=20.0, show_default=True, help="Limit of the disturbed sweep.")
def main(kills: int, rounds: int, seed: int, minutes: float) -> None:
    """Run both sweeps and compare them; ends with 1 where they differ."""
    console = Console(soft_wrap=True, highlight=False)
    with tempfile.TemporaryDirectory(prefix="fedscale-chaos-") as folder:
        whole, fired, log = Path(folder, "whole"), Path(folder, "fired"), Path(folder, "log")
        if start(whole, log, rounds).wait(60 * minutes):
            raise SystemExit(f"the undisturbed sweep failed:\n{log.read_text()}")
        began = time.monotonic()
        done, starts = disturb(fired, log, rounds, kills, seed, 60 * minutes)
        kinds = ", ".join(f"{kind} {done[kind]}" for kind in KINDS)
        console.print(
            f"kills: {sum(done[kind] for kind in KINDS)} ({kinds}; {done['while writing']} as a "
            f"file was written), driver started {starts} times, {time.monotonic() - began:.0f} s"
        )
        found = differences(whole, fired, rounds)
        for line in found:
            console.print(f"differs: {line}", markup=False)
        rows = len(fedscale.load(fired / SWEEP))
        console.print(f"runs, rounds, clients equal: {not found} ({RUNS} runs, {rows} rounds)")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
