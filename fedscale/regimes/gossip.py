"""Gossip: in every round the participating clients train, then mix with their neighbours."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from fedscale import seeds
from fedscale.graphs import mixing, topology


@dataclass(frozen=True, eq=False)
class Step:
    """What the clients do in one round: train, then mix by `weights`, then be measured.

    Attributes:
        round: communication round, counted from 1.
        phase: "gossip".
        active: (M,) bool, the clients that take part; the others keep their state exactly.
        train: whether active clients train before they mix.
        weights: (M, M) float64, row-stochastic, used as W @ X; the row of an idle or isolated
            client u is e_u. Merges that choose their own weights read its support.
        measure: whether the clients are evaluated after this step.
    """

    round: int
    phase: str
    active: np.ndarray
    train: bool
    weights: np.ndarray
    measure: bool


def steps(
    *,
    clients: int,
    rounds: int,
    eval_every: int,
    graph: str,
    degree: float | None = None,
    probability: float | None = None,
    resample: bool = True,
    connected: bool = False,
    link_drop: float = 0.0,
    participation: float = 1.0,
    seed: int,
    start_round: int = 1,
) -> Iterator[Step]:
    """Return the rounds start_round … rounds with Metropolis weights on G(t).

    Every draw is keyed by its round, so a stream that starts late equals the tail of one that
    starts at 1. The last round is always measured.

    Args:
        graph, degree, probability, connected: as `topology.build`.
        resample: draw a fresh G(t) in every round (random graphs are redrawn, ring and grid get a
            fresh placement of the clients); otherwise all rounds use one draw.
        link_drop: probability that an edge of G(t) fails in this round.
        participation: fraction of the clients in (0, 1]; max(1, participation × M rounded half up)
            clients are sampled per round, and G(t) is restricted to the edges between them.

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
        network = topology.build(
            graph, clients, seed=rng, degree=degree, probability=probability, connected=connected
        )
        if graph in ("ring", "grid"):
            network = topology.permuted(network, rng)
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
            train=True,
            weights=mixing.metropolis(network),
            measure=round % eval_every == 0 or round == rounds,
        )

    return (step(round) for round in range(start_round, rounds + 1))
