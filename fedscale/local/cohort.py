"""The only training loop: the mini-batches of all clients of a worker as one batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedscale import seeds
from fedscale.local import optimizers
from fedscale.models.prompted import Prompted

Payload = dict[str, Tensor]


class Settings(Protocol):
    """What `train` reads of the configuration of local updates."""

    @property
    def optimizer(self) -> str: ...
    @property
    def lr(self) -> float: ...
    @property
    def prompt_lr(self) -> float: ...
    @property
    def epochs(self) -> int: ...
    @property
    def batch_size(self) -> int: ...
    @property
    def momentum(self) -> float: ...


@dataclass(frozen=True)
class CohortData:
    """Training samples of a block of clients.

    tokens (N, T, d) and labels (N,) int64 hold each image once; rows[c] are the positions of
    client c's samples in them.
    """

    tokens: Tensor
    labels: Tensor
    rows: Sequence[np.ndarray]


@dataclass(frozen=True)
class TrainStats:
    """loss (C,) mean over the client's steps of the round, NaN where steps (C,) is 0."""

    loss: Tensor
    steps: Tensor

    @property
    def diverged(self) -> Tensor:
        """(C,) bool: clients that trained and whose loss is not finite."""
        return (self.steps > 0) & ~torch.isfinite(self.loss)


def initial_payload(
    clients: Sequence[int],
    *,
    count: int,
    width: int,
    patch: int,
    num_classes: int,
    init: Literal["shared", "per_client"] = "shared",
    seed: int,
) -> Payload:
    """Prompts from U(-v, v) with v = sqrt(6 / (3·patch² + width)), heads of zeros.

    clients are global numbers; the payload's leading axis follows them.
    """
    v = (6 / (3 * patch * patch + width)) ** 0.5
    keys = [0 if init == "shared" else c for c in clients]
    draws = [seeds.stream(seed, "prompts", 0, k).uniform(-v, v, (count, width)) for k in keys]
    prompts = torch.from_numpy(np.stack(draws).astype(np.float32))
    return {
        "prompts": prompts,
        "head.weight": torch.zeros(len(keys), num_classes, width),
        "head.bias": torch.zeros(len(keys), num_classes),
    }


def batches(
    rows: np.ndarray, *, batch_size: int, epochs: int, seed: int, round: int, client: int
) -> list[np.ndarray]:
    """One client's mini-batches of a round: each epoch is a permutation cut into batches."""
    rng = seeds.stream(seed, "batches", round, client)
    out: list[np.ndarray] = []
    for _ in range(epochs):
        order = rows[rng.permutation(len(rows))]
        out += [order[s : s + batch_size] for s in range(0, len(order), batch_size)]
    return out


def _chunks(counts: Sequence[int], size: int) -> Iterator[tuple[int, int]]:
    start, images = 0, 0
    for c, n in enumerate(counts):
        if images and images + n > size:
            yield start, c
            start, images = c, 0
        images += n
    yield start, len(counts)


def gradients(
    model: Prompted,
    payload: Payload,
    tokens: Tensor,
    labels: Tensor,
    counts: Sequence[int],
    chunk: int = 64,
) -> tuple[Payload, Tensor]:
    """One step's gradients of every client's mean cross-entropy, and the losses (C,)."""
    grads = {k: torch.zeros_like(v) for k, v in payload.items()}
    losses = torch.zeros(len(counts))
    offsets = np.concatenate([[0], np.cumsum(counts)])
    for a, b in _chunks(counts, chunk):
        s, e = int(offsets[a]), int(offsets[b])
        leaves = {k: v[a:b].detach().requires_grad_() for k, v in payload.items()}
        n = torch.as_tensor(counts[a:b])
        h = model.features(tokens[s:e], leaves["prompts"], counts[a:b])
        owner = torch.arange(b - a).repeat_interleave(n)
        place = torch.arange(e - s) - torch.as_tensor(offsets[a:b] - s)[owner]
        padded = h.new_zeros(b - a, int(n.max()), h.shape[1]).index_put((owner, place), h)
        logits = torch.baddbmm(
            leaves["head.bias"][:, None], padded, leaves["head.weight"].transpose(1, 2)
        )[owner, place]
        each = F.cross_entropy(logits, labels[s:e], reduction="none")
        loss = torch.zeros(b - a).index_add(0, owner, each) / n
        for k, g in zip(
            leaves, torch.autograd.grad(loss.sum(), list(leaves.values())), strict=True
        ):
            grads[k][a:b] = g
        losses[a:b] = loss.detach()
    return grads, losses


def train(
    model: Prompted,
    payload: Payload,
    data: CohortData,
    settings: Settings,
    *,
    seed: int,
    round: int,
    clients: Sequence[int],
    active: np.ndarray,
) -> tuple[Payload, TrainStats]:
    """Train every active client on its own samples; see the module's docstring."""
    plans = [
        batches(
            rows,
            batch_size=settings.batch_size,
            epochs=settings.epochs,
            seed=seed,
            round=round,
            client=int(c),
        )
        if on
        else []
        for rows, c, on in zip(data.rows, clients, active, strict=True)
    ]
    steps = np.array([len(p) for p in plans])
    order = np.argsort(-steps, kind="stable")
    back = torch.from_numpy(np.argsort(order))
    index = torch.from_numpy(order)
    state = {k: v[index].clone() for k, v in payload.items()}
    rule = optimizers.build(settings.optimizer, momentum=settings.momentum)
    moments = rule.init(state)
    rates = {k: settings.lr for k in state}
    rates["prompts"] = settings.prompt_lr if settings.prompt_lr > 0 else settings.lr
    losses = torch.zeros(len(plans))
    for t in range(int(steps.max(initial=0))):
        live = int((steps > t).sum())
        picked = [plans[c][t] for c in order[:live]]
        flat = torch.from_numpy(np.concatenate(picked))
        params = {k: v[:live] for k, v in state.items()}
        grads, loss = gradients(
            model, params, data.tokens[flat], data.labels[flat], [len(p) for p in picked]
        )
        rule.update(
            params,
            grads,
            {k: tuple(m[:live] for m in ms) for k, ms in moments.items()},
            rates,
            t + 1,
        )
        losses[:live] += loss
    count = torch.from_numpy(steps)
    return {k: v[back] for k, v in state.items()}, TrainStats(losses[back] / count, count)


@torch.no_grad()
def evaluate(
    model: Prompted, payload: Payload, tokens: Tensor, labels: Tensor, chunk: int = 64
) -> tuple[Tensor, Tensor]:
    """Every client on the same test samples: correct (C,) int64 and mean loss (C,)."""
    C = len(payload["prompts"])
    correct, loss = torch.zeros(C, dtype=torch.int64), torch.zeros(C)
    for c in range(C):
        for s in range(0, len(tokens), chunk):
            x, y = tokens[s : s + chunk], labels[s : s + chunk]
            h = model.features(x, payload["prompts"][c : c + 1], [len(x)])
            logits = F.linear(h, payload["head.weight"][c], payload["head.bias"][c])
            correct[c] += (logits.argmax(1) == y).sum()
            loss[c] += F.cross_entropy(logits, y, reduction="sum")
    return correct, loss / len(tokens)
