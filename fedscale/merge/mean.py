"""The index-wise weighted mean: what gossip averaging does to every tensor of a payload."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def mean_merge(weights: Tensor | np.ndarray, received: Tensor) -> Tensor:
    """Return W @ X over the leading client axis.

    A row e_u returns X[u] bit for bit, so idle clients keep their state exactly.

    Args:
        weights: (C, M), rows summing to 1.
        received: (M, …) floating point; half precisions are summed in float32.

    Returns:
        (C, …) in the dtype and on the device of `received`.

    Raises:
        ValueError: shapes that do not fit, rows that do not sum to 1, or a non-finite payload,
            named by its client (0 · inf would spread it to clients that never met it).
    """
    matrix = torch.as_tensor(weights, dtype=torch.float64)
    if matrix.ndim != 2 or received.ndim < 1 or matrix.shape[1] != received.shape[0]:
        raise ValueError(
            f"weights {tuple(matrix.shape)} and received {tuple(received.shape)}: "
            "allowed are (C, M) and (M, ...)"
        )
    error = (matrix.sum(dim=1) - 1).abs().nan_to_num(nan=torch.inf)
    if error.numel() and float(error.max()) > 1e-6:
        row = int(error.argmax())
        raise ValueError(f"weights: row {row} sums to {float(matrix[row].sum()):g}, not to 1")
    flat = received.reshape(received.shape[0], -1)
    finite = flat.isfinite().all(dim=1)
    if not finite.all():
        raise ValueError(f"received: client {int((~finite).nonzero()[0])} is not finite")
    wide = torch.promote_types(received.dtype, torch.float32)
    mixed = matrix.to(received.device, wide) @ flat.to(wide)
    return mixed.to(received.dtype).reshape(matrix.shape[0], *received.shape[1:])
