"""DENSE: a server distils clients' networks into one, on images of a generator that it trains.

Zhang et al. 2022, DENSE: Data-Free One-Shot Federated Learning, arXiv:2112.12371.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedscale import seeds
from fedscale.models.cnn import Cnn, Payload

NOISE = 256
"""nz, length of the generator's input."""

GENERATOR_STEPS = 10
"""Steps of the generator per epoch (30 in the paper's code on a GPU)."""

STUDENT_STEPS = 20
TEMPERATURE = 20.0


class Generator(nn.Module):
    """Noise (B, 256) → images (B, channels, S, S) in −1 … 1, by two doublings of the side."""

    def __init__(self, side: int, channels: int, width: int = 32) -> None:
        super().__init__()
        self.side, self.start, self.width = side, -(-side // 4), width
        self.first = nn.Linear(NOISE, 2 * width * self.start**2)
        self.layers = nn.Sequential(
            nn.BatchNorm2d(2 * width),
            nn.Upsample(scale_factor=2),
            nn.Conv2d(2 * width, 2 * width, 3, padding=1),
            nn.BatchNorm2d(2 * width),
            nn.LeakyReLU(0.2),
            nn.Upsample(scale_factor=2),
            nn.Conv2d(2 * width, width, 3, padding=1),
            nn.BatchNorm2d(width),
            nn.LeakyReLU(0.2),
            nn.Conv2d(width, channels, 3, padding=1),
        )

    def forward(self, z: Tensor) -> Tensor:
        """Return the images of a batch of noise."""
        x = self.first(z).view(len(z), 2 * self.width, self.start, self.start)
        images: Tensor = torch.tanh(self.layers(x))
        return images[..., : self.side, : self.side]


def seeded_generator(cnn: Cnn, rng: np.random.Generator) -> Generator:
    """Return a generator whose weights are drawn from rng."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(rng.integers(2**62)))
        return Generator(cnn.image_size, cnn.channels).to(cnn.device)


def ensemble(cnn: Cnn, payload: Payload, images: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted mean of the clients' logits (B, K)."""
    return torch.einsum("c,cbk->bk", weights, cnn.logits(payload, images))


def disagreement(student: Tensor, teacher: Tensor) -> Tensor:
    """Return −mean(1[argmax s ≠ argmax t] · KL(t ‖ s)): images on which the two differ pay."""
    differ = student.argmax(1) != teacher.argmax(1)
    each = F.kl_div(student.log_softmax(1), teacher.softmax(1), reduction="none").sum(1)
    return -(differ * each).mean()


def distillation(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """Return T² · KL(t ‖ s) of the softened predictions."""
    s = (student / temperature).log_softmax(1)
    return F.kl_div(s, (teacher / temperature).softmax(1), reduction="batchmean") * temperature**2


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
    """Learn one network from the clients' networks, without data.

    Each epoch trains generator and noise on CE(ens(G z), y) + the disagreement of student and
    ensemble (the networks have no batch norm, so the term on its statistics is absent), and then
    the student on the images by distillation at T = 20. Ensemble weights are the sample shares.

    Args:
        cnn: the clients' architecture, and the student's.
        payload: the clients' parameters, leading axis C.
        samples: (C,) training samples of each client.
        epochs: of generator and student.
        lr: of the student's SGD, momentum 0.9.
        batch: images per step.
        seed: the run's seed.

    Returns:
        The student's parameters, leading axis 1.
    """
    rng = seeds.stream(seed, "generator")
    share = torch.tensor(samples, dtype=torch.float32, device=cnn.device)
    weights = share / share.sum()
    generator = seeded_generator(cnn, rng)
    student = Student(cnn, payload, weights, lr)
    for _ in range(epochs):
        z, y = noise(rng, batch, cnn)
        z.requires_grad_()
        rule = torch.optim.Adam([*generator.parameters(), z], lr=1e-3, betas=(0.5, 0.999))
        for _ in range(GENERATOR_STEPS):
            images = generator(z)
            teacher = ensemble(cnn, payload, images, weights)
            loss = F.cross_entropy(teacher, y) + disagreement(student.logits(images), teacher)
            rule.zero_grad()
            loss.backward()
            rule.step()
        for _ in range(STUDENT_STEPS):
            z, _ = noise(rng, batch, cnn)
            with torch.no_grad():
                images = generator(z)
                teacher = ensemble(cnn, payload, images, weights)
            student.step(images, teacher, TEMPERATURE)
    return student.payload()


def noise(rng: np.random.Generator, batch: int, cnn: Cnn) -> tuple[Tensor, Tensor]:
    """Draw noise (B, 256) and labels (B,)."""
    z = torch.from_numpy(rng.standard_normal((batch, NOISE), dtype=np.float32))
    y = torch.from_numpy(rng.integers(cnn.num_classes, size=batch))
    return z.to(cnn.device), y.to(cnn.device)


class Student:
    """The network that is distilled: starts at the weighted mean of the clients'."""

    def __init__(self, cnn: Cnn, payload: Payload, weights: Tensor, lr: float) -> None:
        self.cnn = cnn
        self.parameters = {
            name: torch.tensordot(weights, value, 1)[None].requires_grad_()
            for name, value in payload.items()
        }
        self.rule = torch.optim.SGD(self.parameters.values(), lr=lr, momentum=0.9)

    def logits(self, images: Tensor) -> Tensor:
        """Return (B, K)."""
        return self.cnn.logits(self.parameters, images)[0]

    def step(self, images: Tensor, teacher: Tensor, temperature: float) -> None:
        """Take one step of distillation."""
        loss = distillation(self.logits(images), teacher, temperature)
        self.rule.zero_grad()
        loss.backward()
        self.rule.step()

    def payload(self) -> Payload:
        """Return the parameters, leading axis 1."""
        return {name: value.detach() for name, value in self.parameters.items()}
