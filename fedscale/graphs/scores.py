"""What a partition is judged by: the threshold (37), and the bounds (28) and (33) of SSD-FL."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedscale.graphs import heterogeneity
from fedscale.graphs.partitions import Part, Partitions

ALPHA = 0.1
"""α, the baseline variance of stochastic gradients (Assumption 4)."""

_COLUMNS = 65536


@dataclass(frozen=True, eq=False)
class Problem:
    """The numbers that the bounds are made of; see `form_clusters`.

    Attributes:
        divergences: (E,) of the network's links, `heterogeneity.link_divergences`; None = 0.
        gram: (N, N) of the initial gradients, `gram_matrix`; None without gradients.
    """

    eta: float
    tau_a: int
    tau_r: int
    B: float
    gamma: np.ndarray
    loss: np.ndarray
    tolerance: float
    with_tau_a: bool
    per_cluster: bool
    optimizers: Sequence[heterogeneity.Optimizer] | None
    divergences: np.ndarray | None
    gram: np.ndarray | None


def threshold(problem: Problem, size: int, devices: int, clusters: int) -> float:
    """Return Φ_S^min = sqrt(2η + 4ηB·sqrt(⌊N/S⌋)/Δtol), equation (37).

    Args:
        problem: η, B, Δtol and the variants: `with_tau_a` puts back the τ_a that (31) → (35)
            dropped, `per_cluster` takes N_s for ⌊N/S⌋.
        size: N_s, devices of the cluster.
        devices: N, isolated devices not counted.
        clusters: S, likewise.
    """
    mean = size if problem.per_cluster else devices // clusters
    scale = problem.tau_a if problem.with_tau_a else 1
    drift = 4 * problem.eta * problem.B * scale * math.sqrt(mean) / problem.tolerance
    return math.sqrt(2 * problem.eta + drift)


def amplification(problem: Problem, partitions: Partitions, part: Part) -> float:
    """Return α̂_s = 1 + α_s^o + α_s^d of a cluster, equations (38)–(41)."""

    def compute() -> float:
        found = 1.0
        if problem.optimizers is not None:
            own = [problem.optimizers[device] for device in part.devices]
            found += heterogeneity.optimizer_score(own)
        if problem.divergences is not None:
            inside = partitions.inside(part.devices)
            found += heterogeneity.data_score(problem.divergences[inside])
        return found

    return partitions.remembered("amplification", part, compute)


def stationarity_score(problem: Problem, partitions: Partitions, parts: Sequence[Part]) -> float:
    """Return the mean over clusters of the bound (28); +inf where its denominator is not positive.

    L̃_s is the sum of the devices' losses: at the common initial point all other terms are 0.
    """
    return sum(_stationarity(problem, partitions, part) for part in parts) / len(parts)


def cycle_score(problem: Problem, partitions: Partitions, parts: Sequence[Part]) -> float:
    """Return the right-hand side of (33) with τ_r for (τ_r − 1), summed over G's components.

    Isolated devices are left out: they add the same to every partition. γ^eff is made of Ã (26),
    and the gap before the mixings is estimated from the gradients at the common initial point:
    Δ̂ = η‖(Σ_{q<τ_a} Ã^q − τ_a J) g‖, J averaging each component. +inf where the denominator is
    not positive, or the bound is no finite number.
    """
    eta, tau_a, tau_r, B = problem.eta, problem.tau_a, problem.tau_r, problem.B
    total = 0.0
    for component in partitions.start()[0]:
        members = set(component.devices)
        own = [part for part in parts if part.devices[0] in members]
        size = len(component.devices)
        gamma = _effective(problem, component.devices, min(part.lambda_min for part in own))
        tops = [
            _effective(problem, part.devices, part.lambda_min)
            + tau_a * B * math.sqrt(len(part.devices))
            for part in own
        ]
        amplified = max(amplification(problem, partitions, part) for part in own)
        below = eta - amplified * eta * eta * (gamma + tau_a * B * math.sqrt(size)) / 2
        if below <= 0 or component.lambda2 >= 1:
            return math.inf
        loss = float(problem.loss[list(component.devices)].sum())
        c1 = (tau_a + 2 * tau_r - 2) * eta * eta / 2
        c2 = (tau_a * B) * (tau_a * B) * size * tau_r * (tau_a + tau_r - 1) ** 2
        pull = gamma * (1 - component.lambda_min) / (1 - component.lambda2)
        squared = sum(_drift(problem, partitions, part) for part in own)
        total += ((2 * tau_r - 1) * loss + ALPHA * c1 * sum(tops)) / below
        total += 4 * tau_r * pull * pull * eta * eta * squared + 4 * c2
    return total if math.isfinite(total) else math.inf


def gram_matrix(gradients: np.ndarray, groups: Sequence[Sequence[int]]) -> np.ndarray:
    """Return the inner products of gradients centred in each group of devices, (N, N) float64.

    Args:
        gradients: (N, P).
        groups: disjoint groups of devices; gradients of the others count as 0.
    """
    found = np.zeros((len(gradients), len(gradients)))
    for first in range(0, gradients.shape[1], _COLUMNS):
        columns = gradients[:, first : first + _COLUMNS].astype(np.float64)
        centred = np.zeros_like(columns)
        for group in map(list, groups):
            centred[group] = columns[group] - columns[group].mean(axis=0)
        found += centred @ centred.T
    return found


def _stationarity(problem: Problem, partitions: Partitions, part: Part) -> float:
    eta, own = problem.eta, list(part.devices)

    def compute() -> float:
        gamma = _effective(problem, own, part.lambda_min)
        top = gamma + problem.tau_a * problem.B * math.sqrt(len(own))
        below = eta - amplification(problem, partitions, part) * eta * eta * top / 2
        above = float(problem.loss[own].sum()) + ALPHA * problem.tau_a * eta * eta * top / 2
        return above / below if below > 0 else math.inf

    return partitions.remembered("stationarity", part, compute)


def _effective(problem: Problem, devices: Sequence[int], lambda_min: float) -> float:
    """γ^eff = max γ_i + 1 + (1 − λ_min)/η, equations (24), (26)."""
    return float(problem.gamma[list(devices)].max()) + 1 + (1 - lambda_min) / problem.eta


def _drift(problem: Problem, partitions: Partitions, part: Part) -> float:
    """‖Σ_{q<τ_a} Ã_s^q (g − ḡ)‖² of a cluster's rows, ḡ the mean over its component."""
    assert problem.gram is not None, "checked by form_clusters"
    gram, own = problem.gram, list(part.devices)

    def compute() -> float:
        A = partitions.weights(part.devices)
        power = summed = np.eye(len(own))
        for _ in range(problem.tau_a - 1):
            power = A @ power
            summed = summed + power
        return max(0.0, float(((summed @ gram[np.ix_(own, own)]) * summed).sum()))

    return partitions.remembered("drift", part, compute)
