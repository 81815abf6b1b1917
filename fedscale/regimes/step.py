"""Step: one round of a run, as all regimes hand it to the orchestrator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np


@dataclass(frozen=True, eq=False)
class Step:
    """What happens in one round: train, exchange by W, measure.

    Attributes:
        round: number of the step, counted from 1; the key of its random draws.
        phase: name of the regime's part, e.g. "gossip", "intra", "inter".
        active: (M,) bool, the clients that take part; the others keep their state exactly.
        train: whether active clients train.
        weights: (M, M) float64, row-stochastic, used as W @ X; the row of an idle or isolated
            client u is e_u. Merges that choose their own weights read its support.
        measure: whether the clients are evaluated after this step.
        order: "adapt": X ← merge(local(X)). "combine": X ← W X + (local(X) − X), SSD-FL's
            equation 11: neighbours are combined before the own step is added.
        restart: whether proximal anchors (and, unless carried, moments) start anew here.
        statistics: whether active clients compute the statistics of their data after training.
        serve: whether a server turns what all clients sent into one model for all.
        messages: payloads sent in this step; -1 = one per entry of W off the diagonal.
        cycle: number of the cycle that the step belongs to, from 1; 0 for regimes without cycles.
    """

    round: int
    phase: str
    active: np.ndarray
    train: bool
    weights: np.ndarray
    measure: bool
    order: Literal["adapt", "combine"] = "adapt"
    restart: bool = True
    statistics: bool = False
    serve: bool = False
    messages: int = -1
    cycle: int = 0
