"""The CNN of SSD-FL, the networks of many clients trained as one by grouped convolutions.

3×3 convolutions (32, 64, 128, 128, 256 channels; padding 1) with ReLU, 2×2 max pooling after a
convolution as long as it leaves a side of at least 2, and one linear layer on what is left:
28 → 14 → 7 → 3, then 3×3 maps to the end; 32 → 16 → 8 → 4 → 2, then 2×2. Down to one pixel
the last convolution would see nothing but padding with eight of its nine weights.

The clients' channels lie side by side, one group each, in channels-last layout: PyTorch's pooling
on CPUs is vectorised only there. benchmarks/cnn_cohort.py measures this against torch.func.vmap
and a loop over clients.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedscale import seeds

Payload = dict[str, Tensor]

CHUNK_VALUES = {"cpu": 2**22, "cuda": 2**28}
"""Values of the first convolution's output per pass. CPU: measured, see benchmarks/cnn_cohort.py;
CUDA: bounds the memory of a pass's activations (a few GB)."""

TOGETHER = 4  # clients that share a pass when all score the same images


@dataclass(frozen=True)
class Cnn:
    """The network and where it is computed; parameters are a payload, apart from it.

    Payload: conv1.weight (C, w₁, c, 3, 3), conv1.bias (C, w₁), conv2.weight (C, w₂, w₁, 3, 3), …,
    head.weight (C, K, f), head.bias (C, K), with f = last width · side², channels first. No part
    of a client's results depends on another client's parameters or images.

    Attributes:
        num_classes: K.
        image_size: side S that images are resized to.
        channels: c, 3 or 1; with 1 an image's three channels are averaged.
        widths: channels of the convolutions, one after the other.
        device: where payloads, gradients and computations live; a name is taken too.
        dtype: of payloads and images, float32 or float64.

    Raises:
        ValueError: a value that is not allowed.
    """

    num_classes: int
    image_size: int = 32
    channels: int = 3
    widths: tuple[int, ...] = (32, 64, 128, 128, 256)
    device: torch.device = torch.device("cpu")  # noqa: RUF009
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        object.__setattr__(self, "device", torch.device(self.device))
        object.__setattr__(self, "widths", tuple(self.widths))
        for name in ("num_classes", "image_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: allowed are integers from 1")
        if self.channels not in (1, 3):
            raise ValueError(f"channels={self.channels}: allowed are 1 and 3")
        if not self.widths or min(self.widths) < 1:
            raise ValueError(f"widths={self.widths}: allowed are one or more integers from 1")
        if self.dtype not in (torch.float32, torch.float64):
            raise ValueError(f"dtype={self.dtype}: allowed are torch.float32 and torch.float64")

    @property
    def sides(self) -> tuple[int, ...]:
        """Side of the map after each convolution and its pooling."""
        sides = [self.image_size]
        for _ in self.widths:
            sides.append(sides[-1] // 2 if sides[-1] >= 4 else sides[-1])
        return tuple(sides[1:])

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every parameter of one client, in the payload's order."""
        shapes: dict[str, tuple[int, ...]] = {}
        before = self.channels
        for layer, width in enumerate(self.widths, 1):
            shapes[f"conv{layer}.weight"] = (width, before, 3, 3)
            shapes[f"conv{layer}.bias"] = (width,)
            before = width
        shapes["head.weight"] = (self.num_classes, before * self.sides[-1] ** 2)
        shapes["head.bias"] = (self.num_classes,)
        return shapes

    @torch.no_grad()
    def inputs(self, images: np.ndarray, *, batch: int = 4096) -> Tensor:
        """Return uint8 images (N, H, W, 3) as (N, c, S, S), values 0…255 scaled to −1…1.

        Other sizes are resized bilinearly with antialiasing, `batch` images at a time.

        Raises:
            ValueError: another type or shape.
        """
        if images.dtype != np.uint8 or images.ndim != 4 or images.shape[3] != 3:
            raise ValueError(
                f"images={images.dtype} {images.shape}: allowed are uint8 arrays (N, H, W, 3)"
            )
        size = (self.image_size, self.image_size)
        found = torch.empty(len(images), self.channels, *size, dtype=self.dtype, device=self.device)
        for start in range(0, len(images), batch):
            x = torch.tensor(images[start : start + batch], device=self.device)
            x = x.permute(0, 3, 1, 2).to(self.dtype)
            x = x if self.channels == 3 else x.mean(1, keepdim=True)
            if x.shape[2:] != size:
                x = F.interpolate(x, size=size, mode="bilinear", antialias=True)
            found[start : start + len(x)] = x / 127.5 - 1
        return found

    def initial(
        self, clients: Sequence[int], *, seed: int, init: Literal["shared", "per_client"] = "shared"
    ) -> Payload:
        """Weights and biases drawn from U(−v, v), v = 1 / √(inputs of a unit), as torch's layers.

        clients are global numbers; the leading axis of the payload follows them. "shared" gives
        every client the same draw, "per_client" each its own.

        Raises:
            ValueError: an unknown init.
        """
        if init not in ("shared", "per_client"):
            raise ValueError(f"init={init}: allowed are shared and per_client")
        draws = [
            self._draw(seeds.stream(seed, "weights", 0, 0 if init == "shared" else client))
            for client in clients
        ]
        payload: Payload = {}
        for name, shape in self.shapes.items():
            stacked = np.array([draw[name] for draw in draws]).reshape(len(draws), *shape)
            payload[name] = torch.tensor(stacked, dtype=self.dtype, device=self.device)
        return payload

    def _draw(self, rng: np.random.Generator) -> dict[str, np.ndarray]:
        draw: dict[str, np.ndarray] = {}
        for name, shape in self.shapes.items():
            if name.endswith("weight"):
                v = float(np.prod(shape[1:])) ** -0.5
            draw[name] = rng.uniform(-v, v, shape)
        return draw

    def logits(self, payload: Payload, images: Tensor) -> Tensor:
        """Return every client's logits (C, B, K); differentiable in payload and images.

        Args:
            payload: C clients' parameters.
            images: (C, B, c, S, S), B of each client, or (B, c, S, S), the same for all.
        """
        clients = len(payload["head.bias"])
        if images.ndim == 4:
            x = images.repeat(1, clients, 1, 1)
        else:
            x = images.transpose(0, 1).flatten(1, 2)
        for layer, side in enumerate(self.sides, 1):
            weight = payload[f"conv{layer}.weight"].flatten(0, 1)
            bias = payload[f"conv{layer}.bias"].flatten()
            if layer == 1 and clients == 1 and x.device.type == "cpu":
                x = _LoneConv.apply(x, weight, bias)
            else:
                x = _conv(x, weight, bias, clients)
            # Images of one channel have no layout of their own: the slow one may come out of them.
            x = x.contiguous(memory_format=torch.channels_last)
            # Pooling first is the same and leaves ReLU a quarter of the work.
            x = F.relu(F.max_pool2d(x, 2) if side != x.shape[2] else x)
        features = x.unflatten(1, (clients, -1)).transpose(0, 1).flatten(2)
        heads = payload["head.weight"].transpose(1, 2)
        return torch.baddbmm(payload["head.bias"][:, None], features, heads)

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
        """Gradients of every client's mean cross-entropy on its own batch, and losses (C,).

        Clients that follow each other with equally many images share a pass; nothing is padded.

        Args:
            payload: C clients' parameters.
            inputs: (B, c, S, S), the clients' images one after the other.
            labels: (B,) int64.
            counts: images per client, C positive numbers that sum to B.
            pad: not needed here.
            chunk: images per pass; only a batch larger than it is cut. None: as suits the device.

        Raises:
            ValueError: a count or a chunk below 1, or counts of other sum.
        """
        if min([*counts, 1 if chunk is None else chunk]) < 1:
            raise ValueError(f"counts={list(counts)}, chunk={chunk}: allowed are integers from 1")
        if not sum(counts) == len(inputs) == len(labels):
            raise ValueError(f"counts={list(counts)}: allowed are those of {len(inputs)} inputs")
        grads = {name: torch.zeros_like(value) for name, value in payload.items()}
        losses = torch.zeros(len(counts), dtype=self.dtype, device=inputs.device)
        for mine, part, size in _passes(counts, chunk or self._chunk()):
            own = {name: value[mine].detach().requires_grad_() for name, value in payload.items()}
            logits = self.logits(own, inputs[part].unflatten(0, (-1, size)))
            each = F.cross_entropy(logits.flatten(0, 1), labels[part], reduction="none")
            loss = each.view(-1, size).sum(1) / counts[mine.start]
            found = torch.autograd.grad(loss.sum(), list(own.values()))
            for name, g in zip(own, found, strict=True):
                grads[name][mine] += g
            losses[mine] += loss.detach()
        return grads, losses

    @torch.no_grad()
    def evaluate(
        self, payload: Payload, inputs: Tensor, labels: Tensor, *, chunk: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Score every client on the same samples: inputs (B, c, S, S), labels (B,) int64.

        Args as of `gradients`; up to four clients share a pass of `chunk` images.

        Returns:
            Correct predictions (C,) int64 and mean cross-entropy (C,), on the CPU; NaN losses
            for B = 0.
        """
        clients = len(payload["head.bias"])
        chunk = chunk or max(1, self._chunk() // TOGETHER)
        correct = torch.zeros(clients, dtype=torch.int64, device=self.device)
        loss = torch.zeros(clients, dtype=torch.float64)
        for x, y in zip(inputs.split(chunk), labels.split(chunk), strict=True):
            x, y = x.to(self.device), y.to(self.device)
            for first in range(0, clients, TOGETHER):
                mine = slice(first, first + TOGETHER)
                logits = self.logits({k: v[mine] for k, v in payload.items()}, x)
                correct[mine] += (logits.argmax(2) == y).sum(1)
                targets = y.expand(logits.shape[:2])
                each = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
                loss[mine] += each.cpu().double().sum(1)
        return correct.cpu(), (loss / len(inputs)).to(self.dtype)

    def _chunk(self) -> int:
        values = CHUNK_VALUES.get(self.device.type, CHUNK_VALUES["cuda"])
        return max(1, values // (self.widths[0] * self.image_size**2))


def _conv(x: Tensor, weight: Tensor, bias: Tensor, groups: int) -> Tensor:
    x = x.contiguous(memory_format=torch.channels_last)
    return F.conv2d(x, weight, bias, padding=1, groups=groups)


class _LoneConv(torch.autograd.Function):
    """The first convolution of one client, with gradients that round as those of several.

    oneDNN takes the weights' gradient of a convolution of few channels by another kernel where
    there is one group; a client's results would then depend on whether anyone shares its pass.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _conv(x, weight, bias, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        width, channels = weight.shape[:2]
        g, x = (torch.cat([t, t], 1) for t in (grads[0], x))
        g, x = (t.contiguous(memory_format=torch.channels_last) for t in (g, x))
        twice, ones, needs = weight.repeat(2, 1, 1, 1), [1, 1], list(ctx.needs_input_grad)
        # Stride, padding and dilation are 1; two groups.
        found = torch.ops.aten.convolution_backward(
            g, x, twice, [2 * width], ones, ones, ones, False, [0, 0], 2, needs
        )
        of_x, *others = found
        return (
            None if of_x is None else of_x[:, :channels],
            *(None if g is None else g[:width] for g in others),
        )


def _passes(counts: Sequence[int], chunk: int) -> Iterator[tuple[slice, slice, int]]:
    """Cut the clients' batches into passes: the clients, their images, images of each."""
    first, start = 0, 0
    while first < len(counts):
        count, last = counts[first], first + 1
        while last < len(counts) and counts[last] == count and (last + 1 - first) * count <= chunk:
            last += 1
        total = (last - first) * count
        step = total if last - first > 1 else min(count, chunk)
        for done in range(0, total, step):
            rest = min(step, total - done)
            part = slice(start + done, start + done + rest)
            yield slice(first, last), part, rest // (last - first)
        first, start = last, start + total
