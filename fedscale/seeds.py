"""Every random stream of a run, keyed by (seed, purpose, round, client).

A draw depends on its key alone, never on how many draws came before it, so a client that is
replayed after a crash, or hosted by another worker, sees the same numbers.
"""

from __future__ import annotations

import numpy as np

PURPOSES = (
    "partition",
    "prompts",
    "batches",
    "graph",
    "link_drop",
    "participation",
    "merge_start",
    "search",
    "pretrain",
    "images",
    "clusters",
    "devices",
    "weights",
    "mixtures",
    "generator",
    "pfpt",
)


def stream(seed: int, purpose: str, round: int = 0, client: int = 0) -> np.random.Generator:
    """Return the generator of one key; equal keys give equal streams in every process.

    Args:
        seed: the run's seed, at least 0.
        purpose: one of `PURPOSES`; streams of different purposes are independent.
        round: communication round, 0 for draws made before the first.
        client: global client number, 0 for draws shared by all clients.

    Raises:
        ValueError: a negative key or an unknown purpose.
    """
    if purpose not in PURPOSES:
        raise ValueError(f"purpose={purpose!r} is unknown; allowed: {', '.join(PURPOSES)}")
    if min(seed, round, client) < 0:
        raise ValueError(f"seed, round and client must be >= 0, got {seed}, {round}, {client}")
    key = (PURPOSES.index(purpose), round, client)
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed, spawn_key=key)))
