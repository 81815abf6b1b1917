"""The only training loop: the mini-batches of all clients of a worker as one batch.

Every trainable tensor carries a leading client axis, so clients cannot touch each other's
gradients, and the result is exactly that of one run per client. Cohorts are ragged: clients are
sorted by their number of steps and a prefix of them takes each step. What is trained (prompts on a
frozen backbone, a CNN) is a `Learner`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from fedscale import seeds
from fedscale.local import optimizers

Payload = dict[str, Tensor]

COUNT = "prompts.count"
"""Payload entry (C,) int64 of clients that hold different numbers of prompts; not trained."""


class Learner(Protocol):
    """What is trained: gradients and scores of many clients at once."""

    @property
    def device(self) -> torch.device: ...  # noqa: D102

    def gradients(
        self,
        payload: Payload,
        inputs: Tensor,
        labels: Tensor,
        counts: Sequence[int],
        *,
        pad: int | None = None,
        chunk: int | None = None,
    ) -> tuple[Payload, Tensor]:
        """Return the gradients of every client's mean loss on its own batch, and losses (C,).

        Args:
            payload: C clients' trainables.
            inputs: (B, …), the clients' batches one after the other.
            labels: (B,) int64.
            counts: images per client, C positive numbers that sum to B.
            pad: largest count there can be; a constant keeps the rounding of a client's gradients
                independent of the others' counts.
            chunk: images per pass; None: as many as suit the device.
        """
        ...

    def evaluate(
        self, payload: Payload, inputs: Tensor, labels: Tensor, *, chunk: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return every client's correct predictions (C,) int64 and mean loss (C,), on the CPU."""
        ...


class Settings(Protocol):
    """What `train` reads of the configuration of local updates."""

    @property
    def optimizer(self) -> str: ...  # noqa: D102
    @property
    def lr(self) -> float: ...  # noqa: D102
    @property
    def prompt_lr(self) -> float: ...  # noqa: D102
    @property
    def epochs(self) -> int: ...  # noqa: D102
    @property
    def batch_size(self) -> int: ...  # noqa: D102
    @property
    def momentum(self) -> float: ...  # noqa: D102
    @property
    def mu(self) -> float: ...  # noqa: D102
    @property
    def rho(self) -> float: ...  # noqa: D102


@dataclass(frozen=True)
class CohortData:
    """Training samples of a block of clients, each image once.

    Attributes:
        inputs: (N, …) from the learner.
        labels: (N,) int64.
        rows: per client, the positions of its samples in inputs and labels.
    """

    inputs: Tensor
    labels: Tensor
    rows: Sequence[np.ndarray]


@dataclass(frozen=True)
class Devices:
    """Optimizers that differ from device to device (SSD-FL, equation 10): SGD with these.

    Attributes:
        mu: (C,) proximal weights on all trainables.
        momentum: (C,) heavy-ball coefficients.
    """

    mu: np.ndarray
    momentum: np.ndarray


@dataclass(frozen=True)
class Memory:
    """What an optimizer remembers between two calls of `train`.

    Attributes:
        anchor: the payload that proximal terms pull to.
        moments: name and number of each moment, `0.prompts`, …
        steps: (C,) int64 steps taken with these moments.
    """

    anchor: Payload
    moments: Payload
    steps: Tensor


@dataclass(frozen=True)
class TrainStats:
    """What a round of local training reports, per client.

    Attributes:
        loss: (C,) mean over the client's steps of the loss before each step; NaN without steps.
        steps: (C,) int64 steps taken.
    """

    loss: Tensor
    steps: Tensor

    @property
    def diverged(self) -> Tensor:
        """(C,) bool: the client trained and its loss is not finite."""
        return (self.steps > 0) & ~torch.isfinite(self.loss)


def batches(
    rows: np.ndarray,
    *,
    batch_size: int,
    epochs: int,
    seed: int,
    round: int,
    client: int,
    limit: int = 0,
) -> list[np.ndarray]:
    """Return one client's mini-batches of a round.

    Every epoch is the next permutation of the stream (seed, "batches", round, client), cut into
    batches of batch_size and a smaller last one. limit: at most so many batches; 0 for all.
    """
    rng = seeds.stream(seed, "batches", round, client)
    cuts: list[np.ndarray] = []
    for _ in range(epochs):
        order = rows[rng.permutation(len(rows))]
        cuts += [order[s : s + batch_size] for s in range(0, len(order), batch_size)]
    return cuts[:limit] if limit else cuts


