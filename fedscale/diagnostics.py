"""A run in cycles beside what SSD-FL proves of it: bounds (28), (31) and (32) of arXiv 2606.06687.

Theorems speak of one gradient step per training instance, of gradients that B bounds, and of fixed
clusters. B, γ_i and the losses are estimates where the run starts, so a bound is a yardstick, not
a certificate, and it is null where its premises fail.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import networkx as nx
import numpy as np

from fedscale.blocks import Block, owned
from fedscale.config import RunConfig
from fedscale.graphs.partitions import Part, Partitions
from fedscale.graphs.scores import make_problem, stationarity_bound
from fedscale.regimes.step import Step

COLUMNS = (
    "gap",
    "gap_bound",
    "cluster_gap",
    "cluster_gap_bound",
    "stationarity",
    "stationarity_bound",
)
"""Columns of `rounds` that diagnostics fill."""


def watch(
    step: Step, clusters: Sequence[Sequence[int]], eta: float, before: Block, after: Block
) -> dict[str, Any]:
    """Measure a step.

    Args:
        step: the step; its weights are Ã in training instances.
        clusters: S groups of devices.
        eta: learning rate η.
        before, after: payloads of all M devices before and after the step.

    Returns:
        gap: ‖Δ̂‖, the distance of all devices' parameters to their mean, after the step;
        cluster_gaps, start_gaps: (S,) ‖Δ_s‖ after and before; squares: (S,) ‖(θ − θ′)/η‖², which is
        ‖∇F̃_s(θ)‖² by (14); coupling: (S,) θᵀ(I − Ã)θ/(2η) before, term (d) of (15).
    """
    old, new = _stacked(before), _stacked(after)
    spread = np.einsum("mp,mp->m", old, old - step.weights @ old) / (2 * eta)
    moved = np.square((old - new) / eta).sum(axis=1)
    groups = [list(cluster) for cluster in clusters]
    return {
        "gap": _gap(new),
        "cluster_gaps": np.array([_gap(new[group]) for group in groups]),
        "start_gaps": np.array([_gap(old[group]) for group in groups]),
        "squares": np.array([moved[group].sum() for group in groups]),
        "coupling": np.array([spread[group].sum() for group in groups]),
    }


def _stacked(block: Block) -> np.ndarray:
    parts = owned(block).values()
    return np.concatenate([part.reshape(len(part), -1) for part in parts], 1, dtype=np.float64)


def _gap(theta: np.ndarray) -> float:
    return float(np.linalg.norm(theta - theta.mean(axis=0)))


class Bounds:
    """The columns of a run's steps, one after the other from the start of a cycle."""

    def __init__(
        self,
        config: RunConfig,
        network: nx.Graph,
        clusters: Sequence[Sequence[int]],
        numbers: Mapping[str, Any],
        samples: Sequence[int],
    ) -> None:
        """Take a run.

        Args:
            config: the run.
            network: G.
            clusters: S groups of devices.
            numbers: what the bounds are made of, `formation.numbers`.
            samples: training samples of each device.
        """
        self.partitions = Partitions(network, config.regime.lazy)
        self.problem = make_problem(
            self.partitions, **{k: v for k, v in numbers.items() if k not in ("tau_r", "gradients")}
        )
        self.parts = [self.partitions.part(tuple(sorted(cluster))) for cluster in clusters]
        self.fixed = config.regime.name in ("ssdfl", "sdfl", "pdfl") and not config.graph.link_drop
        local = config.local
        steps = local.epochs * max(1, math.ceil(max(samples) / local.batch_size))
        self.local_steps = min(steps, config.regime.steps_per_instance or steps)
        self.gap = self.factor = 0.0
        self.instances = 0

    def row(
        self, step: Step, watched: Mapping[str, Any], rho: float, losses: np.ndarray | None
    ) -> dict[str, float | None]:
        """Return the columns `COLUMNS` of a step.

        Gaps and stationarity of clusters are means over the clusters; the stationarity sums over
        the instances of the regime so far.

        Args:
            step: the step.
            watched: what `watch` found.
            rho: largest absolute eigenvalue of the step's weights below 1.
            losses: (M,) losses before the step, in the first instance of a cycle.
        """
        row: dict[str, float | None] = {**dict.fromkeys(COLUMNS), "gap": watched["gap"]}
        if not step.train:
            self.factor = 1.0 if self.instances else self.factor * rho
            self.instances = 0
            return row | {"gap_bound": self.factor * self.gap}
        if step.restart:
            assert losses is not None
            self.start, self.total = watched["start_gaps"], np.zeros(len(self.parts))
            own = [losses[list(part.devices)].sum() for part in self.parts]
            self.losses = np.array(own) + watched["coupling"]
            self.instances = 0
        self.instances += 1
        self.gap, self.total = watched["gap"], self.total + watched["squares"]
        row |= {
            "cluster_gap": float(watched["cluster_gaps"].mean()),
            "stationarity": float(self.total.mean()),
        }
        if not self.fixed:
            return row
        gaps = [self._gap(part, start) for part, start in zip(self.parts, self.start, strict=True)]
        row["cluster_gap_bound"] = _mean(gaps)
        if self.local_steps == 1:
            bounds = [
                stationarity_bound(self.problem, self.partitions, part, loss, self.instances)
                for part, loss in zip(self.parts, self.losses, strict=True)
            ]
            row["stationarity_bound"] = _mean(bounds)
        return row

    def _gap(self, part: Part, start: float) -> float:
        """(31) after `instances`, with every gradient of an instance counted; inf if η ≥ 1 − λ₂.

        λ₂ is the largest absolute eigenvalue below 1: plain Metropolis weights may have negative
        ones, which Assumption 3 excludes.
        """
        eta, q, size = self.problem.eta, self.instances, len(part.devices)
        top = max(part.lambda2, -part.lambda_min) if size > 1 else 0.0
        if eta >= 1 - top:
            return math.inf
        drift = 2 * eta * q * self.local_steps * self.problem.B * math.sqrt(size)
        return (top + eta) ** (q - 1) * float(start) + drift / (1 - eta - top)


def _mean(values: Sequence[float]) -> float | None:
    found = float(np.mean(values))
    return found if math.isfinite(found) else None
