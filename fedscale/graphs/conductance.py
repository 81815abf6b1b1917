"""Conductance of weighted graphs: exact on small ones, a swept bound on large ones (SSD-FL, V-A).

A graph is its symmetric mixing matrix A, self-loops included. With rows that sum to 1, I − A is
its normalised Laplacian, and Cheeger's inequality reads Φ²/2 ≤ 1 − λ₂ ≤ 2Φ.
"""

from __future__ import annotations

from functools import lru_cache

import networkx as nx
import numpy as np
from scipy.sparse import csr_array, issparse
from scipy.sparse.csgraph import connected_components

from fedscale.graphs import mixing
from fedscale.graphs.fiedler import Matrix, spectrum

EXACT = 14
"""Up to so many nodes every subset is tried."""

MOST = 20
"""Up to so many nodes `method="exact"` is allowed."""

NOISE = 1e-12
"""Entries up to this share of the largest are rounding noise, not links."""


def conductance(A: Matrix | nx.Graph, method: str = "auto") -> float:
    """Return Φ = min over proper non-empty V of cut(V) / min(vol V, vol V̄), equations (2), (3).

    Volumes are row sums, self-loops included; with mixing weights all rows sum to 1, and Φ is the
    smallest cut per node of the smaller side. A single node and a disconnected graph have Φ = 0.
    Φ is not monotone: one more link can lower it.

    Args:
        A: (n, n) symmetric, not negative, dense or sparse; or a graph, with Metropolis weights.
        method: "exact" tries all subsets; "sweep" the prefixes of the Fiedler order, which gives
            an upper bound; "auto" is exact up to 14 nodes and swept above.

    Raises:
        ValueError: another method, a matrix that is not allowed, "exact" above 20 nodes.
    """
    if method not in ("auto", "exact", "sweep"):
        raise ValueError(f"method={method!r}: allowed: auto, exact, sweep")
    A = _checked(A)
    n = A.shape[0]
    if method == "exact" and n > MOST:
        raise ValueError(f"method='exact': {n} nodes have too many subsets; allowed up to {MOST}")
    if not connected(A):
        return 0.0
    if method == "exact" or (method == "auto" and n <= EXACT):
        return exact(A)
    return swept(A, spectrum(A).order)


def cheeger_bound(A: Matrix | nx.Graph) -> float:
    """Return (1 − λ₂)/2 ≤ Φ, λ₂ of the normalised matrix; 0 for a single node.

    Args:
        A: as in `conductance`.

    Raises:
        ValueError: a matrix that is not allowed.
    """
    return (1 - spectrum(_checked(A)).lambda2) / 2


def connected(A: Matrix) -> bool:
    """Whether the graph of A's links is connected; noise is no link."""
    links = abs(A) > NOISE * A.max()
    if issparse(links):
        return int(connected_components(links, directed=False)[0]) == 1
    reached, before = np.arange(len(links)) == 0, 0
    while before < (now := int(reached.sum())) < len(links):
        reached, before = reached | links[reached].any(axis=0), now
    return now == len(links)


def exact(A: Matrix) -> float:
    """Return Φ of a connected graph by trying all subsets; 0 for a single node."""
    A = A.toarray() if issparse(A) else A
    n = len(A)
    if n == 1:
        return 0.0
    volume, best = A.sum(axis=1), np.inf
    for first in range(1, 2 ** (n - 1), 2**EXACT):
        chosen = _subsets(n, first, min(first + 2**EXACT, 2 ** (n - 1)))
        inside = chosen @ volume
        cut = (inside - ((chosen @ A) * chosen).sum(axis=1)).clip(min=0)
        best = min(best, float((cut / np.minimum(inside, volume.sum() - inside)).min()))
    return best


def swept(A: Matrix, order: np.ndarray) -> float:
    """Return the smallest ratio (3) of the prefixes of an order, ≥ Φ; 0 for a single node."""
    return float(cuts(A, order).min(initial=np.inf)) if len(order) > 1 else 0.0


