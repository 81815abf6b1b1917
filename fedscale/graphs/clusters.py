"""Cluster formation of SSD-FL: Algorithms 1 and 2 of arXiv 2606.06687, under two rules.

Algorithm 1 walks from the connected components towards single devices; each partition on the way
is a candidate. `rule="sound"` (accept `first`, split `cut`, order `cure`) recovers planted
clusters; `rule="literal"` (accept `score`, split `maxmin`, order `literal`) is the text as printed.
Devices without any link are forced singletons: never split, and counted nowhere.
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
from fedscale.graphs.partitions import Part, Partitions
from fedscale.graphs.scores import Problem, cycle_score, stationarity_score, threshold

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
_EQUAL = 1e-12


@dataclass(frozen=True)
class Clusters:
    """What `form_clusters` found.

    Attributes:
        members: the devices of each cluster, sorted; clusters by their smallest device.
        candidates: one row per partition on the way: S, clusters, conductances, thresholds,
            score, feasible, chosen. S counts no isolated devices; `clusters` lists them too.
        warnings: what a reader of the result must know, one line each.
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
    **rules: Any,
) -> Clusters:
    """Partition a network's devices into clusters.

    Args:
        graph: the network, nodes 0 … N−1.
        labels: per device its labels (N_i,); None = no data heterogeneity.
        samples: per device (D̂, features) pixels in 0 … 1, for the energy distance.
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
        rules: single choices that replace the rule's: accept (first, score, cycle), split (cut,
            maxmin), order (cure, literal), threshold (plain, with_tau_a), threshold_size
            (network, cluster).

    Raises:
        ValueError: a choice that is not allowed, numbers or sequences that do not fit.
    """
    chosen = _rules(rule, rules)
    n = len(graph)
    problem = Problem(
        eta=_positive("eta", eta),
        tau_a=tau_a,
        tau_r=tau_r,
        B=_positive("B", B),
        gamma=_each("gamma", gamma, n),
        loss=_each("loss", loss, n),
        tolerance=_positive("tolerance", tolerance),
        lazy=lazy,
        with_tau_a=chosen["threshold"] == "with_tau_a",
        per_cluster=chosen["threshold_size"] == "cluster",
        gradients=gradients,
    )
    for name, each in (("labels", labels), ("samples", samples), ("optimizers", optimizers)):
        if each is not None and len(each) != n:
            raise ValueError(f"{name}: {len(each)} entries for {n} devices; allowed: one each")
    if chosen["accept"] == "cycle" and (gradients is None or len(gradients) != n):
        raise ValueError("accept='cycle' needs gradients (N, P), one row per device")
    partitions = Partitions(graph, lazy, labels, samples, optimizers)
    rows = _walk(partitions, problem, chosen)
    return _accept(partitions, problem, chosen, rows)


def _walk(partitions: Partitions, problem: Problem, chosen: dict[str, str]) -> list[dict[str, Any]]:
    """Algorithm 1: return the candidates, one row each."""
    current, isolated = partitions.start()
    counted = sum(len(part.devices) for part in current)
    rows: list[dict[str, Any]] = []
    while current:
        limits = [threshold(problem, part, counted, len(current)) for part in current]
        good = [_holds(part, limit, problem) for part, limit in zip(current, limits, strict=True)]
        rows.append(
            {
                "S": len(current),
                "parts": list(current),
                "clusters": sorted([list(p.devices) for p in current] + [[u] for u in isolated]),
                "conductances": [part.phi for part in current],
                "thresholds": limits,
                "feasible": all(good),
            }
        )
        if any(len(part.devices) == 1 for part in current):
            break  # an infeasible singleton stays in every later partition
        replaced = _next(partitions, current, limits, good, chosen)
        if replaced is None:
            break
        current = replaced
    return rows


def _holds(part: Part, limit: float, problem: Problem) -> bool:
    """Whether a cluster is as well connected as the threshold asks (35), (37)."""
    scale = 2.0 if problem.lazy else 1.0
    if scale * part.phi < limit - _EQUAL:
        return False
    # A swept conductance is an upper bound and does not certify (35).
    return part.exact or scale * (1 - part.lambda2) >= limit**2 / 2 - _EQUAL


def _next(
    partitions: Partitions,
    current: list[Part],
    limits: list[float],
    good: list[bool],
    chosen: dict[str, str],
) -> list[Part] | None:
    """Split one cluster; None when nothing is left to split."""
    order = sorted(
        range(len(current)), key=lambda i: (round(current[i].phi, 12), current[i].devices[0])
    )
    if chosen["order"] == "cure":
        below = [i for i in order if not good[i]]
        if not below:
            return None
        pick = below[0]
        pieces = partitions.split(current[pick], chosen["split"])
    else:  # Algorithm 2
        pick = order[0]
        pieces = partitions.split(current[pick], chosen["split"])
        for i in order:
            found = partitions.split(current[i], chosen["split"])
            if min(found[0].phi, found[1].phi) >= limits[i] - _EQUAL:
                pick, pieces = i, found
                break
    return [*(part for i, part in enumerate(current) if i != pick), *pieces]


def _accept(
    partitions: Partitions,
    problem: Problem,
    chosen: dict[str, str],
    rows: list[dict[str, Any]],
) -> Clusters:
    warnings: list[str] = []
    isolated = partitions.start()[1]
    if not rows:
        warnings.append(f"no device has a link: {len(isolated)} clusters of one device")
        empty = pd.DataFrame(
            columns=["S", "clusters", "conductances", "thresholds", "feasible", "score", "chosen"]
        )
        return Clusters([[device] for device in isolated], empty, tuple(warnings))
    measure = cycle_score if chosen["accept"] == "cycle" else stationarity_score
    for row in rows:
        row["score"] = measure(problem, partitions, row["parts"])
    feasible = [row for row in rows if row["feasible"]]
    if isolated:
        warnings.append(f"{len(isolated)} isolated devices are clusters of their own")
    if not feasible:
        best = max(rows, key=lambda row: (round(min(row["conductances"]), 12), -row["S"]))
        warnings.append(
            f"no partition reaches its conductance threshold ({rows[0]['thresholds'][0]:.3g} at "
            f"S = {rows[0]['S']}): taken the one whose worst cluster is best connected"
        )
    elif chosen["accept"] == "first":
        best = min(feasible, key=lambda row: row["S"])
    else:
        best = min(feasible, key=lambda row: (row["score"], row["S"]))
        if math.isinf(best["score"]):
            warnings.append(
                "the bound of the score holds for no feasible partition (step size too large): "
                "taken the one with the fewest clusters"
            )
    for line in warnings:
        log.info("cluster formation: %s", line)
    for row in rows:
        row["chosen"] = row is best
    table = pd.DataFrame([{k: v for k, v in row.items() if k != "parts"} for row in rows])
    return Clusters(best["clusters"], table, tuple(warnings))


def _rules(rule: str, changes: dict[str, Any]) -> dict[str, str]:
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


def _positive(name: str, value: float) -> float:
    if not (value > 0 and math.isfinite(value)):
        raise ValueError(f"{name}={value}: allowed are finite numbers above 0")
    return float(value)


def _each(name: str, values: float | Sequence[float], n: int) -> np.ndarray:
    found = np.broadcast_to(np.asarray(values, dtype=np.float64), (n,))
    if not (np.isfinite(found).all() and (found >= 0).all()):
        raise ValueError(f"{name}: allowed are finite numbers from 0, one for all or one each")
    return found
