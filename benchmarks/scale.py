"""Seconds per client and round, and peak memory, as the number of clients grows.

Command: python benchmarks/scale.py

Every size is one run of D-FROST at the offline scale in a fresh process without Ray, with as many
training images per client as the others, so that only the number of clients differs. Sizes take
turns. Rounds are timed by the orchestrator's wall clock; the first one is left out (caches fill).
Measuring grows with clients × test images by definition, and is timed apart.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import time

import click
from rich.console import Console
from rich.table import Table

DOMAINS = 4
THREADS = 1


def one(clients: int, images: int, rounds: int) -> dict[str, float]:
    """Run one size in this process.

    Returns:
        Seconds per client and round without measuring, seconds per client of measuring, peak
        memory in MiB (this process), and the part of it that was there before the run.
    """
    os.environ["OMP_NUM_THREADS"] = str(THREADS)
    from fedscale.orchestrator import RoundOrchestrator
    from fedscale.pools import InlinePool
    from fedscale.presets import preset
    from fedscale.problems import load_problem

    config = preset(
        "dfrost",
        "offline",
        {
            "data.clients": clients,
            "data.train_size": clients * images // DOMAINS,
            "data.test_size": 10,
            "rounds": rounds,
            "eval_every": rounds,
        },
    )
    problem = load_problem(config)
    before = _peak()
    run = RoundOrchestrator(config, problem, problem.dataset, InlinePool(THREADS, "cpu"))
    took = []
    for step in run.steps:
        started = time.perf_counter()
        run._collect(step, *run._submit(step))
        took.append(time.perf_counter() - started)
    started = time.perf_counter()
    run._all("measure", [(block, *run.blocks) for block in run.blocks])
    measured = time.perf_counter() - started
    return {
        "round": statistics.median(took[1:]) / clients,
        "measure": measured / clients,
        "peak": _peak(),
        "before": before,
    }


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


@click.command(help=__doc__)
@click.option("--clients", default="50,1000", show_default=True, help="Sizes; the first is 1.00×.")
@click.option("--images", default=5, show_default=True, help="Training images per client.")
@click.option(
    "--rounds", default=4, show_default=True, help="Rounds of a run; the first is left out."
)
@click.option("--turns", default=3, show_default=True, help="Runs per size.")
@click.option("--child", default="", hidden=True)
def main(clients: str, images: int, rounds: int, turns: int, child: str) -> None:
    """Time every size in turns and print a table."""
    if child:
        print(json.dumps(one(int(child), images, rounds)))
        return
    sizes = [int(size) for size in clients.split(",")]
    found: dict[int, list[dict[str, float]]] = {size: [] for size in sizes}
    for _ in range(turns):
        for size in sizes:
            words = ["--child", str(size), "--images", str(images), "--rounds", str(rounds)]
            done = subprocess.run(
                [sys.executable, __file__, *words], check=True, capture_output=True, text=True
            )
            found[size].append(json.loads(done.stdout))
    middle = {
        size: {key: statistics.median(turn[key] for turn in own) for key in own[0]}
        for size, own in found.items()
    }
    table = Table(title=f"{images} images per client, one thread, median of {turns} turns")
    for name in ("clients", "ms per client-round", "÷ first", "measure, ms per client"):
        table.add_column(name, justify="right")
    table.add_column("peak MiB (before the run)", justify="right")
    first = middle[sizes[0]]["round"]
    for size, own in middle.items():
        table.add_row(
            f"{size:,}",
            f"{1e3 * own['round']:.2f}",
            f"{own['round'] / first:.2f}×",
            f"{1e3 * own['measure']:.2f}",
            f"{own['peak']:,.0f} ({own['before']:,.0f})",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
