"""Sufficient statistics of features: what clients send instead of gradients (FedOPAL, AFL)."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def sufficient_statistics(h: Tensor, y: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:
    """Return R = Σ h hᵀ (d, d) and C = Σ h yᵀ (d, K) in float64.

    Sums over any parts of the samples add up to the sums over all of them.

    Args:
        h: (N, d) features.
        y: (N,) int64 labels in 0 … K−1.
        num_classes: K.

    Raises:
        ValueError: shapes that do not fit, labels outside 0 … K−1, features that are not finite.
    """
    if h.ndim != 2 or y.shape != h.shape[:1]:
        raise ValueError(
            f"features {tuple(h.shape)} and labels {tuple(y.shape)}: allowed are (N, d) and (N,)"
        )
    if len(y) and not 0 <= int(y.min()) <= int(y.max()) < num_classes:
        raise ValueError(
            f"labels {int(y.min())} to {int(y.max())}: allowed: 0 to {num_classes - 1}"
        )
    wide = h.double()
    if not wide.isfinite().all():
        bad = int((~wide.isfinite().all(dim=1)).nonzero()[0])
        raise ValueError(f"features of sample {bad} are not finite")
    return wide.T @ wide, wide.T @ F.one_hot(y, num_classes).double()


def pack_symmetric(matrix: Tensor) -> Tensor:
    """Return the d(d+1)/2 numbers of a symmetric matrix: (…, d, d) → (…, d(d+1)/2).

    Raises:
        ValueError: the last two axes differ.
    """
    d = matrix.shape[-1]
    if matrix.ndim < 2 or matrix.shape[-2] != d:
        raise ValueError(f"matrix {tuple(matrix.shape)}: allowed are (…, d, d)")
    rows, columns = torch.triu_indices(d, d)
    return matrix[..., rows, columns]


def unpack_symmetric(packed: Tensor) -> Tensor:
    """Undo `pack_symmetric`: (…, d(d+1)/2) → (…, d, d).

    Raises:
        ValueError: a length that is not d(d+1)/2.
    """
    length = packed.shape[-1]
    d = (math.isqrt(8 * length + 1) - 1) // 2
    if d * (d + 1) // 2 != length:
        raise ValueError(f"packed {tuple(packed.shape)}: the last axis must be d(d+1)/2 long")
    rows, columns = torch.triu_indices(d, d)
    matrix = packed.new_empty(*packed.shape[:-1], d, d)
    matrix[..., rows, columns] = packed
    matrix[..., columns, rows] = packed
    return matrix
