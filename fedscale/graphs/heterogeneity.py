"""How different the devices of a cluster are: optimizers (38)–(39), data (40)–(41) of SSD-FL."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.spatial.distance import cdist, jensenshannon

SAMPLE = 64
"""D̂: images per device that the energy distance compares."""

LARGEST = 0.2
"""α^{o,max} and α^{d,max}; the minima are 0."""

Optimizer = tuple[str, float, float]
"""(kind, μ, ρ) of a device."""


def optimizer_score(optimizers: Sequence[Optimizer]) -> float:
    """Return α^o of a cluster's devices, equations (38), (39) with ζ = 1."""
    kinds = np.array([kind for kind, _, _ in optimizers])
    numbers = np.array([[mu, rho] for _, mu, rho in optimizers], dtype=np.float64)
    beta = (kinds[:, None] != kinds).mean()
    beta += np.abs(numbers[:, None] - numbers).mean(axis=(0, 1)).sum()
    return float(beta / 3 * LARGEST)


def pair_divergence(
    labels: tuple[np.ndarray, np.ndarray], samples: tuple[np.ndarray, np.ndarray] | None
) -> float:
    """Return JSD (base 2) of two devices' label frequencies + their energy distance per feature.

    Args:
        labels: of the two devices, (N_i,) each.
        samples: of the two devices, (D̂, features) pixels in 0 … 1; None leaves the second term out.
    """
    count = 1 + max(int(part.max()) for part in labels)
    counts = [np.bincount(part, minlength=count) for part in labels]
    found = float(jensenshannon(*counts, base=2)) ** 2
    if samples is not None:
        found += energy_distance(*samples) / samples[0].shape[1]
    return found


def energy_distance(x: np.ndarray, y: np.ndarray) -> float:
    """Return the squared energy distance 2E‖x − y‖ − E‖x − x'‖ − E‖y − y'‖ of two samples."""
    return float(2 * cdist(x, y).mean() - cdist(x, x).mean() - cdist(y, y).mean())


def data_score(divergences: Sequence[float]) -> float:
    """Return α^d of a cluster from the `pair_divergence` of its edges; without edges 0."""
    return float(np.mean(divergences)) * LARGEST if len(divergences) else 0.0
