"""The cost of safety: the share of a run's time that goes into commits, brought to the disk.

Command: python benchmarks/commit.py
"""

from __future__ import annotations

import os
import platform
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from fedscale import checkpoint, files, pools, store
from fedscale.config import RunConfig
from fedscale.orchestrator import RoundOrchestrator, Sink
from fedscale.presets import preset
from fedscale.problems import Problem, load_problem

PARTS = {
    "records of rounds and clients": (store, "write_rounds"),
    "record of the run": (store, "write_run"),
    "state (checkpoint)": (checkpoint, "write"),
}


class Clock:
    """Seconds and calls of functions, by name; a function's time includes what it calls."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()

    def around(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function with its time taken."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            begun = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[name] += time.perf_counter() - begun
                self.calls[name] += 1

        return timed

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Take the times of the parts of a commit, and of what brings bytes to the disk."""
        watched = {**PARTS, "of these: fsync": (os, "fsync")}
        known = {name: getattr(*place) for name, place in watched.items()}
        try:
            for name, place in watched.items():
                setattr(*place, self.around(name, known[name]))
            yield
        finally:
            for name, place in watched.items():
                setattr(*place, known[name])


def measure(config: RunConfig, problem: Problem, root: str) -> tuple[Clock, float, int]:
    """Run all rounds; return the times, the seconds of the whole and the bytes written."""
    clock = Clock()
    sink = Sink(root, f"every-{config.eval_every}")
    run = RoundOrchestrator(config, problem, problem.dataset, pools.make(config, 0.0), sink)
    begun = time.perf_counter()
    with clock.watching():
        while not run.done:
            run.advance()
    seconds = time.perf_counter() - begun
    system, folder = files.locate(store.join(root, sink.sweep))
    found = system.get_file_info(files.fs.FileSelector(folder, recursive=True))
    return clock, seconds, sum(info.size or 0 for info in found)


def report(clock: Clock, seconds: float, written: int, config: RunConfig) -> Table:
    """Return the table of one run: per commit and as a share of all its seconds."""
    commits = config.total_steps // config.eval_every
    table = Table("part of a commit", "calls", "ms per commit", "% of the run")
    whole = sum(clock.seconds[name] for name in PARTS)
    rows = [(name, clock.calls[name], clock.seconds[name]) for name in clock.seconds]
    for name, calls, spent in [*rows, ("all of it", commits, whole)]:
        share = f"{100 * spent / seconds:.2f}"
        table.add_row(name, str(calls), f"{1000 * spent / commits:.1f}", share)
    table.caption = (
        f"{config.total_steps} rounds, measured every {config.eval_every}: {seconds:.1f} s, "
        f"{seconds / config.total_steps:.2f} s a round; {written / 1000:.0f} kB lie there after it"
    )
    return table


@click.command()
@click.option("--results", default="", help="Folder or URI (default: a new folder here, removed).")
@click.option("--rounds", default=10, show_default=True)
@click.option("--eval-every", default="1,5", show_default=True, help="Rounds between two commits.")
@click.option("--method", default="dfrost", show_default=True)
def main(results: str, rounds: int, eval_every: str, method: str) -> None:
    """Time the commits of a run of the offline scale in one process."""
    console = Console(width=100)
    problem = load_problem(preset(method, "offline", workers=0))
    console.print(f"{method}, offline scale, one process; {platform.machine()}")
    with tempfile.TemporaryDirectory(dir=".", prefix="commit-") as folder:
        for every in [int(word) for word in eval_every.split(",")]:
            config = preset(method, "offline", workers=0, rounds=rounds, eval_every=every)
            console.print(report(*measure(config, problem, results or folder), config))


if __name__ == "__main__":
    main()
