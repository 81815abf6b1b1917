"""From a configuration to its stream of Steps: which regime, on which graph, in which clusters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import networkx as nx
import numpy as np

from fedscale import seeds
from fedscale.config import RunConfig
from fedscale.data import partition
from fedscale.data.catalogue import Split
from fedscale.local.cohort import Devices
from fedscale.regimes import cluster, gossip, server
from fedscale.regimes.step import Step

PROXIMAL = (5e-5, 1e-4)
MOMENTUM = (0.8, 0.85)
"""What a mixed device draws its μ or ρ from (SSD-FL, section VI)."""


def steps(
    config: RunConfig,
    samples: Sequence[int],
    clusters: Sequence[Sequence[int]] = (),
    start_round: int = 1,
) -> Iterator[Step]:
    """Return the steps start_round … config.total_steps of a run.

    Args:
        config: the run.
        samples: training samples of each of the M clients.
        clusters: groups of devices, for a run in cycles (see `formation.form`).
        start_round: first step to return.
    """
    g, r = config.graph, config.regime
    if r.name == "server":
        return server.steps(
            samples=samples,
            rounds=config.rounds,
            eval_every=config.eval_every,
            average=r.average,
            train=config.trains,
            statistics=config.analytic,
            restat=config.head.restat,
            serve=config.head.name == "fedpft" or config.server.name != "none",
            start_round=start_round,
        )
    if config.cycles:
        return cluster.steps(
            network=network(config),
            clusters=clusters,
            cycles=config.rounds,
            tau_a=r.tau_a,
            tau_r=r.tau_r,
            eval_every=config.eval_every,
            link_drop=0.5 if r.name in ("stc", "cstc") else g.link_drop,
            lazy=r.lazy,
            seed=config.seed,
            start_round=start_round,
        )
    return gossip.steps(
        clients=config.data.clients,
        rounds=config.rounds,
        eval_every=config.eval_every,
        graph=g.name,
        degree=g.degree,
        probability=g.probability or None,
        resample=g.resample,
        connect=g.connect,
        link_drop=g.link_drop,
        participation=g.participation,
        train_rounds=(r.train_rounds or None) if config.trains else 0,
        statistics=config.analytic,
        seed=config.seed,
        start_round=start_round,
    )


def parts(config: RunConfig, split: Split) -> list[np.ndarray]:
    """Return the rows of every client in the training split."""
    d = config.data
    return partition.split(
        split.labels,
        split.domains,
        name=d.partition,
        clients=d.clients,
        alpha=d.alpha,
        labels_per_client=d.labels_per_client,
        min_size=d.min_size,
        allow_empty=d.allow_empty,
        seed=config.seed,
    )


def network(config: RunConfig) -> nx.Graph:
    """Return the fixed graph of a run in cycles."""
    g = config.graph
    rng = seeds.stream(config.seed, "graph")
    return gossip.draw(
        g.name,
        config.data.clients,
        degree=g.degree,
        probability=g.probability or None,
        connect=g.connect,
        rng=rng,
    )


def kinds(config: RunConfig, clients: Sequence[int]) -> list[tuple[str, float, float]]:
    """Return (kind, μ, ρ) of every client's optimizer, mixed ones each from its own stream."""
    if config.local.devices == "same":
        return [(config.local.optimizer, config.local.mu, config.local.momentum)] * len(clients)
    found = []
    for client in clients:
        rng = seeds.stream(config.seed, "devices", 0, client)
        kind, pick = int(rng.integers(3)), int(rng.integers(2))
        found.append(
            (
                ("sgd", "prox", "momentum")[kind],
                PROXIMAL[pick] if kind == 1 else 0.0,
                MOMENTUM[pick] if kind == 2 else 0.0,
            )
        )
    return found


def devices(config: RunConfig, clients: Sequence[int]) -> Devices | None:
    """Return the coefficients of mixed devices; None = all the same."""
    if config.local.devices == "same":
        return None
    drawn = kinds(config, clients)
    return Devices(np.array([mu for _, mu, _ in drawn]), np.array([rho for _, _, rho in drawn]))
