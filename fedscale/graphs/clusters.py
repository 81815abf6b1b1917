"""Cluster formation of SSD-FL: Algorithms 1 and 2 of arXiv 2606.06687, under two rules.

Algorithm 1 walks from the connected components towards single devices; each partition on the way
is a candidate. `rule="sound"` (accept `first`, split `cut`, order `cure`) recovers planted
clusters; `rule="literal"` (accept `score`, the lowest one, split `maxmin`, order `literal`) is the
text as printed. Devices without any link are forced singletons: never split, exempt from the
threshold, and not counted in its N and S.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import networkx as nx
import numpy as np
import pandas as pd

from fedscale.graphs import heterogeneity
from fedscale.graphs.partitions import EQUAL, Part, Partitions
from fedscale.graphs.scores import (
    Problem,
    cycle_score,
    make_problem,
    stationarity_score,
    threshold,
)

log = logging.getLogger(__name__)

RULES = {
    "sound": {"accept": "first", "split": "cut", "order": "cure"},
    "literal": {"accept": "score", "split": "maxmin", "order": "literal"},
}
CHOICES = {
    "accept": ("first", "score", "cycle"),
    "split": ("cut", "maxmin"),
    "order": ("cure", "literal"),
    "threshold": ("plain", "with_tau_a"),
    "threshold_size": ("network", "cluster"),
}
COLUMNS = (
    "S",
    "clusters",
    "conductances",
    "lower_bounds",
    "thresholds",
    "score",
    "feasible",
    "chosen",
)


@dataclass(frozen=True)
class Clusters:
    """What `form_clusters` found.

    Attributes:
        members: the devices of each cluster, sorted; clusters by their smallest device.
        candidates: one row per partition on the way, S rising: S (isolated devices not counted),
            clusters (with isolated devices), and of every counted cluster its conductance Φ, the
            lower bound (1 − λ₂)/2 on it and its threshold Φ_S^min, in the order of smallest
            devices; score of the accepting rule ((28) for `first` too), feasible, chosen.
        warnings: what a reader of the result must know, one line each; logged as well (info).
    """

    members: list[list[int]]
    candidates: pd.DataFrame
    warnings: tuple[str, ...]


def form_clusters(
    graph: nx.Graph,
    *,
    labels: Sequence[np.ndarray] | None = None,
    samples: Sequence[np.ndarray] | None = None,
    optimizers: Sequence[heterogeneity.Optimizer] | None = None,
    eta: float = 0.01,
    tau_a: int = 3,
    B: float = 1.0,
    gamma: float | Sequence[float] = 1.0,
    tolerance: float = 10.0,
    tau_r: int = 1,
    loss: float | Sequence[float] = math.log(10),
    gradients: np.ndarray | None = None,
    lazy: bool = False,
    rule: str = "sound",
    **rules: str,
) -> Clusters:
    """Partition a network's devices into clusters.

    The result depends neither on the order of edges nor on rounding noise, and where λ₂ of every
    cluster that is split is simple, not on the devices' numbers. On symmetric networks (cycles,
    grids) it may, and so it may where a cluster's eigenvector has equal entries or mirrors itself,
    or two clusters have the same conductance: such ties go by device.

    Args:
        graph: the network, undirected, nodes 0 … N−1; self-loops are ignored.
        labels: per device its labels (N_i,); None = equal shares everywhere.
        samples: per device (D̂, features) pixels in 0 … 1, for the energy distance; None = equal.
        optimizers: per device (kind, μ, ρ); None = homogeneous.
        eta: learning rate η.
        tau_a: training instances per cycle.
        B: bound on the norm of a device's gradient.
        gamma: smoothness γ_i of the devices' losses, one for all or one each.
        tolerance: Δtol of the threshold (37).
        tau_r: mixings per cycle (`accept="cycle"`).
        loss: loss of the devices at the common initial point, one for all or one each.
        gradients: (N, P) gradients there (`accept="cycle"`).
        lazy: mixing by (I + W)/2; conductances and gaps are then doubled before they are compared.
        rule: "sound" or "literal".
        rules: single choices that replace the rule's.
            accept: of the feasible partitions, `first` takes the smallest S, `score` the lowest
            mean of (28), `cycle` the lowest right-hand side of (33); ties go to the smallest S.
            split: `cut`, `maxmin`, see `Partitions.split`.
            order: `literal` is Algorithm 2; `cure` splits the cluster of lowest Φ among those
            below their threshold, and when none is, ends (accept `first`) or goes on by
            Algorithm 2 (else there would be one feasible partition, and nothing to choose).
            threshold: `plain` (37) or `with_tau_a`. threshold_size: ⌊N/S⌋ of the `network` or
            N_s of the `cluster`.

    Raises:
        ValueError: a choice that is not allowed, numbers or sequences that do not fit.
    """
    chosen = _rules(rule, rules)
    partitions = Partitions(graph, lazy)
    by_cycle = chosen["accept"] == "cycle"
    problem = make_problem(
        partitions,
        labels=labels,
        samples=samples,
        optimizers=optimizers,
        eta=eta,
        tau_a=tau_a,
        tau_r=tau_r if by_cycle else 1,
        B=B,
        gamma=gamma,
        tolerance=tolerance,
        loss=loss,
        with_tau_a=chosen["threshold"] == "with_tau_a",
        per_cluster=chosen["threshold_size"] == "cluster",
        gradients=gradients,
        cycle=by_cycle,
    )
    return _accept(partitions, problem, chosen, _walk(partitions, problem, chosen))


def _walk(partitions: Partitions, problem: Problem, chosen: dict[str, str]) -> list[dict[str, Any]]:
    """Algorithm 1: return the candidates, one row each."""
    current, isolated = partitions.start()
    counted = sum(len(part.devices) for part in current)
    alone = [partitions.part((device,)) for device in isolated]
    scale = 2.0 if partitions.lazy else 1.0
    measure = cycle_score if chosen["accept"] == "cycle" else stationarity_score
    rows: list[dict[str, Any]] = []
    while current:
        limits = [threshold(problem, len(p.devices), counted, len(current)) for p in current]
        good = [_holds(part, limit, scale) for part, limit in zip(current, limits, strict=True)]
        rows.append(
            {
                "S": len(current),
                "clusters": sorted(list(part.devices) for part in [*current, *alone]),
                "conductances": [part.phi for part in current],
                "lower_bounds": [(1 - part.lambda2) / 2 for part in current],
                "thresholds": limits,
                "score": measure(problem, partitions, [*current, *alone]),
                "feasible": all(good),
            }
        )
        if any(len(part.devices) == 1 for part in current):
            break  # Φ = 0: infeasible, as every later partition
        if all(good) and (chosen["order"], chosen["accept"]) == ("cure", "first"):
            break
        ascending = sorted(current, key=lambda part: (round(part.phi, 12), part.devices[0]))
        below = {part.devices for part, fine in zip(current, good, strict=True) if not fine}
        if chosen["order"] == "cure" and below:
            pick = next(part for part in ascending if part.devices in below)
            pieces = partitions.split(pick, chosen["split"])
        else:
            pick, pieces = _algorithm2(partitions, problem, chosen["split"], ascending, counted)
        current = sorted(
            [*(part for part in current if part is not pick), *pieces],
            key=lambda part: part.devices[0],
        )
    return rows


def _algorithm2(
    partitions: Partitions, problem: Problem, split: str, ascending: list[Part], counted: int
) -> tuple[Part, tuple[Part, Part]]:
    """Return the first cluster whose two parts reach the threshold, else the first, and its parts.

    Parts are held against the threshold of the partition as it is, with S clusters; under
    `threshold_size="cluster"` each against that of its own size.
    """
    scale = 2.0 if partitions.lazy else 1.0
    for part in ascending:
        pieces = partitions.split(part, split)
        limits = (threshold(problem, len(p.devices), counted, len(ascending)) for p in pieces)
        if all(scale * p.phi >= limit - EQUAL for p, limit in zip(pieces, limits, strict=True)):
            return part, pieces
    return ascending[0], partitions.split(ascending[0], split)


def _holds(part: Part, limit: float, scale: float) -> bool:
    """Whether a cluster is as well connected as the threshold asks (35), (37)."""
    if scale * part.phi < limit - EQUAL:
        return False
    # A swept conductance is an upper bound and does not certify (35).
    return part.exact or scale * (1 - part.lambda2) >= limit * limit / 2 - EQUAL


def _accept(
    partitions: Partitions,
    problem: Problem,
    chosen: dict[str, str],
    rows: list[dict[str, Any]],
) -> Clusters:
    isolated = partitions.start()[1]
    warnings = []
    if isolated:
        warnings.append(f"{len(isolated)} isolated device(s): each is a cluster of its own")
    best: dict[str, Any] = {"clusters": [[device] for device in isolated]}
    feasible = [row for row in rows if row["feasible"]]
    if rows and not feasible:
        best = max(rows, key=lambda row: (round(min(row["conductances"]), 12), -row["S"]))
        warnings.append(
            f"no partition reaches its conductance threshold ({rows[0]['thresholds'][0]:.3g} at "
            f"S = {rows[0]['S']}): taken the one whose worst cluster is best connected"
        )
    elif rows:
        best = feasible[0]
        if chosen["accept"] != "first":
            lowest = min(row["score"] for row in feasible)
            best = next(row for row in feasible if row["score"] <= lowest * (1 + EQUAL))
            if math.isinf(lowest):
                warnings.append(
                    "the bound of the score holds for no feasible partition (denominator not "
                    "positive): taken the one with the fewest clusters"
                )
    for line in warnings:
        log.info("cluster formation: %s", line)
    for row in rows:
        row["chosen"] = row is best
    return Clusters(best["clusters"], pd.DataFrame(rows, columns=list(COLUMNS)), tuple(warnings))


def _rules(rule: str, changes: dict[str, str]) -> dict[str, str]:
    if rule not in RULES:
        raise ValueError(f"rule={rule!r}: allowed: {', '.join(RULES)}")
    chosen = {"threshold": "plain", "threshold_size": "network", **RULES[rule]}
    for key, value in changes.items():
        if key not in CHOICES:
            raise ValueError(f"{key}={value!r}: unknown rule; allowed: {', '.join(CHOICES)}")
        if value not in CHOICES[key]:
            raise ValueError(f"{key}={value!r}: allowed: {', '.join(CHOICES[key])}")
        chosen[key] = value
    return chosen
