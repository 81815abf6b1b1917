"""Conductance of weighted graphs: exact on small ones, a swept bound on large ones (SSD-FL, V-A).

A graph is its symmetric mixing matrix A, self-loops included. With rows that sum to 1, I − A is
its normalised Laplacian, and Cheeger's inequality reads Φ²/2 ≤ 1 − λ₂ ≤ 2Φ.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import connected_components
from scipy.sparse.linalg import eigsh

EXACT = 14
"""Up to so many nodes every subset is tried."""

LANCZOS = 200
"""Above so many nodes only the outer eigenvalues are computed."""

_TIE = 1e-9


def conductance(A: np.ndarray, method: str = "auto") -> float:
    """Return Φ = min over proper non-empty S of cut(S) / min(vol S, vol S̄), equations (2), (3).

    Volumes are row sums, self-loops included. A single node and a disconnected graph have Φ = 0.

    Args:
        A: (n, n), symmetric, not negative.
        method: "exact" tries all subsets; "sweep" the prefixes of the Fiedler order, which gives
            an upper bound; "auto" is exact up to 14 nodes.

    Raises:
        ValueError: another method, a matrix that is not allowed, "exact" above 20 nodes.
    """
    A = _checked(A)
    if method not in ("auto", "exact", "sweep"):
        raise ValueError(f"method={method!r}: allowed: auto, exact, sweep")
    n = len(A)
    if method == "exact" and n > 20:
        raise ValueError(f"method='exact': {n} nodes have too many subsets; allowed up to 20")
    if n == 1 or not connected(A):
        return 0.0
    if method == "exact" or (method == "auto" and n <= EXACT):
        return _exact(A)
    return float(cuts(A, fiedler_order(A)).min())


def cheeger_bound(A: np.ndarray) -> float:
    """Return (1 − λ₂)/2 ≤ Φ, for a matrix whose rows sum to 1."""
    return (1 - spectrum(_checked(A))[0]) / 2


def connected(A: np.ndarray) -> bool:
    """Whether the graph of A's positive entries is connected."""
    return int(connected_components(csr_matrix(A > 0), directed=False)[0]) == 1


def spectrum(A: np.ndarray) -> tuple[float, float]:
    """Return (λ₂, λ_min) of a symmetric matrix; a single node has λ₂ = λ_min = A₀₀."""
    n = len(A)
    if n == 1:
        return float(A[0, 0]), float(A[0, 0])
    if n <= LANCZOS:
        values = np.linalg.eigvalsh(A)
        return float(values[-2]), float(values[0])
    sparse, start = csr_matrix(A), _start(n)
    top = eigsh(sparse, k=2, which="LA", v0=start, return_eigenvectors=False)
    low = eigsh(sparse, k=1, which="SA", v0=start, return_eigenvectors=False)
    return float(top.min()), float(low[0])


def fiedler_order(A: np.ndarray) -> np.ndarray:
    """Sort the nodes by the eigenvector of λ₂, independent of rounding noise.

    Where λ₂ is multiple, the vector is the projection of the centred node index onto its
    eigenspace (or, if that is 0, its first eigenvector with a fixed sign); values are rounded to 9
    decimals and ties go by index. So the order does not depend on labels where λ₂ is simple; on
    symmetric graphs (cycles, grids) it may.
    """
    n = len(A)
    if n <= LANCZOS:
        values, vectors = np.linalg.eigh(A)
    else:
        values, vectors = eigsh(csr_matrix(A), k=min(6, n - 1), which="LA", v0=_start(n))
        order = np.argsort(values)
        values, vectors = values[order], vectors[:, order]
    near = np.abs(values - values[-2]) < _TIE
    near[-1] = False
    space = vectors[:, near]
    index = np.arange(n) - (n - 1) / 2
    vector = space @ (space.T @ index)
    if np.linalg.norm(vector) < 1e-9 * np.linalg.norm(index):
        vector = space[:, 0]
    vector = vector / np.linalg.norm(vector)
    if space.shape[1] == 1:
        # The index has chosen the sign by its own labels: let the vector itself choose.
        vector = vector * _sign(vector)
    return np.lexsort((np.arange(n), np.round(vector, 9)))


def cuts(A: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Return the ratio (3) of every prefix order[:1] … order[:n−1], (n − 1,), in O(edges)."""
    volume, loops = A.sum(axis=1), np.diagonal(A)
    place = np.empty(len(A), dtype=int)
    place[order] = np.arange(len(A))
    rows, columns = np.nonzero(A)
    before = place[columns] < place[rows]
    back = np.bincount(rows[before], A[rows[before], columns[before]], minlength=len(A))
    steps = (volume - loops - 2 * back)[order]
    cut = np.cumsum(steps)[:-1].clip(min=0)
    inside = np.cumsum(volume[order])[:-1]
    return cut / np.minimum(inside, volume.sum() - inside)


def whole_prefixes(A: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Say for every prefix order[:1] … order[:n−1] whether it and the rest are connected."""
    return _growing(A, order)[:-1] & _growing(A, order[::-1])[:-1][::-1]


def _growing(A: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Whether the first 1, 2, … n nodes of an order are connected (union–find)."""
    parent = np.full(len(A), -1)

    def root(node: int) -> int:
        while parent[node] != node:
            parent[node] = parent[parent[node]]
            node = parent[node]
        return node

    found, parts = [], 0
    for node in order.tolist():
        parent[node], parts = node, parts + 1
        for other in np.flatnonzero(A[node]).tolist():
            if parent[other] >= 0 and (a := root(other)) != (b := root(node)):
                parent[a], parts = b, parts - 1
        found.append(parts == 1)
    return np.array(found)


def _exact(A: np.ndarray) -> float:
    chosen = _subsets(len(A))
    volume = A.sum(axis=1)
    inside = chosen @ volume
    cut = inside - np.einsum("si,ij,sj->s", chosen, A, chosen, optimize=True)
    return float((cut.clip(min=0) / np.minimum(inside, volume.sum() - inside)).min())


@lru_cache(maxsize=32)
def _subsets(n: int) -> np.ndarray:
    """All proper non-empty subsets without the last node, as rows of 0 and 1."""
    numbers = np.arange(1, 2 ** (n - 1))[:, None]
    return (numbers >> np.arange(n) & 1).astype(np.float64)


def _sign(vector: np.ndarray) -> float:
    """A sign that does not depend on the labels: of the odd moment, else of the first entry."""
    odd = float(np.round((vector**3).sum(), 9))
    if odd:
        return 1.0 if odd > 0 else -1.0
    first = vector[np.flatnonzero(np.abs(vector) > 1e-9)[0]]
    return 1.0 if first > 0 else -1.0


def _start(n: int) -> np.ndarray:
    return np.cos(np.arange(n) + 1.0)


def _checked(A: np.ndarray) -> np.ndarray:
    A = np.asarray(A, dtype=np.float64)
    if A.ndim != 2 or A.shape[0] != A.shape[1] or not len(A):
        raise ValueError(f"A {A.shape}: allowed are square matrices with at least one node")
    if not np.isfinite(A).all() or (A < 0).any() or np.abs(A - A.T).max() > 1e-9:
        raise ValueError("A: allowed are symmetric matrices of finite numbers from 0")
    return A
