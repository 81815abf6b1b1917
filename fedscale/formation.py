"""Clusters of a run in cycles: SSD-FL's from the network, the data and the first gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from fedscale import schedule, seeds
from fedscale.blocks import Block
from fedscale.config import RunConfig
from fedscale.data.catalogue import Split
from fedscale.graphs import heterogeneity
from fedscale.graphs.clusters import COLUMNS, Clusters, form_clusters
from fedscale.regimes import cluster


def form(config: RunConfig, numbers: Mapping[str, Any] | None) -> Clusters:
    """Form the clusters of a run: by Algorithm 1 (ssdfl), or as the baseline has them.

    Args:
        config: the run.
        numbers: what `numbers` returned; the baselines' clusters need none.

    Raises:
        ValueError: as `form_clusters`.
    """
    r = config.regime
    if r.name != "ssdfl":
        members = named(config)
        row = {**dict.fromkeys(COLUMNS), "S": len(members), "clusters": members, "chosen": True}
        return Clusters(members, pd.DataFrame([row], columns=list(COLUMNS)), ())
    assert numbers is not None, "ssdfl scores its clusters"
    given: dict[str, Any] = {"accept": r.accept, "split": r.split, "order": r.order}
    return form_clusters(
        schedule.network(config),
        **numbers,
        lazy=r.lazy,
        rule=r.rule,
        threshold=r.threshold,
        threshold_size=r.threshold_size,
        **{key: value for key, value in given.items() if value != "by_rule"},
    )


def records(config: RunConfig, formed: Clusters) -> list[dict[str, Any]]:
    """Return the rows of the `clusters` table; the chosen one has the network to draw it by."""
    links = sorted([min(edge), max(edge)] for edge in schedule.network(config).edges)
    kinds = [kind for kind, _, _ in schedule.kinds(config, range(config.data.clients))]
    return [
        {str(key): value for key, value in row.items()}
        | {"links": links if row["chosen"] else None}
        | {"optimizers": kinds if row["chosen"] else None}
        for row in formed.candidates.to_dict("records")
    ]


def numbers(
    config: RunConfig, split: Split, parts: Sequence[np.ndarray], slopes: Block | None
) -> dict[str, Any]:
    """Return what the bounds are made of (see `graphs.scores.make_problem`).

    Without estimates B and γ are 1 and the loss is that of ten classes at random, log 10.

    Args:
        config: the run; regime.bound and regime.gamma replace the estimates where they are not 0.
        split: training images.
        parts: rows of every client.
        slopes: loss (M,), gradient (M, P) and smoothness (M,) at the common initial point; None:
            regime.bound and regime.gamma are given, and the rule needs no gradients.
    """
    r = config.regime
    bound, gamma = r.bound, np.full(len(parts), r.gamma)
    if slopes is not None:
        bound = bound or float(np.linalg.norm(slopes["gradient"], axis=1).max())
        gamma = gamma if r.gamma else slopes["smoothness"]
    return {
        "labels": [split.labels[rows] for rows in parts],
        "samples": _samples(config, split, parts),
        "optimizers": schedule.kinds(config, range(len(parts))),
        "eta": config.local.lr,
        "tau_a": r.tau_a,
        "tau_r": r.tau_r,
        "B": bound or 1.0,
        "gamma": gamma.tolist(),
        "tolerance": r.tolerance,
        "loss": np.log(10) if slopes is None else slopes["loss"].tolist(),
        "gradients": None if slopes is None else slopes["gradient"],
    }


def named(config: RunConfig) -> list[list[int]]:
    """Return the clusters of SSD-FL's baselines: one, one per device, or random ones."""
    n, name = config.data.clients, config.regime.name
    if name in ("sdfl", "stc"):
        return [list(range(n))]
    if name == "pdfl":
        return [[device] for device in range(n)]
    assert name == "cstc", name
    return cluster.random_clusters(n, seed=config.seed)


def _samples(
    config: RunConfig, split: Split, parts: Sequence[np.ndarray]
) -> list[np.ndarray] | None:
    """Draw D̂ images of every device, as rows of pixels in 0 … 1.

    None where domains differ in size, or a device has no data: distances need equal features.
    """
    if len({images.shape[1:] for images in split.images}) > 1 or not all(map(len, parts)):
        return None
    found = []
    for client, rows in enumerate(parts):
        rng = seeds.stream(config.seed, "clusters", 0, client + 1)
        picked = rng.choice(rows, heterogeneity.SAMPLE, replace=len(rows) < heterogeneity.SAMPLE)
        images = np.concatenate([images for _, images in split.groups(np.sort(picked))])
        found.append(images.reshape(len(images), -1) / 255)
    return found
