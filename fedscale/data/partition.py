"""How the training images are shared out over clients.

Every partition returns one sorted index array per client; together they hold each index exactly
once. Labels may be any integers. Counts are settled first, as a (clients, classes) table; which
images fill a count is a seeded shuffle of the class.
"""

from __future__ import annotations

import logging

import numpy as np
from numpy.typing import NDArray

from fedscale import seeds
from fedscale.data import shares

PARTITIONS = ("dirichlet", "extreme", "labels_per_client", "iid")
REDRAWS = 100
OWNED = 0.99
"""Share of a class that goes to its owners under `extreme`."""

Indices = NDArray[np.int64]
log = logging.getLogger(__name__)


def dirichlet(
    labels: NDArray[np.integer],
    num_clients: int,
    alpha: float,
    *,
    seed: int,
    min_size: int = 2,
    allow_empty: bool = False,
    domain: int = 0,
) -> list[Indices]:
    """Share out by client profiles p_u ~ Dir(alpha · 1), one component per class.

    A class is shared out in proportion to the clients' component of that class. A draw in which
    some client has fewer than `min_size` (at least 1) samples is redrawn, 100 times at most;
    then the draw that lacked fewest is completed with single samples of the largest clients, and
    a note is logged. `allow_empty` takes the first draw as it is.

    Args:
        labels: (N,) integers.
        num_clients: M, at most N unless `allow_empty`.
        alpha: concentration, > 0; small values give clients few classes.
        seed: the run's seed.
        min_size: samples that each client must have.
        allow_empty: clients without samples are allowed.
        domain: key of an independent stream, for one call per domain.

    Raises:
        ValueError: alpha is not a positive number, or there are too few samples.
    """
    if not (np.isfinite(alpha) and alpha > 0):
        raise ValueError(f"data.alpha={alpha}: must be a finite number > 0")
    if min_size < 0:
        raise ValueError(f"data.min_size={min_size}: must be >= 0")
    floor = 0 if allow_empty else max(1, min_size)
    samples, rng = _prepare(labels, num_clients, floor, seed, domain)
    sizes = np.array([len(mine) for mine in samples])
    best = shares.dirichlet_counts(sizes, num_clients, alpha, rng)
    lacking = shares.lacking(best, floor)
    for _ in range(REDRAWS):
        if not lacking:
            break
        draw = shares.dirichlet_counts(sizes, num_clients, alpha, rng)
        if shares.lacking(draw, floor) < lacking:
            best, lacking = draw, shares.lacking(draw, floor)
    if lacking:
        log.warning(
            "dirichlet, domain %d: %d redraws left clients below data.min_size=%d; moved %d of "
            "%d samples from the largest clients",
            domain, REDRAWS, floor, lacking, len(labels),
        )  # fmt: skip
    return shares.fill(shares.top_up(best, floor), samples)


def extreme(
    labels: NDArray[np.integer],
    num_clients: int,
    *,
    seed: int,
    allow_empty: bool = False,
    domain: int = 0,
) -> list[Indices]:
    """Give 99 % of each class to its owner and spread 1 % over the other clients by Dir(1).

    With as many clients as classes each owns one class; with more clients, several owners share
    a class equally; with fewer, some own several. Who owns what depends on the seed.

    Args:
        labels: (N,) integers.
        num_clients: M, at most N unless `allow_empty`.
        seed: the run's seed.
        allow_empty: clients without samples are allowed.
        domain: key of an independent stream, for one call per domain.

    Raises:
        ValueError: more clients than samples.
    """
    floor = 0 if allow_empty else 1
    samples, rng = _prepare(labels, num_clients, floor, seed, domain)
    clients, classes = rng.permutation(num_clients), rng.permutation(len(samples))
    table = np.zeros((num_clients, len(samples)), np.int64)
    for place, column in enumerate(classes):
        total = len(samples[column])
        # The longer of the two shuffled circles is dealt once around the shorter one.
        first = place % num_clients
        owners = clients[first :: len(classes)] if num_clients > len(classes) else clients[[first]]
        others = np.setdiff1d(clients, owners)
        spread = round((1 - OWNED) * total) if len(others) else 0
        table[owners, column] = shares.apportion(total - spread, np.ones(len(owners)))
        if len(others):
            table[others, column] = shares.apportion(spread, rng.dirichlet(np.ones(len(others))))
    if lacking := shares.lacking(table, floor):
        log.warning(
            "extreme, domain %d: classes are smaller than their owners are many; moved %d of %d "
            "samples from the largest clients",
            domain, lacking, len(labels),
        )  # fmt: skip
    return shares.fill(shares.top_up(table, floor), samples)


