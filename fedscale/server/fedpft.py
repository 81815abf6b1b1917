"""FedPFT: clients send Gaussian mixtures of their features, the server trains a head on samples.

Beitollahi et al. 2024, "Parametric feature transfer: one-shot federated learning with foundation
models", arXiv:2402.01862.
"""

from __future__ import annotations

import warnings

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from fedscale import seeds
from fedscale.local import optimizers
from fedscale.local.statistics import check_samples

COMPONENTS = 10
FEWEST = 10
"""A class with at most so many samples at a client is not sent."""

RATE, MOMENTUM, BATCH, EPOCHS = 0.01, 0.9, 128, 50
FIT, SAMPLE, TRAIN = 0, 1, 2
"""Streams of the purpose "mixtures", in the place of a round: the method has only one."""

Mixtures = NDArray[np.float64]
"""(K, J, 2d + 1) per client: for every class and component its mass n_c·π, mean, variances."""


def mixtures(
    h: Tensor | NDArray[np.floating],
    y: Tensor | NDArray[np.integer],
    num_classes: int,
    *,
    seed: int,
    client: int,
) -> Mixtures:
    """Fit 10 Gaussians with diagonal covariances to each class of a client, by scikit-learn.

    The fit depends on its key and on the samples alone, not on the number of threads.

    Args:
        h: (N, d) features, within float32's range.
        y: (N,) integer labels in 0 … K−1.
        num_classes: K.
        seed: the run's seed.
        client: global client number.

    Returns:
        (K, 10, 2d + 1): per component the class's samples n_c times the weight, the mean (d) and
        the variances (d). Zeros for a class with at most 10 samples, which is not sent.

    Raises:
        ValueError: shapes, labels or features that are not allowed, or too large to be fitted.
    """
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.mixture import GaussianMixture
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

    h, y = torch.as_tensor(h), torch.as_tensor(y)
    _check(h, y, num_classes)
    features, labels = h.detach().cpu().double().numpy(), y.cpu().long().numpy()
    d = features.shape[1]
    found = np.zeros((num_classes, COMPONENTS, 2 * d + 1))
    starts = seeds.stream(seed, "mixtures", FIT, client).integers(2**31, size=num_classes)
    for label in np.flatnonzero(np.bincount(labels, minlength=num_classes) > FEWEST):
        own = features[labels == label]
        model = GaussianMixture(COMPONENTS, covariance_type="diag", random_state=int(starts[label]))
        # k-means adds up in an order that depends on its threads, and ends in other optima.
        with threadpool_limits(1), warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore", ConvergenceWarning)
            try:
                model.fit(own)
            except ValueError as error:
                raise ValueError(
                    f"features: the mixture of client {client}, class {label} cannot be fitted at "
                    f"magnitude {np.abs(own).max():.3g}; allowed: head.normalise=True"
                ) from error
        mass = len(own) * model.weights_
        found[label] = np.column_stack((mass, model.means_, model.covariances_))
    return found


def sample(sent: NDArray[np.floating], *, seed: int) -> tuple[Tensor, Tensor]:
    """Draw n_c features of every class that a client sent, for every client.

    A client's samples depend on its own message and number alone.

    Args:
        sent: (M, K, J, 2d + 1) of `mixtures`, all clients in order.
        seed: the run's seed.

    Returns:
        Features (N, d) float32 and labels (N,) int64.

    Raises:
        ValueError: a shape that is not allowed, mixtures that are not finite or have negative
            masses or variances, features beyond float32, or no client that sent a class.
    """
    sent = np.asarray(sent, dtype=np.float64)
    if sent.ndim != 4 or sent.shape[3] < 3 or sent.shape[3] % 2 == 0:
        raise ValueError(f"mixtures {sent.shape}: allowed are (M, K, J, 2d + 1)")
    d = sent.shape[3] // 2
    mass, mean, variance = sent[..., 0], sent[..., 1 : d + 1], sent[..., d + 1 :]
    if not np.isfinite(sent).all() or mass.min(initial=0) < 0 or variance.min(initial=0) < 0:
        raise ValueError("mixtures: allowed are finite numbers, masses and variances from 0")
    features, labels = [np.empty((0, d))], []
    for client, message in enumerate(mass):
        rng = seeds.stream(seed, "mixtures", SAMPLE, client)
        for label, parts in enumerate(message):
            count = round(float(parts.sum()))
            if not count:
                continue
            picked = rng.choice(len(parts), size=count, p=parts / parts.sum())
            noise = rng.standard_normal((count, d))
            deviation = np.sqrt(variance[client, label, picked])
            features.append(mean[client, label, picked] + noise * deviation)
            labels += [label] * count
    if not labels:
        raise ValueError(f"mixtures: no client has a class with more than {FEWEST} samples")
    drawn = np.concatenate(features)
    if np.abs(drawn).max() > np.finfo(np.float32).max:
        raise ValueError("mixtures: samples beyond float32; allowed: head.normalise=True")
    return torch.from_numpy(drawn.astype(np.float32)), torch.tensor(labels)


def train_head(h: Tensor, y: Tensor, num_classes: int, *, seed: int) -> tuple[Tensor, Tensor]:
    """Train a linear head (K, d), (K,) float32 on cross-entropy: SGD from zeros, 50 epochs.

    Args:
        h: (N, d) float32.
        y: (N,) integer labels in 0 … K−1.
        num_classes: K.
        seed: the run's seed, of the order of the samples.

    Raises:
        ValueError: shapes, labels or features that are not allowed, no samples, or a head that
            does not stay finite.
    """
    _check(h, y, num_classes)
    if not len(y):
        raise ValueError("features: allowed is 1 sample or more, found none")
    params = {"weight": torch.zeros(num_classes, h.shape[1]), "bias": torch.zeros(num_classes)}
    rule = optimizers.sgd(MOMENTUM)
    moments, rates = rule.init(params), dict.fromkeys(params, RATE)
    rng = seeds.stream(seed, "mixtures", TRAIN)
    target = F.one_hot(y.long(), num_classes)
    for _ in range(EPOCHS):
        for rows in torch.from_numpy(rng.permutation(len(y))).split(BATCH):
            x = h[rows]
            error = F.linear(x, params["weight"], params["bias"]).softmax(dim=1) - target[rows]
            grads = {"weight": error.T @ x / len(rows), "bias": error.mean(dim=0)}
            rule.update(params, grads, moments, rates, 1)
    if not all(value.isfinite().all() for value in params.values()):
        raise ValueError(
            f"features: the head overflows at magnitude {float(h.abs().max()):.3g}; "
            "allowed: head.normalise=True"
        )
    return params["weight"], params["bias"]


def learn(sent: NDArray[np.floating], *, seed: int) -> tuple[Tensor, Tensor]:
    """Return the server's head (K, d), (K,) float32 from mixtures (M, K, J, 2d + 1).

    Raises:
        ValueError: as `sample` and `train_head`.
    """
    h, y = sample(sent, seed=seed)
    return train_head(h, y, sent.shape[1], seed=seed)


def message_bytes(message: NDArray[np.floating]) -> int:
    """Bytes that a client sends once: per class with a mixture J(2d + 1) numbers and its label."""
    classes = int((message[..., 0].sum(axis=1) > 0).sum())
    return classes * (message[0].size + 1) * message.itemsize


def _check(h: Tensor, y: Tensor, num_classes: int) -> None:
    check_samples(h, y, num_classes)
    # A comparison with NaN is false.
    if not bool((h.double().abs() <= torch.finfo(torch.float32).max).all()):
        raise ValueError("features: allowed are finite values within float32's range")
