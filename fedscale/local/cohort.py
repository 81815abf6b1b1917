"""The only training loop: the mini-batches of all clients of a worker as one batch.

The backbone is frozen and every trainable tensor carries a leading client axis, so clients cannot
touch each other's gradients, and the result is exactly that of one run per client. Cohorts are
ragged: clients are sorted by their number of steps and a prefix of them takes each step; nothing
is padded but the linear heads. A step is walked in chunks of images that suit the cache.
"""

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

CHUNK_VALUES = {"cpu": 2**21, "cuda": 2**24}
"""Values of the residual stream (images · rows · width) per chunk. CPU: measured, see
benchmarks/local_update.py; CUDA: bounds the memory of a chunk's activations (about 8 GB for a
ViT-B in bfloat16)."""


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


@dataclass(frozen=True)
class CohortData:
    """Training samples of a block of clients, each image once.

    Attributes:
        tokens: (N, T, w) from `Prompted.tokens`.
        labels: (N,) int64.
        rows: per client, the positions of its samples in tokens and labels.
    """

    tokens: Tensor
    labels: Tensor
    rows: Sequence[np.ndarray]


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
    """Prompts drawn from U(-v, v), v = sqrt(6 / (3·patch² + width)), and heads of zeros.

    clients are global numbers; the leading axis of the payload follows them. "shared" gives
    every client the same draw, "per_client" each its own.
    """
    v = (6 / (3 * patch * patch + width)) ** 0.5
    keys = [0 if init == "shared" else c for c in clients]
    draws = [seeds.stream(seed, "prompts", 0, k).uniform(-v, v, (count, width)) for k in keys]
    return {
        "prompts": torch.from_numpy(np.stack(draws).astype(np.float32)),
        "head.weight": torch.zeros(len(keys), num_classes, width),
        "head.bias": torch.zeros(len(keys), num_classes),
    }


def batches(
    rows: np.ndarray, *, batch_size: int, epochs: int, seed: int, round: int, client: int
) -> list[np.ndarray]:
    """Return one client's mini-batches of a round.

    Every epoch is the next permutation of the stream (seed, "batches", round, client), cut into
    batches of batch_size and a smaller last one.
    """
    rng = seeds.stream(seed, "batches", round, client)
    cuts: list[np.ndarray] = []
    for _ in range(epochs):
        order = rows[rng.permutation(len(rows))]
        cuts += [order[s : s + batch_size] for s in range(0, len(order), batch_size)]
    return cuts