def labels_per_client(
    labels: NDArray[np.integer],
    num_clients: int,
    k: int,
    *,
    seed: int,
    domain: int = 0,
) -> list[Indices]:
    """Give each client shards of exactly k labels; shards of a class are equal to within one.

    M·k shards are dealt to the classes in proportion to their sizes, at least one each and at
    most one per client. Clients are equally large when classes are and M·k is a multiple of
    their number; otherwise as nearly as whole shards allow.

    Args:
        labels: (N,) integers of K classes.
        num_clients: M, with K <= M·k so that every class finds a client.
        k: labels per client, 1..K.
        seed: the run's seed.
        domain: key of an independent stream, for one call per domain.

    Raises:
        ValueError: k is not in 1..K, M·k < K, or classes too small for the shards.
    """
    samples, rng = _prepare(labels, num_clients, 1, seed, domain)
    sizes = np.array([len(mine) for mine in samples])
    check_labels_per_client(num_clients, k, len(sizes))
    most = np.minimum(num_clients, sizes)
    if most.sum() < num_clients * k:
        raise ValueError(
            f"data.clients={num_clients} × data.labels_per_client={k} needs "
            f"{num_clients * k} shards, the samples of {len(sizes)} classes make {most.sum()}"
        )
    shards = np.ones(len(sizes), np.int64)
    for _ in range(num_clients * k - len(sizes)):
        shards[np.argmax(np.where(shards < most, sizes / shards, -1.0))] += 1
    # A client takes the k classes with most shards left (ties at random): never stuck, because
    # no class has more shards left than there are clients to come.
    left = shards.copy()
    holders: list[list[int]] = [[] for _ in sizes]
    for client in rng.permutation(num_clients):
        order = np.lexsort((rng.random(len(sizes)), -left))
        for column in order[:k]:
            left[column] -= 1
            holders[column].append(int(client))
    table = np.zeros((num_clients, len(sizes)), np.int64)
    for column, chosen in enumerate(holders):
        table[chosen, column] = shares.apportion(int(sizes[column]), np.ones(len(chosen)))
    return shares.fill(table, samples)


def iid(
    labels: NDArray[np.integer],
    num_clients: int,
    *,
    seed: int,
    allow_empty: bool = False,
    domain: int = 0,
) -> list[Indices]:
    """Deal shuffled samples to the clients, equal in number to within one.

    Raises:
        ValueError: more clients than samples, unless `allow_empty`.
    """
    _, rng = _prepare(labels, num_clients, 0 if allow_empty else 1, seed, domain)
    order = rng.permutation(len(labels)).astype(np.int64)
    return [np.sort(part) for part in np.array_split(order, num_clients)]


