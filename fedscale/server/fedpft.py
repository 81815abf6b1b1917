"""FedPFT: clients send Gaussian mixtures of their features, the server trains a head on samples.

Beitollahi et al. 2024, Parametric Feature Transfer, arXiv:2402.01862.
"""

from __future__ import annotations

import warnings

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedscale import seeds

COMPONENTS = 10
FEWEST = 10
"""A class with at most so many samples at a client is not sent."""

RATE, MOMENTUM, BATCH, EPOCHS = 0.01, 0.9, 128, 50


def mixtures(
    features: np.ndarray, labels: np.ndarray, num_classes: int, *, seed: int, client: int
) -> np.ndarray:
    """Fit a mixture of 10 Gaussians with diagonal covariances to each class of a client.

    Args:
        features: (N, d).
        labels: (N,) in 0 … K−1.
        num_classes: K.
        seed: the run's seed.
        client: its global number; with the seed the key of the fit's initialisation.

    Returns:
        (K, 10, 2d + 2) float64: per component the class's samples, the weight, the mean (d) and
        the variances (d); zeros for a class that is not sent.
    """
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.mixture import GaussianMixture

    d = features.shape[1]
    found = np.zeros((num_classes, COMPONENTS, 2 * d + 2))
    rng = seeds.stream(seed, "mixtures", 0, client)
    starts = rng.integers(2**31, size=num_classes)
    for label in range(num_classes):
        own = features[labels == label].astype(np.float64)
        if len(own) <= FEWEST:
            continue
        model = GaussianMixture(COMPONENTS, covariance_type="diag", random_state=int(starts[label]))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            model.fit(own)
        found[label, :, 0] = len(own)
        found[label, :, 1] = model.weights_
        found[label, :, 2 : d + 2] = model.means_
        found[label, :, d + 2 :] = model.covariances_
    return found


def sample(sent: np.ndarray, *, seed: int) -> tuple[Tensor, Tensor]:
    """Draw as many features of every client's classes as the client has.

    Args:
        sent: (M, K, 10, 2d + 2) from `mixtures`.
        seed: the run's seed.

    Returns:
        Features (N, d) float32 and labels (N,).

    Raises:
        ValueError: no client sent any class.
    """
    d = (sent.shape[3] - 2) // 2
    rng = seeds.stream(seed, "mixtures", 1)
    features, labels = [], []
    for message in sent:
        for label, parts in enumerate(message):
            count = round(float(parts[0, 0]))
            if not count:
                continue
            picked = rng.choice(COMPONENTS, size=count, p=parts[:, 1] / parts[:, 1].sum())
            noise = rng.standard_normal((count, d))
            features.append(parts[picked, 2 : d + 2] + noise * np.sqrt(parts[picked, d + 2 :]))
            labels.append(np.full(count, label))
    if not features:
        raise ValueError(f"no client has a class with more than {FEWEST} samples: nothing was sent")
    x, y = np.concatenate(features), np.concatenate(labels)
    return torch.from_numpy(x.astype(np.float32)), torch.from_numpy(y)


def train_head(
    features: Tensor, labels: Tensor, num_classes: int, *, seed: int
) -> tuple[Tensor, Tensor]:
    """Train a linear head (K, d), (K,) by SGD with momentum on cross-entropy, 50 epochs."""
    weight = torch.zeros(num_classes, features.shape[1])
    bias = torch.zeros(num_classes)
    speeds = torch.zeros_like(weight), torch.zeros_like(bias)
    rng = seeds.stream(seed, "mixtures", 2)
    for _ in range(EPOCHS):
        order = torch.from_numpy(rng.permutation(len(labels)))
        for rows in order.split(BATCH):
            h, y = features[rows], labels[rows]
            error = (F.linear(h, weight, bias).softmax(1) - F.one_hot(y, num_classes)) / len(rows)
            for value, speed, g in zip(
                (weight, bias), speeds, (error.T @ h, error.sum(0)), strict=True
            ):
                value.sub_(speed.mul_(MOMENTUM).add_(g), alpha=RATE)
    return weight, bias


def learn(sent: np.ndarray, *, seed: int) -> tuple[Tensor, Tensor]:
    """Return the server's head (K, d), (K,) for mixtures (M, K, 10, 2d + 2)."""
    features, labels = sample(sent, seed=seed)
    return train_head(features, labels, sent.shape[1], seed=seed)