def cuts(A: Matrix, order: np.ndarray) -> np.ndarray:
    """Return the ratio (3) of every prefix order[:1] … order[:n−1], (n − 1,), in O(edges)."""
    n = len(order)
    volume, loops = np.asarray(A.sum(axis=1)).ravel(), A.diagonal()
    place = np.empty(n, dtype=int)
    place[order] = np.arange(n)
    rows, columns, weights = _entries(A)
    before = place[columns] < place[rows]
    back = np.bincount(rows[before], weights[before], minlength=n)
    steps = (volume - loops - 2 * back)[order]
    cut = np.cumsum(steps)[:-1].clip(min=0)
    inside = np.cumsum(volume[order])[:-1]
    return cut / np.minimum(inside, volume.sum() - inside)


def whole_prefixes(A: Matrix, order: np.ndarray) -> np.ndarray:
    """Say for every prefix order[:1] … order[:n−1] whether it and the rest are connected."""
    n = len(order)
    place = np.empty(n, dtype=int)
    place[order] = np.arange(n)
    rows, columns, weights = _entries(A)
    links = weights > NOISE * weights.max(initial=0)
    a, b = place[rows[links]], place[columns[links]]
    forth = _growing(n, a, b)
    return forth[:-1] & _growing(n, n - 1 - a, n - 1 - b)[:-1][::-1]


def _growing(n: int, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Whether the nodes 0 … i are connected, for every i: (n,), by union–find."""
    earlier = b < a
    a, b = a[earlier], b[earlier]
    by_node = np.argsort(a, kind="stable")
    ends = np.cumsum(np.bincount(a, minlength=n)).tolist()
    others = b[by_node].tolist()
    parent = list(range(n))
    found, parts, begin = [], 0, 0
    for node, end in enumerate(ends):
        parts += 1
        for other in others[begin:end]:
            while parent[other] != other:
                parent[other] = other = parent[parent[other]]
            if other != node:
                parent[other] = node
                parts -= 1
        begin = end
        found.append(parts == 1)
    return np.array(found)


def _entries(A: Matrix) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return rows, columns and values of the entries that are not 0."""
    if issparse(A):
        entries = A.tocoo()
        return *entries.coords, entries.data
    rows, columns = np.nonzero(A)
    return rows, columns, A[rows, columns]


def _subsets(n: int, first: int, last: int) -> np.ndarray:
    """Return the subsets number first … last − 1 as rows of 0 and 1, (last − first, n)."""
    return _small_subsets(n) if n <= EXACT else _bits(n, first, last)


@lru_cache(maxsize=EXACT)
def _small_subsets(n: int) -> np.ndarray:
    return _bits(n, 1, 2 ** (n - 1))


def _bits(n: int, first: int, last: int) -> np.ndarray:
    return (np.arange(first, last)[:, None] >> np.arange(n) & 1).astype(np.float64)


def _checked(A: Matrix | nx.Graph) -> Matrix:
    if isinstance(A, nx.Graph):
        if not len(A):
            raise ValueError(f"A={A}: allowed are graphs with at least one node")
        return mixing.metropolis(nx.convert_node_labels_to_integers(A))
    found: Matrix = csr_array(A) if issparse(A) else np.asarray(A)
    found = found.astype(np.float64)
    if found.ndim != 2 or found.shape[0] != found.shape[1] or not found.shape[0]:
        raise ValueError(
            f"A: shape {found.shape}; allowed are square matrices of at least one node"
        )
    with np.errstate(over="ignore"):
        total = found.sum()
    if not np.isfinite(total):
        raise ValueError("A: allowed are finite numbers with a finite sum")
    largest = abs(found).max()
    if found.min() < -NOISE * largest or abs(found - found.T).max() > 1e-9 * largest:
        raise ValueError("A: allowed are symmetric matrices of numbers from 0")
    return found
