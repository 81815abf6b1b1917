"""What a partition is judged by: the threshold (37), and the bounds (28) and (33) of SSD-FL."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real

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


def make_problem(
    partitions: Partitions,
    *,
    labels: Sequence[np.ndarray] | None = None,
    samples: Sequence[np.ndarray] | None = None,
    optimizers: Sequence[heterogeneity.Optimizer] | None = None,
    eta: float,
    tau_a: int,
    tau_r: int = 1,
    B: float,
    gamma: float | Sequence[float],
    tolerance: float = 10.0,
    loss: float | Sequence[float] = math.log(10),
    with_tau_a: bool = False,
    per_cluster: bool = False,
    gradients: np.ndarray | None = None,
    cycle: bool = False,
) -> Problem:
    """Return the numbers of the bounds, checked; arguments as those of `form_clusters`.

    With `cycle` the score (33) can be asked for; it needs the gradients.

    Raises:
        ValueError: numbers or sequences that do not fit; says what is allowed.
    """
    n = partitions.devices
    for name, each in (("labels", labels), ("samples", samples), ("optimizers", optimizers)):
        if each is not None and len(each) != n:
            raise ValueError(f"{name}: {len(each)} entries for {n} devices; allowed: one each")
    divergences = None
    if labels is not None or samples is not None:
        divergences = heterogeneity.link_divergences(partitions.links, labels, samples)
    return Problem(
        eta=_positive("eta", eta),
        tau_a=_count("tau_a", tau_a),
        tau_r=_count("tau_r", tau_r),
        B=_positive("B", B),
        gamma=_each("gamma", gamma, n),
        loss=_each("loss", loss, n),
        tolerance=_positive("tolerance", tolerance),
        with_tau_a=with_tau_a,
        per_cluster=per_cluster,
        optimizers=optimizers,
        divergences=divergences,
        gram=_gram(partitions, gradients) if cycle else None,
    )


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
        tops = [smoothness(problem, part) for part in own]
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


def stationarity_bound(
    problem: Problem, partitions: Partitions, part: Part, loss: float, instances: int
) -> float:
    """Return the right-hand side of (28) for a cluster; +inf where its denominator is not positive.

    Args:
        problem: the numbers.
        partitions: the network.
        part: the cluster s.
        loss: L̃_s at the start of the regime.
        instances: training instances that the left-hand side sums over, at most τ_a.
    """
    eta = problem.eta
    top = smoothness(problem, part)
    below = eta - amplification(problem, partitions, part) * eta * eta * top / 2
    above = loss + ALPHA * instances * eta * eta * top / 2
    return above / below if below > 0 else math.inf


def smoothness(problem: Problem, part: Part) -> float:
    """Return Γ_s = γ_s^eff + τ_a·B·√N_s of a cluster, equation (29)."""
    size = math.sqrt(len(part.devices))
    return _effective(problem, part.devices, part.lambda_min) + problem.tau_a * problem.B * size


def _stationarity(problem: Problem, partitions: Partitions, part: Part) -> float:
    def compute() -> float:
        loss = float(problem.loss[list(part.devices)].sum())
        return stationarity_bound(problem, partitions, part, loss, problem.tau_a)

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


def _count(name: str, value: int) -> int:
    if not isinstance(value, Integral) or value < 1:
        raise ValueError(f"{name}={value!r:.40}: allowed are whole numbers from 1")
    return int(value)


def _positive(name: str, value: float) -> float:
    if not (isinstance(value, Real) and value > 0 and math.isfinite(value)):
        raise ValueError(f"{name}={value!r:.40}: allowed are finite numbers above 0")
    return float(value)


def _each(name: str, values: float | Sequence[float], n: int) -> np.ndarray:
    found = np.asarray(values, dtype=np.float64)
    if found.shape not in ((), (n,)) or not (np.isfinite(found).all() and (found >= 0).all()):
        raise ValueError(
            f"{name}: shape {found.shape}; allowed are finite numbers from 0, one for all or one "
            f"for each of {n} devices"
        )
    return np.broadcast_to(found, (n,))


def _gram(partitions: Partitions, gradients: np.ndarray | None) -> np.ndarray:
    if gradients is None:
        raise ValueError("gradients=None: accept=cycle needs them, (N, P), one row per device")
    found = np.asarray(gradients)
    if found.ndim != 2 or len(found) != partitions.devices or not np.isfinite(found).all():
        raise ValueError(
            f"gradients: shape {found.shape}; allowed are finite numbers (N, P), one row for each "
            f"of {partitions.devices} devices"
        )
    return gram_matrix(found, [part.devices for part in partitions.start()[0]])
