"""What a partition is judged by: the threshold (37), and the bounds (28) and (33) of SSD-FL."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedscale.graphs.partitions import Part, Partitions

ALPHA = 0.1
"""α, the baseline variance of stochastic gradients (Assumption 4)."""


@dataclass(frozen=True)
class Problem:
    """The numbers that the bounds are made of; see `form_clusters`."""

    eta: float
    tau_a: int
    tau_r: int
    B: float
    gamma: np.ndarray
    loss: np.ndarray
    tolerance: float
    lazy: bool
    with_tau_a: bool
    per_cluster: bool
    gradients: np.ndarray | None


def threshold(problem: Problem, part: Part, devices: int, clusters: int) -> float:
    """Return Φ_S^min = sqrt(2η + 4ηB·sqrt(⌊N/S⌋)/Δtol), equation (37).

    Args:
        problem: η, B, Δtol and the variants: `with_tau_a` puts back the τ_a that (31) → (35)
            dropped, `per_cluster` takes N_s for ⌊N/S⌋.
        part: the cluster.
        devices: N, isolated devices not counted.
        clusters: S, likewise.
    """
    size = len(part.devices) if problem.per_cluster else devices // clusters
    scale = problem.tau_a if problem.with_tau_a else 1
    drift = 4 * problem.eta * problem.B * scale * math.sqrt(size) / problem.tolerance
    return math.sqrt(2 * problem.eta + drift)


def smoothness(problem: Problem, part: Part) -> float:
    """Return γ_s^eff = γ̂_s + 1 + (1 − λ_min(Ã_s))/η, γ̂_s the largest γ_i of the cluster."""
    gamma = float(problem.gamma[list(part.devices)].max())
    return gamma + 1 + (1 - part.lambda_min) / problem.eta


def stationarity_score(problem: Problem, partitions: Partitions, parts: Sequence[Part]) -> float:
    """Return the mean over clusters of (28); +inf where its denominator is not positive.

    L̃_s is the sum of the devices' losses: at the common initial point all other terms are 0.
    """
    return float(np.mean([_stationarity(problem, partitions, part) for part in parts]))


def _stationarity(problem: Problem, partitions: Partitions, part: Part) -> float:
    eta, size = problem.eta, len(part.devices)
    top = smoothness(problem, part) + problem.tau_a * problem.B * math.sqrt(size)
    amplified = 1 + partitions.heterogeneity(part)
    below = eta - amplified * eta**2 * top / 2
    if below <= 0:
        return math.inf
    loss = float(problem.loss[list(part.devices)].sum())
    return (loss + ALPHA * problem.tau_a * eta**2 * top / 2) / below


def cycle_score(problem: Problem, partitions: Partitions, parts: Sequence[Part]) -> float:
    """Return the right-hand side of (33) with τ_r for (τ_r − 1), summed over G's components.

    γ^eff is the largest of the clusters', and the gap before the mixings is estimated from the
    gradients at the common initial point: Δ̂ = η‖(Σ_{q<τ_a} Ã^q − τ_a J) g‖, J averaging each
    component. +inf where the denominator is not positive.
    """
    assert problem.gradients is not None, "checked by form_clusters"
    eta, tau_a, tau_r, B = problem.eta, problem.tau_a, problem.tau_r, problem.B
    total = 0.0
    for component in partitions.start()[0]:
        own = [part for part in parts if set(part.devices) <= set(component.devices)]
        size = len(component.devices)
        gamma = max(smoothness(problem, part) for part in own)
        tops = [gamma_s(problem, part) for part in own]
        amplified = 1 + max(partitions.heterogeneity(part) for part in own)
        below = eta - amplified * eta**2 * (gamma + tau_a * B * math.sqrt(size)) / 2
        if below <= 0 or component.lambda2 >= 1:
            return math.inf
        loss = float(problem.loss[list(component.devices)].sum())
        c1 = (tau_a + 2 * tau_r - 2) * eta**2 / 2
        c2 = tau_a**2 * B**2 * size * tau_r * (tau_a + tau_r - 1) ** 2
        gap = _gap(problem, component, own)
        pull = gamma * (1 - component.lambda_min) / (1 - component.lambda2)
        total += ((2 * tau_r - 1) * loss + ALPHA * c1 * sum(tops)) / below
        total += 4 * tau_r * pull**2 * gap**2 + 4 * c2
    return total


def gamma_s(problem: Problem, part: Part) -> float:
    """Return Γ_s = γ_s^eff + τ_a B √N_s, equation (29)."""
    return smoothness(problem, part) + problem.tau_a * problem.B * math.sqrt(len(part.devices))


def _gap(problem: Problem, component: Part, own: Sequence[Part]) -> float:
    assert problem.gradients is not None
    moved = np.zeros((len(component.devices), problem.gradients.shape[1]))
    place = {device: row for row, device in enumerate(component.devices)}
    for part in own:
        g = step = problem.gradients[list(part.devices)].astype(np.float64)
        for _ in range(problem.tau_a - 1):
            step = part.weights @ step
            g = g + step
        moved[[place[device] for device in part.devices]] = g
    mean = problem.gradients[list(component.devices)].mean(axis=0, dtype=np.float64)
    return problem.eta * float(np.linalg.norm(moved - problem.tau_a * mean))