def split(
    labels: NDArray[np.integer],
    domains: NDArray[np.integer],
    *,
    name: str,
    clients: int,
    alpha: float = 0.5,
    labels_per_client: int = 3,
    min_size: int = 2,
    allow_empty: bool = False,
    seed: int,
) -> list[Indices]:
    """Apply the partition `name` within each domain; `iid` ignores domains.

    Clients are spread over the domains in contiguous blocks, as equally as possible: with 10
    clients and 4 domains the blocks hold 3, 3, 2 and 2.

    Args:
        labels: (N,) integers.
        domains: (N,) the domain of each sample.
        name: one of `PARTITIONS`.
        clients: number of clients over all domains.
        alpha: of `dirichlet`.
        labels_per_client: of `labels_per_client`.
        min_size: of `dirichlet`.
        allow_empty: of `dirichlet`, `extreme` and `iid`.
        seed: the run's seed.

    Returns:
        Per client, sorted positions in `labels`.

    Raises:
        ValueError: an argument is out of range, named by its configuration key.
    """
    if name not in PARTITIONS:
        raise ValueError(f"data.partition={name!r} is unknown; allowed: {', '.join(PARTITIONS)}")
    if name == "iid":
        return iid(labels, clients, seed=seed, allow_empty=allow_empty)
    present = np.unique(domains)
    if clients < len(present):
        raise ValueError(
            f"data.clients={clients} is fewer than the {len(present)} domains, of which each "
            f"needs a client (data.partition=iid does not)"
        )
    parts: list[Indices] = []
    for domain, block in zip(
        present, np.array_split(np.arange(clients), len(present)), strict=True
    ):
        here = np.flatnonzero(domains == domain).astype(np.int64)
        ours, many, key = labels[here], len(block), int(domain)
        if name == "dirichlet":
            mine = dirichlet(
                ours, many, alpha, seed=seed, min_size=min_size, allow_empty=allow_empty, domain=key
            )
        elif name == "extreme":
            mine = extreme(ours, many, seed=seed, allow_empty=allow_empty, domain=key)
        else:
            mine = _labels_per_client(ours, many, labels_per_client, seed=seed, domain=key)
        parts += [here[rows] for rows in mine]
    return parts


_labels_per_client = labels_per_client  # `split` has an argument of that name


def check_labels_per_client(num_clients: int, k: int, num_classes: int) -> None:
    """Raise the one-line ValueError of `labels_per_client` for numbers that cannot work."""
    if not 1 <= k <= num_classes:
        raise ValueError(
            f"data.labels_per_client={k}: must be from 1 to the {num_classes} classes of a domain"
        )
    if num_clients * k < num_classes:
        raise ValueError(
            f"data.labels_per_client={k}: {num_clients} clients (data.clients, of one domain) "
            f"cover {num_clients * k} of {num_classes} classes; raise either"
        )


def home_domains(parts: list[Indices], domains: NDArray[np.integer]) -> NDArray[np.int64]:
    """Return per client the domain of most of its samples, -1 for a client without samples."""
    return np.array(
        [np.argmax(np.bincount(domains[rows])) if len(rows) else -1 for rows in parts], np.int64
    )


def counts(labels: NDArray[np.integer], parts: list[Indices]) -> NDArray[np.int64]:
    """Return the table (clients, classes) of sample counts; columns follow np.unique(labels)."""
    classes = np.unique(labels)
    table = np.zeros((len(parts), len(classes)), np.int64)
    for row, rows in zip(table, parts, strict=True):
        np.add.at(row, np.searchsorted(classes, labels[rows]), 1)
    return table


def _prepare(
    labels: NDArray[np.integer], num_clients: int, floor: int, seed: int, domain: int
) -> tuple[list[Indices], np.random.Generator]:
    """Check the sizes; return each class's indices, shuffled, and the stream for the counts."""
    if num_clients < 1:
        raise ValueError(f"data.clients={num_clients}: must be at least 1")
    if len(labels) < num_clients and floor:
        raise ValueError(
            f"data.clients: {num_clients} clients cannot share {len(labels)} samples; "
            f"lower data.clients"
        )
    if len(labels) < num_clients * floor:
        raise ValueError(
            f"data.min_size={floor}: {num_clients} clients (data.clients) need "
            f"{num_clients * floor} samples, there are {len(labels)}"
        )
    rng = seeds.stream(seed, "partition", client=domain)
    return [rng.permutation(np.flatnonzero(labels == c)) for c in np.unique(labels)], rng
