"""Measures over clients: Wasserstein distances between prompt sets, consensus, bytes sent."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import ArrayLike
from scipy.optimize import linear_sum_assignment
from scipy.spatial.distance import cdist
from torch import Tensor

from fedscale.local.cohort import COUNT

MAX_ALTERNATIONS = 100


def wasserstein2_squared(
    mu: Tensor | ArrayLike,
    nu: Tensor | ArrayLike,
    mu_weights: Tensor | ArrayLike | None = None,
    nu_weights: Tensor | ArrayLike | None = None,
) -> float:
    """Squared 2-Wasserstein distance between two weighted point sets, exact.

    Args:
        mu, nu: (N, d) and (K, d) points.
        mu_weights, nu_weights: (N,) and (K,) masses, normalised to sum 1; uniform if None. Without
            weights and with N = K the plan is an assignment, otherwise a linear program.

    Raises:
        ValueError: points that are not finite or do not fit, weights that are negative or all 0.
    """
    x, y = _points("mu", mu), _points("nu", nu)
    if x.shape[1] != y.shape[1]:
        raise ValueError(f"mu has width {x.shape[1]}, nu {y.shape[1]}: allowed is one width")
    cost = _cost(x, y)
    if mu_weights is None and nu_weights is None and len(x) == len(y):
        return float(cost[linear_sum_assignment(cost)].mean())
    import ot  # takes a second to load, and most callers never get here

    # emd2 accepts costs of 1e32 in silence and returns a plan that is not optimal.
    scale = float(cost.max()) or 1.0
    a, b = _masses("mu_weights", mu_weights, len(x)), _masses("nu_weights", nu_weights, len(y))
    return scale * float(ot.emd2(a, b, cost / scale, numItermax=10_000_000))


def barycenter(prompts: Tensor | ArrayLike, start: int = 0) -> Tensor | np.ndarray:
    """Free-support Wasserstein barycenter (2) of M uniform prompt sets, with n uniform atoms.

    Alternates from the prompts of client `start`: assign every client's prompts to the atoms at
    least cost, then move each atom to the mean of what it was given, until no assignment changes,
    at most 100 times. Each turn lowers the objective of (2); the end is a local minimum.

    Args:
        prompts: (M, n, d), finite.

    Returns:
        (n, d), of the kind of `prompts`.
    """
    atoms, _ = _alternate(_clients(prompts), start)
    return torch.as_tensor(atoms).to(prompts) if isinstance(prompts, Tensor) else atoms


def consensus_error(prompts: Tensor | ArrayLike, start: int = 0) -> float:
    """Mean over clients of W2² to their `barycenter` (3); 0 when all prompt sets are equal.

    An upper bound of the paper's quantity, since its barycenter is a global minimum.

    Args:
        prompts: (M, n, d), finite.
    """
    return _alternate(_clients(prompts), start)[1]


def payload_bytes(payload: Mapping[str, Tensor | np.ndarray], prefix: str = "") -> int:
    """Bytes of one client's share of a payload: what it sends to one neighbour in one round.

    Args:
        payload: name → (C, …), C ≥ 1.
        prefix: count only the tensors whose name starts so, e.g. "prompts".
    """
    return sum(
        torch.as_tensor(value)[0].nbytes for key, value in payload.items() if key.startswith(prefix)
    )


def messages(weights: np.ndarray) -> int:
    """Number of payloads sent in one round: entries of W off the diagonal that are not 0."""
    return int(np.count_nonzero(weights) - np.count_nonzero(np.diagonal(weights)))


def disagreement(payload: Mapping[str, np.ndarray]) -> float:
    """Return the mean over clients of the squared distance between all trainables and their mean.

    Args:
        payload: name → (M, …), what all clients train.
    """
    apart = (
        np.square(v - v.mean(axis=0, dtype=np.float64)).sum() / len(v)
        for v in (np.ascontiguousarray(v) for key, v in payload.items() if key != COUNT)
    )
    return math.fsum(map(float, apart))


def network(payload: Mapping[str, np.ndarray]) -> dict[str, float | None]:
    """Measure how far clients are apart.

    Args:
        payload: name → (M, …), what all clients train.

    Returns:
        disagreement; consensus_error (3) and prompt_norm (mean length) of the prompts, None
        without prompts. The first two are None where clients hold different numbers of prompts.
    """
    prompts = payload.get("prompts")
    if prompts is None or not prompts.shape[1]:
        return {
            "disagreement": disagreement(payload),
            "consensus_error": None,
            "prompt_norm": None,
        }
    lengths = np.linalg.norm(prompts, axis=-1)
    held = payload.get(COUNT)
    if held is not None and (held != held[0]).any():
        return {
            "disagreement": None,
            "consensus_error": None,
            "prompt_norm": float(lengths.sum() / held.sum()),
        }
    prompts = prompts if held is None else prompts[:, : int(held[0])]
    return {
        "disagreement": disagreement(payload),
        "consensus_error": consensus_error(prompts),
        "prompt_norm": float(np.linalg.norm(prompts, axis=-1).mean()),
    }


def _alternate(clients: np.ndarray, start: int) -> tuple[np.ndarray, float]:
    """Atoms (n, d) and the mean cost of the clients' assignments to them."""
    atoms, before = clients[start], None
    for _ in range(MAX_ALTERNATIONS):
        costs = [_cost(atoms, prompts) for prompts in clients]
        chosen = np.stack([linear_sum_assignment(cost)[1] for cost in costs])
        if before is not None and np.array_equal(chosen, before):
            break
        atoms = np.take_along_axis(clients, chosen[:, :, None], axis=1).mean(axis=0)
        before = chosen
    matched = np.take_along_axis(clients, chosen[:, :, None], axis=1)
    return atoms, float(np.square(matched - atoms).sum(axis=2).mean())


def _cost(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    cost = cdist(x, y, "sqeuclidean")
    if not np.isfinite(cost).all():
        raise ValueError("points: squared distances overflow; allowed are values up to about 1e150")
    return cost


def _array(name: str, values: Tensor | ArrayLike, axes: int) -> np.ndarray:
    if isinstance(values, Tensor):
        values = values.detach().cpu().double().numpy()
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != axes or not array.size:
        raise ValueError(
            f"{name}: shape {array.shape}; allowed are {axes} axes, none of them empty"
        )
    if not np.isfinite(array).all():
        raise ValueError(
            f"{name}: allowed are finite values, found {array[~np.isfinite(array)][0]}"
        )
    return array


def _points(name: str, values: Tensor | ArrayLike) -> np.ndarray:
    return _array(name, values, axes=2)


def _clients(prompts: Tensor | ArrayLike) -> np.ndarray:
    return _array("prompts", prompts, axes=3)


def _masses(name: str, values: Tensor | ArrayLike | None, count: int) -> np.ndarray:
    if values is None:
        return np.full(count, 1 / count)
    masses = _array(name, values, axes=1)
    if len(masses) != count or masses.min() < 0 or masses.sum() == 0:
        raise ValueError(f"{name}={masses.tolist()}: allowed are {count} numbers from 0, not all 0")
    return masses / masses.sum()
