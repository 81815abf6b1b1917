"""Co-Boosting: DENSE with harder images and learnt client weights.

Dai et al. 2024, Enhancing One-Shot Federated Learning Through Data and Ensemble Co-Boosting,
arXiv:2402.15070.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fedscale import seeds
from fedscale.local import optimizers
from fedscale.models.cnn import Cnn, Payload
from fedscale.server import dense

TEMPERATURE = 4.0
PERTURBATION = 8 / 255
"""In units of the network's inputs, which span 2."""

WEIGHT_RATE, DECAY = 0.01, 0.99


def perturbed(
    cnn: Cnn, payload: Payload, images: Tensor, weights: Tensor, directions: Tensor
) -> Tensor:
    """Return x + (8/255)·sign(∇_x Σ u·softmax(ens(x)/4)), with u (B, K) one direction per image."""
    x = images.detach().requires_grad_()
    soft = (dense.ensemble(cnn, payload, x, weights) / TEMPERATURE).softmax(1)
    (g,) = torch.autograd.grad((soft * directions).sum(), x)
    return images + PERTURBATION * g.sign()


def reweighted(logits: Tensor, labels: Tensor, weights: Tensor, epoch: int) -> Tensor:
    """Return clip(w − 0.01·0.99^epoch·sign(∇_w CE(Σ_c w_c f_c(x), y)), 0, 1) (C,).

    Args:
        logits: (C, B, K) of the clients, f_c(x).
        labels: (B,) int64.
        weights: (C,), w.
        epoch: from 0.
    """
    w = weights.detach().requires_grad_()
    (g,) = torch.autograd.grad(F.cross_entropy(torch.einsum("c,cbk->bk", w, logits), labels), w)
    return (weights - WEIGHT_RATE * DECAY**epoch * g.sign()).clamp(0, 1)


def distil(
    cnn: Cnn,
    payload: Payload,
    samples: Sequence[int],
    *,
    epochs: int,
    lr: float,
    batch: int,
    seed: int,
    generator_steps: int = 30,
    generator_width: int = 64,
    student_steps: int = 0,
) -> Payload:
    """Learn one network from the clients' networks; arguments and result as `dense.distil`.

    Every epoch: a generator for hard images; one step of the clients' weights per batch of the
    images so far; the student, at T = 4, on perturbed images. Weights start equal and sum to 1;
    nothing keeps that sum, which scales the teacher.
    """
    dense.check(epochs, batch, generator_steps, generator_width, student_steps)
    payload, weights = dense.voters(payload, samples)
    student = cnn.initial([0], seed=seed)
    moments = optimizers.sgd(dense.MOMENTUM).init(student)
    pool: list[Tensor] = []
    targets: list[Tensor] = []
    for epoch in range(epochs):
        images, labels = dense.synthesise(
            cnn,
            payload,
            weights,
            student,
            steps=generator_steps,
            width=generator_width,
            batch=batch,
            seed=seed,
            epoch=epoch,
            hard=True,
        )
        pool.append(images)
        targets.append(labels)
        x, y = torch.cat(pool), torch.cat(targets)
        batches = dense.shuffled(len(x), batch, student_steps, seed=seed, epoch=epoch)
        for rows in batches:
            with torch.no_grad():
                logits = cnn.logits(payload, x[rows])
            weights = reweighted(logits, y[rows], weights, epoch)
        lessons = _lessons(cnn, payload, weights, [x[rows] for rows in batches], seed, epoch)
        dense.study(cnn, student, moments, lessons, lr=lr, temperature=TEMPERATURE)
    return student


def _lessons(
    cnn: Cnn, payload: Payload, weights: Tensor, batches: list[Tensor], seed: int, epoch: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield perturbed images and the ensemble's logits on them."""
    rng = seeds.stream(seed, "generator", epoch, dense.DIRECTIONS)
    for images in batches:
        u = torch.tensor(rng.uniform(-1, 1, (len(images), cnn.num_classes))).to(images)
        x = perturbed(cnn, payload, images, weights, u)
        with torch.no_grad():
            teacher = dense.ensemble(cnn, payload, x, weights)
        yield x, teacher  # outside: a suspended no_grad holds for whoever asks for the next
