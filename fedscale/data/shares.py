"""Whole-number shares: tables (clients, classes) of sample counts, and balanced subsets."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fedscale import seeds

Indices = NDArray[np.int64]
Table = NDArray[np.int64]


def balanced(labels: NDArray[np.integer], size: int) -> Indices:
    """Return sorted indices of a balanced subset: size // K of each of the K classes.

    They are the first of each class after a shuffle of its own that depends on nothing but
    the class (seed 0), so a smaller subset lies inside a larger one. A class with fewer images
    gives all it has.
    """
    classes = np.unique(labels)
    chosen = []
    for number, label in enumerate(classes):
        mine = np.flatnonzero(labels == label)
        seeds.stream(0, "images", client=number).shuffle(mine)
        chosen.append(mine[: size // len(classes)])
    return np.sort(np.concatenate(chosen))


def dirichlet_counts(
    sizes: NDArray[np.int64], num_clients: int, alpha: float, rng: np.random.Generator
) -> Table:
    """Draw p_u ~ Dir(alpha · 1) for M clients; share class sizes (K,) in proportion: (M, K)."""
    # Gamma draws of small shape underflow to 0 and would make 0/0, so all is done in logarithms,
    # by Gamma(a) = Gamma(a + 1) · U^(1/a).
    shape = (num_clients, len(sizes))
    uniform = 1.0 - rng.random(shape)  # in (0, 1]
    power = np.maximum(np.log(uniform) / max(alpha, 1e-300), -1e300)
    logs = np.log(rng.standard_gamma(alpha + 1, shape)) + power
    logs -= np.logaddexp.reduce(logs, axis=1, keepdims=True)
    weights = np.exp(logs - logs.max(axis=0))
    return np.stack([apportion(int(n), w) for n, w in zip(sizes, weights.T, strict=True)], axis=1)


def apportion(total: int, weights: NDArray[np.floating]) -> NDArray[np.int64]:
    """Share out a whole number in proportion to weights by largest remainders."""
    quotas = total * (weights / weights.sum())
    shares = np.floor(quotas).astype(np.int64)
    remainders = np.argsort(shares - quotas, kind="stable")
    shares[remainders[: total - int(shares.sum())]] += 1
    return shares


def lacking(table: Table, floor: int) -> int:
    """Return how many samples the clients lack to have `floor` each."""
    return int(np.maximum(floor - table.sum(axis=1), 0).sum())


def top_up(table: Table, floor: int) -> Table:
    """Move single samples, of its commonest class, from the largest client to those below."""
    table = table.copy()
    sizes = table.sum(axis=1)
    for _ in range(lacking(table, floor)):
        giver, taker = int(np.argmax(sizes)), int(np.argmin(sizes))
        column = int(np.argmax(table[giver]))
        table[giver, column] -= 1
        table[taker, column] += 1
        sizes[giver] -= 1
        sizes[taker] += 1
    return table


def fill(table: Table, samples: list[Indices]) -> list[Indices]:
    """Turn a table into sorted indices per client, given each class's shuffled indices."""
    pieces = [
        np.split(mine, np.cumsum(column)[:-1])
        for mine, column in zip(samples, table.T, strict=True)
    ]
    return [np.sort(np.concatenate(mine)) for mine in zip(*pieces, strict=True)]
