"""A server: all clients train, one server averages or learns from what they sent."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from fedscale.regimes.step import Step


def steps(
    *,
    samples: Sequence[int],
    rounds: int,
    eval_every: int,
    average: str,
    train: bool = True,
    statistics: bool = False,
    restat: bool = False,
    serve: bool = False,
    start_round: int = 1,
) -> Iterator[Step]:
    """Return the rounds start_round … rounds (one more with `restat`).

    Each client sends one message per round, to the server; what it sends back is not counted.

    Args:
        samples: training samples of each of M clients.
        rounds: communication rounds; one-shot methods have 1.
        eval_every: rounds between two measurements; the last is always measured.
        average: "samples": W_uv = n_v / Σ n (FedAvg); "uniform": 1/M; "none": W = I, every
            client alone.
        train: whether clients train at all.
        statistics: clients compute the statistics of their data after training.
        restat: a last round without training, in which statistics are computed once more under
            the averaged prompts.
        serve: the server learns a model from what was sent, in the last round.

    Raises:
        ValueError: at the call, not at the first step.
    """
    m, total = len(samples), rounds + restat
    for name, value in (("rounds", rounds), ("eval_every", eval_every)):
        if value < 1:
            raise ValueError(f"{name}={value}: allowed are whole numbers from 1")
    if not 1 <= start_round <= total + 1:
        raise ValueError(f"start_round={start_round}: allowed are rounds from 1 to {total + 1}")
    if average == "none":
        weights = np.eye(m)
    elif average == "uniform":
        weights = np.full((m, m), 1 / m)
    elif average == "samples":
        share = np.asarray(samples, dtype=np.float64)
        if not share.sum() > 0:
            raise ValueError("samples: allowed are counts of which one at least is positive")
        weights = np.tile(share / share.sum(), (m, 1))
    else:
        raise ValueError(f"regime.average={average}: allowed: samples, uniform, none")

    def step(round: int) -> Step:
        again = round > rounds
        return Step(
            round=round,
            phase="restat" if again else "server",
            active=np.ones(m, dtype=bool),
            train=train and not again,
            weights=weights,
            measure=round % eval_every == 0 or round == total,
            statistics=statistics and round in (rounds, total),
            serve=serve and round == total,
            messages=0 if average == "none" else m,
        )

    return (step(round) for round in range(start_round, total + 1))
