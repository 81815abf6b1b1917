"""Outer eigenvalues and the Fiedler order of weighted graphs, the same under rounding noise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.sparse import csr_array, issparse
from scipy.sparse.linalg import ArpackError, eigsh

Matrix = Any
"""A symmetric np.ndarray or scipy.sparse.csr_array, (n, n)."""

LANCZOS = 200
"""Above so many nodes only the outer eigenvalues are computed, by Lanczos iterations."""

_TIE = 1e-9
"""Eigenvalues this near count as one, entries of eigenvectors are rounded to 9 decimals."""

_DEFLATED = 3.0
"""Subtracted from the trivial eigenvalue 1: below all others, which lie in [−1, 1]."""


@dataclass(frozen=True, eq=False)
class Spectrum:
    """What clustering needs of the normalised matrix D^(−½) A D^(−½), D the row sums.

    Attributes:
        lambda2: its second largest eigenvalue; 1 on a disconnected graph and on a single node.
        lambda_min: its smallest eigenvalue.
        order: (n,) nodes by their entry in the eigenvector of λ₂, see `spectrum`.
    """

    lambda2: float
    lambda_min: float
    order: np.ndarray


def spectrum(A: Matrix) -> Spectrum:
    """Return λ₂, λ_min and the Fiedler order of a symmetric matrix that is not negative.

    Where λ₂ is multiple (|λ − λ₂| < 1e-9), the vector is the projection of the centred node index
    onto its eigenspace, or if that is 0 the first column of the projector that is not. Where λ₂ is
    simple its sign makes Σ v³ positive; only if that is 0 too, the index decides. Entries (of
    D^(−½) v, length 1) are rounded to 9 decimals and ties go by index. So rounding noise does not
    change the order, and where λ₂ is simple and entries neither tie nor mirror each other, labels
    do not either; on symmetric graphs (cycles, grids) they may.

    Above 200 nodes the eigenvalues come from Lanczos iterations (`eigsh`) that start at the
    index, and if they show a multiple λ₂ or do not converge, from a full decomposition.

    Args:
        A: (n, n), dense or sparse; a mixing matrix has D = I. A row of zeros is a node by itself.
    """
    n = A.shape[0]
    B, root = _normalised(A)
    index = np.arange(n) - (n - 1) / 2
    if n == 1:
        return Spectrum(1.0, 1.0, np.zeros(1, dtype=int))
    outer = _iterated(B, index) if n > LANCZOS else None
    if outer is None:
        u = root / np.linalg.norm(root) if root.any() else np.full(n, n**-0.5)
        dense = B.toarray() if issparse(B) else B
        values, vectors = np.linalg.eigh(dense - _DEFLATED * np.outer(u, u))
        outer = float(values[-1]), float(values[1]), vectors[:, values > values[-1] - _TIE]
    lambda2, lambda_min, space = outer
    vector = np.divide(_direction(space, index), root, out=np.zeros(n), where=root > 0)
    entries = np.round(vector / (np.linalg.norm(vector) or 1.0), 9)
    return Spectrum(lambda2, lambda_min, np.lexsort((np.arange(n), entries)))


def _normalised(A: Matrix) -> tuple[Matrix, np.ndarray]:
    """Return D^(−½) A D^(−½) and the diagonal of D^½."""
    root = np.sqrt(np.asarray(A.sum(axis=1)).ravel())
    alone = root == 0
    scale = 1 / np.where(alone, 1.0, root)
    if issparse(A):
        entries = A.tocoo()
        rows, columns = entries.coords
        data = entries.data * scale[rows] * scale[columns]
        loops = np.flatnonzero(alone)
        places = np.concatenate([rows, loops]), np.concatenate([columns, loops])
        return csr_array((np.concatenate([data, alone[loops]]), places), shape=A.shape), root
    return A * scale[:, None] * scale + np.diag(alone.astype(float)), root


def _iterated(B: Matrix, index: np.ndarray) -> tuple[float, float, np.ndarray] | None:
    """Return λ₂, λ_min and the one eigenvector of λ₂; None where a full decomposition must say."""
    n = len(index)
    other = np.cos(np.arange(n) + 1.0)
    # The iterations see of every eigenspace only what the start holds of it: mostly the index, and
    # a little of something else, lest an eigenspace orthogonal to the index stay unseen.
    start = index / np.linalg.norm(index) + 1e-6 * other / np.linalg.norm(other)
    try:
        values, vectors = eigsh(
            csr_array(B), k=6, which="BE", ncv=30, v0=start, maxiter=100 + n // 5
        )
    except ArpackError:
        return None
    order = np.argsort(values)
    if values[order[-2]] - values[order[-3]] < _TIE or values[order[-2]] > 1 - _TIE:
        return None
    return float(values[order[-2]]), float(values[order[0]]), vectors[:, order[[-2]]]


def _direction(space: np.ndarray, index: np.ndarray) -> np.ndarray:
    """Return the vector of an eigenspace (n, m) that does not depend on its basis."""
    vector = space @ (space.T @ index)
    if np.linalg.norm(vector) < _TIE * np.linalg.norm(index):
        first = np.flatnonzero(np.linalg.norm(space, axis=1) > _TIE)[0]
        vector = space @ space[first]
    vector = vector / np.linalg.norm(vector)
    lean = float((vector**3).sum())
    return -vector if space.shape[1] == 1 and lean < -_TIE else vector
