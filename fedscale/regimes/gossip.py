"""Gossip: in every round the participating clients train, then mix with their neighbours."""

from __future__ import annotations

import math
from collections.abc import Iterator

import networkx as nx
import numpy as np

from fedscale import seeds
from fedscale.graphs import mixing, topology
from fedscale.regimes.step import Step


def steps(
    *,
    clients: int,
    rounds: int,
    eval_every: int,
    graph: str,
    degree: float | None = None,
    probability: float | None = None,
    resample: bool = True,
    connect: str = "allow",
    link_drop: float = 0.0,
    participation: float = 1.0,
    train_rounds: int | None = None,
    statistics: bool = False,
    seed: int,
    start_round: int = 1,
) -> Iterator[Step]:
    """Return the rounds start_round … rounds with Metropolis weights on G(t).

    Every draw is keyed by its round, so a stream that starts late equals the tail of one that
    starts at 1. The last round is always measured.

    Args:
        graph, degree, probability, connect: as `draw`.
        resample: draw a fresh G(t) in every round (random graphs are redrawn, ring and grid get a
            fresh placement of the clients); otherwise all rounds use one draw.
        link_drop: probability that an edge of G(t) fails in this round.
        participation: fraction of the clients in (0, 1]; max(1, participation × M rounded half up)
            clients are sampled per round, and G(t) is restricted to the edges between them.
        train_rounds: clients train in the first so many rounds and only mix afterwards; None:
            in all rounds.
        statistics: clients compute the statistics of their data in round 1.

    Raises:
        ValueError: at the call, not at the first step.
    """
    topology.check(graph, clients, degree=degree, probability=probability)
    for name, value in (("rounds", rounds), ("eval_every", eval_every)):
        if value < 1:
            raise ValueError(f"{name}={value}: allowed are whole numbers from 1")
    if not 1 <= start_round <= rounds + 1:
        raise ValueError(f"start_round={start_round}: allowed are rounds from 1 to {rounds + 1}")
    if not 0 <= link_drop <= 1:
        raise ValueError(f"graph.link_drop={link_drop}: allowed are values from 0 to 1")
    if not 0 < participation <= 1:
        raise ValueError(f"graph.participation={participation}: allowed are values in (0, 1]")
    sampled = max(1, math.floor(participation * clients + 0.5))

    def step(round: int) -> Step:
        rng = seeds.stream(seed, "graph", round if resample else 0)
        network = draw(
            graph, clients, degree=degree, probability=probability, connect=connect, rng=rng
        )
        if link_drop:
            rng = seeds.stream(seed, "link_drop", round)
            network = topology.drop_links(network, link_drop, seed=rng)
        active = np.ones(clients, dtype=bool)
        if sampled < clients:
            rng = seeds.stream(seed, "participation", round)
            active[:] = False
            active[rng.choice(clients, sampled, replace=False)] = True
            network = topology.induced(network, active)
        return Step(
            round=round,
            phase="gossip",
            active=active,
            train=train_rounds is None or round <= train_rounds,
            weights=mixing.metropolis(network),
            measure=round % eval_every == 0 or round == rounds,
            statistics=statistics and round == 1,
        )

    return (step(round) for round in range(start_round, rounds + 1))


def draw(
    graph: str,
    clients: int,
    *,
    degree: float | None,
    probability: float | None,
    connect: str,
    rng: np.random.Generator,
) -> nx.Graph:
    """Draw G on the clients 0 … M−1; on ring and grid who sits where is drawn.

    Args:
        graph, clients, degree, probability: as `topology.build`.
        connect: what to do with a graph that is not connected: `allow`, `bridge` (add the fewest
            edges that join its parts) or `resample`.
        rng: of the draw.

    Raises:
        ValueError: as `topology.build`.
    """
    network = topology.build(
        graph,
        clients,
        seed=rng,
        degree=degree,
        probability=probability,
        connected=connect == "resample",
    )
    if graph in ("ring", "grid"):
        network = topology.permuted(network, rng)
    return network if connect == "resample" else topology.connect(network, connect, rng)