def train(
    learner: Learner,
    payload: Payload,
    data: CohortData,
    settings: Settings,
    *,
    seed: int,
    round: int,
    clients: Sequence[int],
    active: np.ndarray,
    limit: int = 0,
    devices: Devices | None = None,
    memory: Memory | None = None,
    chunk: int | None = None,
) -> tuple[Payload, TrainStats, Memory]:
    """Train every active client for settings.epochs on its own samples.

    Args:
        learner: what is trained.
        payload: C clients' trainables on the learner's device; left as it is.
        data: their samples.
        settings: optimizer, rates, epochs, batch size; prompts move with prompt_lr (lr if 0).
            mu > 0 adds mu·(p − anchor) to the gradients of the prompts (of everything where there
            are no prompts): FedOPAL's and FedProx's proximal term.
        seed: the run's seed.
        round: communication round, with the seed and the client the key of the batches.
        clients: C global client numbers.
        active: (C,) bool; the others keep their payload and take no step.
        limit: mini-batches per client at most; 0 = whole epochs.
        devices: coefficients per client that replace settings.mu and settings.momentum; with
            optimizer sgd.
        memory: what an earlier call returned, to go on from; None starts anew, with the payload
            as the anchor.
        chunk: images per pass, see `Learner.gradients`.

    Returns:
        The new payload, what happened, and the optimizer's memory. A loss that is not finite is
        reported, not raised.
    """
    plans = [
        batches(
            rows,
            batch_size=settings.batch_size,
            epochs=settings.epochs if on else 0,
            seed=seed,
            round=round,
            client=int(client),
            limit=limit,
        )
        for rows, client, on in zip(data.rows, clients, active, strict=True)
    ]
    taken = np.array([len(plan) for plan in plans])
    order = np.argsort(-taken, kind="stable")
    index = torch.from_numpy(order)
    trainable = [name for name in payload if name != COUNT]
    state = {name: value[index] for name, value in payload.items()}
    params = {name: state[name] for name in trainable}
    rule = _rule(settings, devices, order)
    pulls = _pulls(settings, devices, order, trainable)
    moments = rule.init(params)
    before = torch.zeros(len(plans), dtype=torch.int64)
    anchor = {name: params[name].clone() for name in pulls}
    if memory is not None:
        for name, each in moments.items():
            for number, moment in enumerate(each):
                moment.copy_(memory.moments[f"{number}.{name}"][index])
        before = memory.steps[index]
        anchor = {name: memory.anchor[name][index] for name in pulls}
    rates = dict.fromkeys(trainable, settings.lr)
    if settings.prompt_lr > 0:
        rates["prompts"] = settings.prompt_lr
    losses = torch.zeros(len(plans), device=learner.device)
    carried = bool(before.any())
    for step in range(int(taken.max(initial=0))):
        live = int((taken > step).sum())
        picked = [plans[client][step] for client in order[:live]]
        flat = torch.from_numpy(np.concatenate(picked)).to(data.inputs.device)
        own = {name: value[:live] for name, value in state.items()}
        batch = (
            data.inputs[flat].to(learner.device),
            data.labels[flat.to(data.labels.device)].to(learner.device),
            [len(part) for part in picked],
        )
        grads, loss = learner.gradients(own, *batch, pad=settings.batch_size, chunk=chunk)
        moving = {name: own[name] for name in trainable}
        if rule.perturb is not None:
            there = {**own, **rule.perturb(moving, grads)}
            grads, _ = learner.gradients(there, *batch, pad=settings.batch_size, chunk=chunk)
        for name, weight in pulls.items():
            grads[name] += optimizers.per_client(weight, own[name]) * (
                own[name] - anchor[name][:live]
            )
        kept = {name: tuple(m[:live] for m in each) for name, each in moments.items()}
        rule.update(moving, grads, kept, rates, before + step + 1 if carried else step + 1)
        losses[:live] += loss
    back = torch.from_numpy(np.argsort(order))
    steps = torch.from_numpy(taken)
    trained = {name: value[back] for name, value in state.items()}
    memory = Memory(
        {name: value[back] for name, value in anchor.items()},
        {f"{n}.{k}": m[back] for k, each in moments.items() for n, m in enumerate(each)},
        (before[back] + steps),
    )
    return trained, TrainStats(losses.cpu()[back] / steps, steps), memory


def _rule(settings: Settings, devices: Devices | None, order: np.ndarray) -> optimizers.Optimizer:
    momentum: optimizers.Coefficient = settings.momentum
    if devices is not None:
        momentum = torch.from_numpy(devices.momentum[order])
    return optimizers.build(settings.optimizer, momentum=momentum, rho=settings.rho)


def _pulls(
    settings: Settings, devices: Devices | None, order: np.ndarray, trainable: Sequence[str]
) -> Mapping[str, optimizers.Coefficient]:
    """Return the proximal weight of every trainable that has one."""
    if devices is not None:
        if not devices.mu.any():
            return {}
        return dict.fromkeys(trainable, torch.from_numpy(devices.mu[order]))
    if not settings.mu:
        return {}
    return dict.fromkeys(["prompts"] if "prompts" in trainable else trainable, settings.mu)
