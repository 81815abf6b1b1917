"""Seconds of cluster formation over the size of the network, and whether planted blocks are found.

Command: python benchmarks/clusters.py
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # one core; read when numpy is loaded

import logging
import platform
import statistics
import time

import click
import networkx as nx
import numpy as np
import scipy
from rich.console import Console
from rich.table import Table
from sklearn.metrics import adjusted_rand_score

from fedscale.graphs import topology
from fedscale.graphs.clusters import RULES, Clusters, form_clusters

DEGREE = 6
"""Mean degree of the Erdős–Rényi graphs."""


def random_network(n: int, seed: int) -> tuple[nx.Graph, None]:
    """Draw an Erdős–Rényi graph of mean degree 6; it has no true clusters."""
    return topology.build("erdos_renyi", n, seed=seed, degree=DEGREE), None


def planted_network(n: int, seed: int) -> tuple[nx.Graph, np.ndarray]:
    """Draw n/10 devices in each of 10 blocks (3 of 10 at n = 30), and return their blocks too.

    Two devices are linked with probability 0.8 inside a block, and every device has 0.5 links to
    other blocks in the mean.
    """
    blocks = 10 if n >= 100 else max(2, n // 10)
    size = n // blocks
    graph = nx.planted_partition_graph(blocks, size, 0.8, 0.5 / (n - size), seed=seed)
    return nx.convert_node_labels_to_integers(graph), np.repeat(np.arange(blocks), size)


def timed(graph: nx.Graph, rule: str, repeats: int) -> tuple[Clusters, float]:
    """Return the clusters and the median of the seconds."""
    seconds = []
    for _ in range(repeats):
        begun = time.perf_counter()
        found = form_clusters(graph, rule=rule)
        seconds.append(time.perf_counter() - begun)
    return found, statistics.median(seconds)


def agreement(found: Clusters, truth: np.ndarray) -> float:
    """Return the adjusted Rand index of the clusters and the true blocks; 1 = the same."""
    label = np.empty(len(truth), dtype=int)
    for number, devices in enumerate(found.members):
        label[devices] = number
    return float(adjusted_rand_score(truth, label))


@click.command()
@click.option("--sizes", default="30,100,300,1000", show_default=True, help="Numbers of devices.")
@click.option("--rule", type=click.Choice(list(RULES)), default="sound", show_default=True)
@click.option("--repeats", default=3, show_default=True, help="Runs of which the median counts.")
@click.option("--seed", default=0, show_default=True, help="Of the networks.")
def main(sizes: str, rule: str, repeats: int, seed: int) -> None:
    """Time `form_clusters` on random and planted networks, and fit seconds ~ N^exponent."""
    logging.disable(logging.WARNING)
    console = Console()
    console.print(
        f"rule={rule}, one thread, median of {repeats}; numpy {np.__version__}, scipy "
        f"{scipy.__version__}, networkx {nx.__version__}, {platform.machine()}"
    )
    form_clusters(nx.cycle_graph(220))  # loads what the first call loads
    networks = {f"Erdős–Rényi, mean degree {DEGREE}": random_network, "planted": planted_network}
    counts = [int(word) for word in sizes.split(",")]
    for name, make in networks.items():
        table = Table("devices", "links", "seconds", "clusters", "candidates", "feasible", "ARI")
        times = []
        for n in counts:
            graph, truth = make(n, seed)
            found, seconds = timed(graph, rule, repeats)
            times.append(seconds)
            table.add_row(
                str(len(graph)),
                str(graph.number_of_edges()),
                f"{seconds:.4f}",
                str(len(found.members)),
                str(len(found.candidates)),
                str(int(found.candidates["feasible"].sum())),
                "" if truth is None else f"{agreement(found, truth):.3f}",
            )
        console.print(f"\n{name}")
        console.print(table)
        if len(set(counts)) > 1:
            exponent = np.polyfit(np.log(counts), np.log(times), 1)[0]
            console.print(f"seconds ~ N^{exponent:.2f} (least squares of the logarithms)")


if __name__ == "__main__":
    main()
