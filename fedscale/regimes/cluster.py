"""SSD-FL's two regimes in cycles, and its four baselines with the same budget.

A cycle is τ_a intra-cluster instances, in which devices train and combine inside their cluster
(equation 11), then τ_r inter-cluster mixings without training (equation 18). The baselines differ
in who combines with whom while they train: everybody (sdfl), nobody (pdfl), everybody over links
that are each there with probability ½ (stc), random clusters over such links (cstc).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import networkx as nx
import numpy as np

from fedscale import seeds
from fedscale.graphs import mixing, topology
from fedscale.regimes.step import Step


def steps(
    *,
    network: nx.Graph,
    clusters: Sequence[Sequence[int]],
    cycles: int,
    tau_a: int,
    tau_r: int,
    eval_every: int,
    link_drop: float = 0.0,
    lazy: bool = False,
    seed: int,
    start_round: int = 1,
) -> Iterator[Step]:
    """Return the steps start_round … cycles·(τ_a + τ_r).

    Args:
        network: G, on the devices 0 … N−1; fixed over the run.
        clusters: disjoint groups of devices that cover all of them.
        cycles: K; 0 = no step.
        tau_a: training instances per cycle, at least 1.
        tau_r: mixings per cycle, at least 0.
        eval_every: cycles between two measurements; the last cycle is always measured.
        link_drop: probability that a link is away in one training instance (½ in stc and cstc).
        lazy: mix with (I + W)/2.
        seed: of the links that are away.
        start_round: first step to return; draws are keyed by the step, so a stream that starts
            late equals the tail of one that starts at 1.

    Raises:
        ValueError: at the call, not at the first step.
    """
    for name, value, least in (
        ("rounds", cycles, 0),
        ("regime.tau_a", tau_a, 1),
        ("regime.tau_r", tau_r, 0),
        ("eval_every", eval_every, 1),
    ):
        if value < least:
            raise ValueError(f"{name}={value}: allowed are whole numbers from {least}")
    n = len(network)
    if sorted(device for cluster in clusters for device in cluster) != list(range(n)):
        raise ValueError(f"clusters={list(clusters)!r:.80}: each of {n} devices once")
    total = cycles * (tau_a + tau_r)
    if not 1 <= start_round <= total + 1:
        raise ValueError(f"start_round={start_round}: allowed are steps from 1 to {total + 1}")
    across = mixing.metropolis(network, lazy)
    inside = within(network, clusters)
    fixed = mixing.metropolis(inside, lazy)
    everyone = np.ones(n, dtype=bool)

    def step(round: int) -> Step:
        cycle, instance = divmod(round - 1, tau_a + tau_r)
        training = instance < tau_a
        weights = fixed if training else across
        if training and link_drop:
            rng = seeds.stream(seed, "link_drop", round)
            weights = mixing.metropolis(topology.drop_links(inside, link_drop, seed=rng), lazy)
        ends = instance == tau_a + tau_r - 1
        return Step(
            round=round,
            phase="intra" if training else "inter",
            active=everyone,
            train=training,
            weights=weights,
            measure=ends and ((cycle + 1) % eval_every == 0 or cycle + 1 == cycles),
            order="combine",
            restart=instance == 0,
            cycle=cycle + 1,
        )

    return (step(round) for round in range(start_round, total + 1))


def within(network: nx.Graph, clusters: Sequence[Sequence[int]]) -> nx.Graph:
    """Return the network without the links between clusters."""
    group = {device: number for number, cluster in enumerate(clusters) for device in cluster}
    inside = nx.empty_graph(len(network))
    inside.add_edges_from((u, v) for u, v in network.edges if group[u] == group[v])
    return inside


def random_clusters(n: int, *, seed: int) -> list[list[int]]:
    """Draw S uniformly from 1 … n and put every device into one of S groups (cstc).

    Groups that stay empty are left out.
    """
    rng = seeds.stream(seed, "clusters")
    count = int(rng.integers(1, n + 1))
    group = rng.integers(0, count, size=n)
    return [np.flatnonzero(group == s).tolist() for s in range(count) if (group == s).any()]
