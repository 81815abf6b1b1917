"""Co-Boosting: DENSE with harder images and learnt client weights.

Dai et al. 2024, Enhancing One-Shot Federated Learning Through Data and Ensemble Co-Boosting,
arXiv:2402.15070.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fedscale import seeds
from fedscale.models.cnn import Cnn, Payload
from fedscale.server.dense import (
    GENERATOR_STEPS,
    STUDENT_STEPS,
    Student,
    disagreement,
    ensemble,
    noise,
    seeded_generator,
)

TEMPERATURE = 4.0
PERTURBATION = 8 / 255
STEP, DECAY = 0.01, 0.99


def hardness(teacher: Tensor, y: Tensor) -> Tensor:
    """Return 1 − p_y (B,): how little the ensemble believes the label."""
    return 1 - teacher.softmax(1).gather(1, y[:, None])[:, 0]


def perturbed(
    cnn: Cnn, payload: Payload, images: Tensor, weights: Tensor, direction: Tensor
) -> Tensor:
    """Return x + (8/255)·sign(∇_x u·softmax(ens(x)/4)), u a random direction (K,) per image."""
    x = images.detach().requires_grad_()
    soft = (ensemble(cnn, payload, x, weights) / TEMPERATURE).softmax(1)
    (g,) = torch.autograd.grad((soft * direction).sum(), x)
    return (images + PERTURBATION * g.sign()).clamp(-1, 1).detach()


def reweighted(
    cnn: Cnn, payload: Payload, images: Tensor, y: Tensor, weights: Tensor, epoch: int
) -> Tensor:
    """Return clip(w − 0.01·0.99^epoch·sign(∇_w CE(ens_w(x), y)), 0, 1)."""
    w = weights.detach().requires_grad_()
    logits = cnn.logits({k: v.detach() for k, v in payload.items()}, images).detach()
    loss = F.cross_entropy(torch.einsum("c,cbk->bk", w, logits), y)
    (g,) = torch.autograd.grad(loss, w)
    return (weights - STEP * DECAY**epoch * g.sign()).clamp(0, 1).detach()


def distil(
    cnn: Cnn,
    payload: Payload,
    samples: Sequence[int],
    *,
    epochs: int,
    lr: float,
    batch: int,
    seed: int,
) -> Payload:
    """Learn one network from the clients' networks; arguments and result as `dense.distil`.

    The generator's cross-entropy weighs images by their hardness; the weights of the clients take
    a step of their sign gradient on every epoch's images; the student sees perturbed images.
    """
    rng = seeds.stream(seed, "generator")
    share = torch.tensor(samples, dtype=torch.float32, device=cnn.device)
    weights = share / share.sum()
    generator = seeded_generator(cnn, rng)
    student = Student(cnn, payload, weights, lr)
    for epoch in range(epochs):
        z, y = noise(rng, batch, cnn)
        z.requires_grad_()
        rule = torch.optim.Adam([*generator.parameters(), z], lr=1e-3, betas=(0.5, 0.999))
        for _ in range(GENERATOR_STEPS):
            images = generator(z)
            teacher = ensemble(cnn, payload, images, weights)
            each = F.cross_entropy(teacher, y, reduction="none")
            loss = (hardness(teacher, y).detach() * each).mean()
            loss = loss + disagreement(student.logits(images), teacher)
            rule.zero_grad()
            loss.backward()
            rule.step()
        weights = reweighted(cnn, payload, generator(z).detach(), y, weights, epoch)
        for _ in range(STUDENT_STEPS):
            z, _ = noise(rng, batch, cnn)
            with torch.no_grad():
                images = generator(z)
            u = torch.from_numpy(rng.uniform(-1, 1, (batch, cnn.num_classes))).float()
            images = perturbed(cnn, payload, images, weights, u.to(cnn.device))
            with torch.no_grad():
                teacher = ensemble(cnn, payload, images, weights)
            student.step(images, teacher, TEMPERATURE)
    return student.payload()
