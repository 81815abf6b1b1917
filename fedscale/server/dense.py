"""DENSE: a server distils clients' networks into one, on images of a generator that it trains.

Zhang et al. 2022, DENSE: Data-Free One-Shot Federated Learning, arXiv:2112.12371. Where the text
is silent, as in the authors' experiments: every epoch trains a new generator together with its
noise, keeps the images of its best step, and the student learns from all images so far.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedscale import seeds
from fedscale.local import optimizers
from fedscale.models.cnn import Cnn, Payload

NOISE = 256
"""nz, length of the generator's input."""

TEMPERATURE = 20.0
GENERATOR_RATE, GENERATOR_BETAS = 1e-3, (0.5, 0.999)
MOMENTUM = 0.9

WEIGHTS, SAMPLES, ORDER, DIRECTIONS = range(4)
"""Keys of the streams (seed, "generator", epoch, key)."""


def draw_generator(cnn: Cnn, width: int, rng: np.random.Generator) -> Payload:
    """Draw a generator's parameters: weights N(0, 0.02²), scales N(1, 0.02²), biases 0.

    A linear layer to 2·width maps of a quarter of the side, then 3×3 convolutions to 2·width,
    width and the image's channels; see `generate`.
    """
    start = -(-cnn.image_size // 4)
    shapes: dict[str, tuple[int, ...]] = {
        "input.weight": (2 * width * start**2, NOISE),
        "norm1.weight": (2 * width,),
        "conv1.weight": (2 * width, 2 * width, 3, 3),
        "norm2.weight": (2 * width,),
        "conv2.weight": (width, 2 * width, 3, 3),
        "norm3.weight": (width,),
        "conv3.weight": (cnn.channels, width, 3, 3),
    }
    generator: Payload = {}
    for name, shape in shapes.items():
        drawn = rng.normal(1.0 if name.startswith("norm") else 0.0, 0.02, shape)
        generator[name] = torch.tensor(drawn, dtype=cnn.dtype, device=cnn.device)
        bias = torch.zeros(shape[0], dtype=cnn.dtype, device=cnn.device)
        generator[name.replace("weight", "bias")] = bias
    return generator


def generate(generator: Payload, z: Tensor, cnn: Cnn) -> Tensor:
    """Return the images (B, c, S, S) in −1 … 1 of noise z (B, 256); B·⌈S/4⌉² must exceed 1.

    Batch norm on the batch's own statistics before and after the first convolution and after
    the second, leaky ReLU (0.2), doubled by repetition before each of the two.
    """
    start, half = -(-cnn.image_size // 4), -(-cnn.image_size // 2)
    x = F.linear(z, generator["input.weight"], generator["input.bias"])
    x = _norm(x.view(len(z), -1, start, start), generator, "norm1")
    x = _conv(F.interpolate(x, size=(half, half)), generator, "conv1")
    x = F.leaky_relu(_norm(x, generator, "norm2"), 0.2)
    x = _conv(F.interpolate(x, size=(cnn.image_size, cnn.image_size)), generator, "conv2")
    x = F.leaky_relu(_norm(x, generator, "norm3"), 0.2)
    return torch.tanh(_conv(x, generator, "conv3"))


def _conv(x: Tensor, generator: Payload, name: str) -> Tensor:
    x = x.contiguous(memory_format=torch.channels_last)
    return F.conv2d(x, generator[f"{name}.weight"], generator[f"{name}.bias"], padding=1)


def _norm(x: Tensor, generator: Payload, name: str) -> Tensor:
    scale, shift = generator[f"{name}.weight"], generator[f"{name}.bias"]
    return F.batch_norm(x, None, None, scale, shift, training=True)


def voters(payload: Payload, samples: Sequence[int]) -> tuple[Payload, Tensor]:
    """Return the payload of the clients that have samples, and their equal weights of sum 1.

    Raises:
        ValueError: no client has samples, or one that has is not finite.
    """
    clients = [client for client, count in enumerate(samples) if count > 0]
    if len(samples) != len(payload["head.bias"]) or not clients:
        raise ValueError(
            f"samples={list(samples)}: allowed are counts of {len(payload['head.bias'])} clients, "
            "not all 0"
        )
    for client in clients:
        if not all(torch.isfinite(value[client]).all() for value in payload.values()):
            raise ValueError(f"payload: client {client} is not finite; allowed are finite values")
    chosen = {name: value[clients] for name, value in payload.items()}
    return chosen, torch.full_like(chosen["head.bias"][:, 0], 1 / len(clients))


def ensemble(cnn: Cnn, payload: Payload, images: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sum (B, K) of the clients' logits."""
    return torch.einsum("c,cbk->bk", weights, cnn.logits(payload, images))


def generator_loss(teacher: Tensor, student: Tensor, labels: Tensor, hard: bool = False) -> Tensor:
    """CE(t, y) − mean(1[argmax s ≠ argmax t] · KL(t ‖ s)), of logits (B, K): what G minimises.

    The term on batch norm's statistics is absent, since the clients' networks have none.

    Args:
        teacher: logits of the ensemble.
        student: logits of the student.
        labels: (B,) int64, what the images should show.
        hard: weigh the cross-entropy of every image by its difficulty 1 − p_y (Co-Boosting), p_y
            the ensemble's probability of the label, taken as a constant.
    """
    each = F.cross_entropy(teacher, labels, reduction="none")
    if hard:
        each = each * (1 - teacher.softmax(1).gather(1, labels[:, None])[:, 0]).detach()
    apart = F.kl_div(
        student.log_softmax(1), teacher.log_softmax(1), reduction="none", log_target=True
    )
    differ = student.argmax(1) != teacher.argmax(1)
    return each.mean() - (differ * apart.sum(1)).mean()


def distillation_loss(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """T² · mean KL(softmax(t / T) ‖ softmax(s / T)), of logits (B, K)."""
    s, t = ((logits / temperature).log_softmax(1) for logits in (student, teacher))
    return temperature**2 * F.kl_div(s, t, reduction="batchmean", log_target=True)


def synthesise(
    cnn: Cnn,
    payload: Payload,
    weights: Tensor,
    student: Payload,
    *,
    steps: int,
    width: int,
    batch: int,
    seed: int,
    epoch: int,
    hard: bool = False,
) -> tuple[Tensor, Tensor]:
    """Train a new generator and its noise by Adam; return images (B, c, S, S) and labels (B,).

    The images are those of the step with the lowest `generator_loss`; labels are drawn uniformly.
    """
    generator = draw_generator(cnn, width, seeds.stream(seed, "generator", epoch, WEIGHTS))
    rng = seeds.stream(seed, "generator", epoch, SAMPLES)
    noise = torch.tensor(rng.standard_normal((batch, NOISE)), dtype=cnn.dtype, device=cnn.device)
    labels = torch.tensor(rng.integers(cnn.num_classes, size=batch), device=cnn.device)
    leaves = {**generator, "noise": noise}
    rule = optimizers.adam(*GENERATOR_BETAS)
    moments, rates = rule.init(leaves), dict.fromkeys(leaves, GENERATOR_RATE)
    best, lowest = torch.empty(0), float("inf")
    for step in range(steps):
        moving = {name: value.requires_grad_() for name, value in leaves.items()}
        images = generate(moving, moving["noise"], cnn)
        teacher = ensemble(cnn, payload, images, weights)
        loss = generator_loss(teacher, cnn.logits(student, images)[0], labels, hard)
        grads = torch.autograd.grad(loss, list(moving.values()))
        if step == 0 or float(loss.detach()) < lowest:
            best, lowest = images.detach(), float(loss.detach())
        with torch.no_grad():
            rule.update(leaves, dict(zip(leaves, grads, strict=True)), moments, rates, step + 1)
    return best.contiguous(), labels


def study(
    cnn: Cnn,
    student: Payload,
    moments: optimizers.Moments,
    lessons: Iterable[tuple[Tensor, Tensor]],
    *,
    lr: float,
    temperature: float,
) -> None:
    """Take one SGD step (momentum 0.9) per lesson (images, teacher's logits), in place."""
    rule, rates = optimizers.sgd(MOMENTUM), dict.fromkeys(student, lr)
    for images, teacher in lessons:
        own = {name: value.detach().requires_grad_() for name, value in student.items()}
        loss = distillation_loss(cnn.logits(own, images)[0], teacher, temperature)
        grads = torch.autograd.grad(loss, list(own.values()))
        rule.update(student, dict(zip(student, grads, strict=True)), moments, rates, 1)


def shuffled(total: int, batch: int, limit: int, *, seed: int, epoch: int) -> list[Tensor]:
    """Cut a permutation of 0 … total − 1 into batches, at most `limit` of them if not 0."""
    order = torch.from_numpy(seeds.stream(seed, "generator", epoch, ORDER).permutation(total))
    batches = list(order.split(batch))
    return batches[:limit] if limit else batches


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
    """Learn one network from the clients' networks, without data.

    Args:
        cnn: the clients' architecture, and the student's.
        payload: the clients' parameters, leading axis C.
        samples: (C,) training samples of each client; those without do not vote.
        epochs: new generators, each followed by a pass of the student over the images so far.
        lr: of the student's SGD.
        batch: images per generator and per step of the student, at least 2.
        seed: the run's seed; the student starts at the draw of client 0, as shared clients do.
        generator_steps: Adam steps of each generator.
        generator_width: channels of its last hidden layer.
        student_steps: at most so many steps of the student per epoch; 0 = the whole pass.

    Returns:
        The student's parameters, leading axis 1.

    Raises:
        ValueError: counts below the least that is allowed, or clients that cannot vote.
    """
    check(epochs, batch, generator_steps, generator_width, student_steps)
    payload, weights = voters(payload, samples)
    student = cnn.initial([0], seed=seed)
    moments = optimizers.sgd(MOMENTUM).init(student)
    pool: list[Tensor] = []
    answers: list[Tensor] = []
    for epoch in range(epochs):
        images, _ = synthesise(
            cnn,
            payload,
            weights,
            student,
            steps=generator_steps,
            width=generator_width,
            batch=batch,
            seed=seed,
            epoch=epoch,
        )
        pool.append(images)
        with torch.no_grad():
            answers.append(ensemble(cnn, payload, images, weights))
        x, t = torch.cat(pool), torch.cat(answers)
        batches = shuffled(len(x), batch, student_steps, seed=seed, epoch=epoch)
        lessons = ((x[b], t[b]) for b in batches)
        study(cnn, student, moments, lessons, lr=lr, temperature=TEMPERATURE)
    return student


def check(
    epochs: int, batch: int, generator_steps: int, generator_width: int, student_steps: int
) -> None:
    """Raise a ValueError for a count of `distil` that is too small."""
    counts = (
        ("epochs", epochs, 1),
        ("batch", batch, 2),
        ("generator_steps", generator_steps, 1),
        ("generator_width", generator_width, 1),
        ("student_steps", student_steps, 0),
    )
    for name, value, least in counts:
        if value < least:
            raise ValueError(f"{name}={value}: allowed are integers from {least}")