def gradients(
    model: Prompted,
    payload: Payload,
    tokens: Tensor,
    labels: Tensor,
    counts: Sequence[int],
    *,
    pad: int | None = None,
    chunk: int | None = None,
) -> tuple[Payload, Tensor]:
    """Gradients of every client's mean cross-entropy on its own batch.

    Args:
        model: the frozen backbone.
        payload: C clients' trainables.
        tokens: (B, T, w), the clients' batches one after the other.
        labels: (B,) int64.
        counts: images per client, C positive numbers that sum to B.
        pad: rows per client in the heads' products, at least the largest count; a constant keeps
            the rounding of a client's gradients independent of the others' counts.
        chunk: images per pass; None: as many as suit the device. A client's batch is cut only
            when it is larger than a chunk.

    Returns:
        Gradients shaped like the payload, and losses (C,).
    """
    chunk = chunk or _chunk(model, tokens, payload["prompts"].shape[1])
    pad = pad or max(counts)
    grads = {name: torch.zeros_like(value) for name, value in payload.items()}
    losses = torch.zeros(len(counts), device=tokens.device)
    done = 0
    for first, sizes in _chunks(counts, chunk):
        mine = slice(first, first + len(sizes))
        part = slice(done, done := done + sum(sizes))
        leaves = {name: value[mine].detach().requires_grad_() for name, value in payload.items()}
        features = model.features(tokens[part], leaves["prompts"], sizes)
        place = np.concatenate([c * pad + np.arange(n) for c, n in enumerate(sizes)])
        index = torch.from_numpy(place).to(features.device)
        rows = features.new_zeros(len(sizes) * pad, features.shape[1]).index_copy(
            0, index, features
        )
        targets = labels.new_full((len(rows),), -100).index_copy(0, index, labels[part])
        weight, bias = leaves["head.weight"], leaves["head.bias"]
        rows = rows.view(len(sizes), pad, -1)
        logits = torch.baddbmm(bias[:, None], rows, weight.transpose(1, 2))
        each = F.cross_entropy(logits.flatten(0, 1), targets, reduction="none")
        batch = torch.as_tensor(counts[mine], device=each.device)
        loss = each.view(len(sizes), pad).sum(1) / batch
        found = torch.autograd.grad(loss.sum(), list(leaves.values()))
        for name, g in zip(leaves, found, strict=True):
            grads[name][mine] += g
        losses[mine] += loss.detach()
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
    chunk: int | None = None,
) -> tuple[Payload, TrainStats]:
    """Train every active client for settings.epochs on its own samples.

    Args:
        model: the frozen backbone.
        payload: C clients' trainables, float32 on the model's device; left as it is.
        data: their samples.
        settings: optimizer, rates, epochs, batch size; prompts move with prompt_lr (lr if 0).
        seed: the run's seed.
        round: communication round, with the seed and the client the key of the batches.
        clients: C global client numbers.
        active: (C,) bool; the others keep their payload and take no step.
        chunk: images per pass, see `gradients`.

    Returns:
        The new payload and what happened. A loss that is not finite is reported, not raised.
    """
    rule = optimizers.build(settings.optimizer, momentum=settings.momentum)
    plans = [
        batches(
            rows,
            batch_size=settings.batch_size,
            epochs=settings.epochs if on else 0,
            seed=seed,
            round=round,
            client=int(client),
        )
        for rows, client, on in zip(data.rows, clients, active, strict=True)
    ]
    steps = np.array([len(plan) for plan in plans])
    order = np.argsort(-steps, kind="stable")
    state = {name: value[torch.from_numpy(order)] for name, value in payload.items()}
    moments = rule.init(state)
    rates = dict.fromkeys(state, settings.lr)
    rates["prompts"] = settings.prompt_lr if settings.prompt_lr > 0 else settings.lr
    losses = torch.zeros(len(plans), device=model.device)
    for step in range(int(steps.max(initial=0))):
        live = int((steps > step).sum())
        picked = [plans[client][step] for client in order[:live]]
        flat = torch.from_numpy(np.concatenate(picked)).to(data.tokens.device)
        params = {name: value[:live] for name, value in state.items()}
        grads, loss = gradients(
            model,
            params,
            data.tokens[flat].to(model.device),
            data.labels[flat.to(data.labels.device)].to(model.device),
            [len(batch) for batch in picked],
            pad=settings.batch_size,
            chunk=chunk,
        )
        kept = {name: tuple(m[:live] for m in each) for name, each in moments.items()}
        rule.update(params, grads, kept, rates, step + 1)
        losses[:live] += loss
    back = torch.from_numpy(np.argsort(order))
    taken = torch.from_numpy(steps)
    trained = {name: value[back] for name, value in state.items()}
    return trained, TrainStats(losses.cpu()[back] / taken, taken)


@torch.no_grad()
def evaluate(
    model: Prompted, payload: Payload, tokens: Tensor, labels: Tensor, *, chunk: int | None = None
) -> tuple[Tensor, Tensor]:
    """Score every client on the same samples.

    Args:
        model: the frozen backbone.
        payload: C clients' trainables.
        tokens: (B, T, w).
        labels: (B,) int64.
        chunk: images per pass; None: as many as suit the device.

    Returns:
        Correct predictions (C,) int64 and mean cross-entropy (C,) float32, on the CPU.
    """
    chunk = chunk or _chunk(model, tokens, payload["prompts"].shape[1])
    prompts, weights, biases = (payload[k] for k in ("prompts", "head.weight", "head.bias"))
    correct = torch.zeros(len(prompts), dtype=torch.int64, device=model.device)
    loss = torch.zeros(len(prompts), device=model.device)
    for x, y in zip(tokens.split(chunk), labels.split(chunk), strict=True):
        x, y = x.to(model.device), y.to(model.device)
        if x.shape[2] == model.width:
            x = model.project(x)  # once for all clients
        for c in range(len(prompts)):
            features = model.features(x, prompts[c : c + 1], [len(x)])
            logits = F.linear(features, weights[c], biases[c])
            correct[c] += (logits.argmax(1) == y).sum()
            loss[c] += F.cross_entropy(logits, y, reduction="sum")
    return correct.cpu(), loss.cpu() / len(tokens)


def _chunk(model: Prompted, tokens: Tensor, prompts: int) -> int:
    values = CHUNK_VALUES.get(model.device.type, CHUNK_VALUES["cuda"])
    return max(1, values // ((tokens.shape[1] + prompts) * model.width))


def _chunks(counts: Sequence[int], size: int) -> Iterator[tuple[int, list[int]]]:
    """Cut clients' batches into passes: the first client and the images of it and the next ones."""
    first, sizes = 0, list[int]()
    for client, count in enumerate(counts):
        if sizes and sum(sizes) + count > size:
            yield first, sizes
            sizes = []
        if not sizes:
            first = client
            while count > size:
                yield client, [size]
                count -= size
        sizes.append(count)
    if sizes:
        yield first, sizes
