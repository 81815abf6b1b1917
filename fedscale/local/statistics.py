"""Sufficient statistics of features: what clients send instead of gradients (FedOPAL, AFL).

R_k = Σ h hᵀ and C_k = Σ h yᵀ, equations (3) and (7) of FedOPAL, arXiv 2607.08368. Sums over the
parts of any partition add up to the sums over all samples; M times the clients' mean is their
sum, so gossip recovers it without a server.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Statistics(NamedTuple):
    """Sums over the samples of each of M clients; float64, so that any axis-0 mean is exact enough.

    Attributes:
        gram: (M, d(d+1)/2), Σ h hᵀ as packed by `pack_symmetric`.
        sums: (M, d, K), Σ h yᵀ; its columns are the sums of the features of a class.
        counts: (M, K), samples per class.
    """

    gram: Tensor
    sums: Tensor
    counts: Tensor


def sufficient_statistics(h: Tensor, y: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:
    """Return R = Σ h hᵀ (d, d) and C = Σ h yᵀ (d, K), y one-hot, in float64.

    Args:
        h: (N, d) features of any floating type; N may be 0.
        y: (N,) integer labels in 0 … K−1; classes may be absent.
        num_classes: K.

    Raises:
        ValueError: shapes that do not fit, labels that are not integers in 0 … K−1, features that
            are not finite or whose squares overflow.
    """
    check_samples(h, y, num_classes)
    wide = h.detach().double()
    gram = wide.T @ wide
    if not gram.diagonal().isfinite().all():
        bad = (~wide.isfinite().all(dim=1)).nonzero()
        if len(bad):
            raise ValueError(f"features[{int(bad[0])}]: allowed are finite values")
        raise ValueError(f"features={float(wide.abs().max()):.3g}: allowed are up to about 1e150")
    return gram, wide.T @ F.one_hot(y.long(), num_classes).double()


def client_statistics(
    chunks: Iterable[tuple[Tensor, Tensor]], sizes: Sequence[int], width: int, num_classes: int
) -> Statistics:
    """Sum the statistics of M clients over a stream of features; one chunk is held at a time.

    Args:
        chunks: (n, d) features and (n,) labels, the samples of client 0, then those of client 1
            and so on. A chunk may end anywhere, and hold samples of several clients.
        sizes: (M,) samples of each client, 0 allowed.
        width: d.
        num_classes: K.

    Returns:
        Statistics on the CPU.

    Raises:
        ValueError: as `sufficient_statistics`; samples that are more or fewer than `sizes` says.
    """
    left = [int(size) for size in sizes]
    if not left or min(left) < 0:
        raise ValueError(f"sizes={left}: allowed are one or more numbers from 0")
    found = Statistics(
        torch.zeros(len(left), packed_size(width), dtype=torch.float64),
        torch.zeros(len(left), width, num_classes, dtype=torch.float64),
        torch.zeros(len(left), num_classes, dtype=torch.float64),
    )
    client = 0
    for h, y in chunks:
        check_samples(h, y, num_classes)
        if h.shape[1] != width:
            raise ValueError(f"features {tuple(h.shape)}: allowed are (n, {width})")
        start = 0
        while start < len(y):
            while client < len(left) and not left[client]:
                client += 1
            if client == len(left):
                raise ValueError(f"sizes: the chunks hold more than {sum(sizes)} samples")
            rows = slice(start, start + left[client])
            gram, sums = sufficient_statistics(h[rows], y[rows], num_classes)
            found.gram[client] += pack_symmetric(gram).cpu()
            found.sums[client] += sums.cpu()
            found.counts[client] += torch.bincount(y[rows].long(), minlength=num_classes).cpu()
            taken = min(left[client], len(y) - start)
            left[client] -= taken
            start += taken
    if any(left):
        raise ValueError(f"sizes: the chunks lack {sum(left)} of {sum(sizes)} samples")
    return found


def check_samples(h: Tensor, y: Tensor, num_classes: int) -> None:
    """Raise the one-line ValueError of features and labels that do not fit each other or K."""
    if h.ndim != 2 or not h.shape[1] or y.shape != h.shape[:1]:
        raise ValueError(
            f"features {tuple(h.shape)} and labels {tuple(y.shape)}: allowed are (N, d) and (N,)"
        )
    if num_classes < 1:
        raise ValueError(f"num_classes={num_classes}: allowed is 1 or more")
    if not h.is_floating_point():
        raise ValueError(f"features {h.dtype}: allowed are floating-point numbers")
    if y.is_floating_point() or y.is_complex() or y.dtype == torch.bool:
        raise ValueError(f"labels {y.dtype}: allowed are integers from 0 to {num_classes - 1}")
    if len(y) and not 0 <= int(y.min()) <= int(y.max()) < num_classes:
        raise ValueError(
            f"labels {int(y.min())} to {int(y.max())}: allowed are 0 to {num_classes - 1}"
        )


def normalise(h: Tensor) -> Tensor:
    """Scale the rows of h (…, d) to unit length at any magnitude; rows of zeros stay."""
    largest = h.abs().amax(dim=-1, keepdim=True)
    # Squares of float32 features beyond 1e±19 leave float32's range, hence the division first.
    return F.normalize(h / largest.where(largest > 0, 1), dim=-1)


def packed_size(width: int) -> int:
    """Numbers in a packed symmetric (d, d) matrix: d(d+1)/2."""
    return width * (width + 1) // 2


def pack_symmetric(matrix: Tensor) -> Tensor:
    """Return the upper triangle of symmetric matrices, row by row: (…, d, d) → (…, d(d+1)/2).

    Raises:
        ValueError: the last two axes differ.
    """
    if matrix.ndim < 2 or matrix.shape[-2] != matrix.shape[-1]:
        raise ValueError(f"matrix {tuple(matrix.shape)}: allowed are (…, d, d)")
    rows, columns = _triangle(matrix)
    return matrix[..., rows, columns]


def unpack_symmetric(packed: Tensor) -> Tensor:
    """Undo `pack_symmetric`: (…, d(d+1)/2) → (…, d, d), exactly symmetric.

    Raises:
        ValueError: a length that is not d(d+1)/2.
    """
    length = packed.shape[-1] if packed.ndim else 0
    d = (math.isqrt(8 * length + 1) - 1) // 2
    if not length or packed_size(d) != length:
        raise ValueError(
            f"packed {tuple(packed.shape)}: allowed are (…, d(d+1)/2), so 1, 3, 6, 10, … numbers"
        )
    matrix = packed.new_empty(*packed.shape[:-1], d, d)
    rows, columns = _triangle(matrix)
    matrix[..., rows, columns] = packed
    matrix[..., columns, rows] = packed
    return matrix


def _triangle(matrix: Tensor) -> tuple[Tensor, Tensor]:
    d = matrix.shape[-1]
    rows, columns = torch.triu_indices(d, d, device=matrix.device)
    return rows, columns
