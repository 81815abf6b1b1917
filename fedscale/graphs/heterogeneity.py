"""How different the devices of a cluster are: optimizers (38)–(39), data (40)–(41) of SSD-FL."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.spatial.distance import cdist
from scipy.special import rel_entr

SAMPLE = 64
"""D̂: images per device that the energy distance compares."""

LARGEST = 0.2
"""α^{o,max} and α^{d,max}; the minima are 0."""

Optimizer = tuple[str, float, float]
"""(kind, μ, ρ) of a device."""


def optimizer_score(optimizers: Sequence[Optimizer]) -> float:
    """Return α^o of a cluster's devices, equations (38), (39) with ζ = 1.

    Raises:
        ValueError: μ or ρ that are not finite.
    """
    kinds = np.unique([kind for kind, _, _ in optimizers], return_inverse=True)[1]
    numbers = np.array([[mu, rho] for _, mu, rho in optimizers], dtype=np.float64)
    if not np.isfinite(numbers).all():
        raise ValueError("optimizers: allowed are (kind, μ, ρ) with finite numbers")
    beta = float((kinds[:, None] != kinds).mean())
    beta += float(np.abs(numbers[:, None] - numbers).mean(axis=(0, 1)).sum())
    return beta / 3 * LARGEST


def link_divergences(
    links: np.ndarray,
    labels: Sequence[np.ndarray] | None,
    samples: Sequence[np.ndarray] | None,
) -> np.ndarray:
    """Return the summand of (40) for every link: JSD of labels + energy distance per feature.

    The energy distance of two samples is the squared one, 2E‖x − y‖ − E‖x − x'‖ − E‖y − y'‖.

    Args:
        links: (E, 2) pairs of devices.
        labels: of each of the N devices, (N_i,) whole numbers; None leaves the first term out.
        samples: of each of the N devices, (D̂, features) pixels in 0 … 1, as many for all; None
            leaves the second term out.

    Returns:
        (E,); NaN where one of the two devices has no labels, since it trains on nothing.

    Raises:
        ValueError: labels or samples that are not so.
    """
    found = np.zeros(len(links))
    if labels is not None:
        shares = label_shares(labels)
        found += jensen_shannon(shares[links[:, 0]], shares[links[:, 1]])
    if samples is not None:
        stacked = _stacked(samples)
        within = [cdist(x, x).mean() for x in stacked]
        for row, (u, v) in enumerate(links.tolist()):
            across = 2 * cdist(stacked[u], stacked[v]).mean()
            found[row] += (across - within[u] - within[v]) / stacked.shape[2]
    return found


def label_shares(labels: Sequence[np.ndarray]) -> np.ndarray:
    """Return relative frequencies of the labels, (N, distinct labels); NaN without labels.

    Raises:
        ValueError: labels that are not one row of whole numbers per device.
    """
    each = [np.asarray(own) for own in labels]
    if any(own.ndim != 1 or (len(own) and own.dtype.kind not in "iub") for own in each):
        raise ValueError("labels: allowed is one row of whole numbers per device")
    owner = np.repeat(np.arange(len(each)), [len(own) for own in each])
    known, kind = np.unique(np.concatenate([own.astype(int) for own in each]), return_inverse=True)
    counts = np.zeros((len(each), len(known)))
    np.add.at(counts, (owner, kind), 1)
    sizes = counts.sum(axis=1, keepdims=True)
    return np.divide(counts, sizes, out=np.full_like(counts, np.nan), where=sizes > 0)


def jensen_shannon(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Return the Jensen–Shannon divergence in bits (0 … 1) of frequencies (…, K): (…)."""
    middle = (p + q) / 2
    nats = (rel_entr(p, middle) + rel_entr(q, middle)).sum(axis=-1) / 2
    return np.clip(nats / np.log(2), 0.0, 1.0)


def data_score(divergences: np.ndarray) -> float:
    """Return α^d of a cluster, (41), from its `link_divergences`; without links 0.

    NaN entries are left out.
    """
    known = divergences[~np.isnan(divergences)]
    return float(known.mean()) * LARGEST if len(known) else 0.0


def _stacked(samples: Sequence[np.ndarray]) -> np.ndarray:
    each = [np.asarray(own, dtype=np.float64) for own in samples]
    shapes = {own.shape for own in each}
    if len(shapes) > 1 or len(each[0].shape) != 2 or not each[0].size:
        raise ValueError(f"samples: shapes {sorted(shapes)!s:.60}; allowed is one (D̂, features)")
    stacked = np.stack(each)
    if not ((stacked >= 0) & (stacked <= 1)).all():
        raise ValueError("samples: allowed are pixels from 0 to 1")
    return stacked
