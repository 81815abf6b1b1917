"""Prompts and a linear head on a frozen backbone, as a Learner for the cohort.

A step is walked in chunks of images that suit the cache. Nothing is padded but the linear heads
(and, where clients hold different numbers of prompts, the prompts' tensor).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedscale import seeds
from fedscale.local.cohort import COUNT, Payload
from fedscale.local.statistics import normalise
from fedscale.models.prompted import Prompted

CHUNK_VALUES = {"cpu": 2**21, "cuda": 2**24}
"""Values of the residual stream (images · rows · width) per chunk. CPU: measured, see
benchmarks/local_update.py; CUDA: bounds the memory of a chunk's activations (about 8 GB for a
ViT-B in bfloat16)."""


@dataclass(frozen=True)
class PromptLearner:
    """Payload: prompts (C, n, d), head.weight (C, K, d), head.bias (C, K).

    With `selected` > 0 the prompts are a pool: every image is given the `selected` prompts whose
    cosine with its query is largest, in that order. The query is the CLS feature of an unprompted
    pass; prompts are their own keys, and the loss has −pull · Σ cosines of the selected ones.

    Attributes:
        model: the frozen backbone.
        selected: prompts per image of a pool; 0 = every image is given all prompts.
        pull: weight of the pull term.
        normalise: scale features to unit norm.
    """

    model: Prompted
    selected: int = 0
    pull: float = 0.01
    normalise: bool = False

    @property
    def device(self) -> torch.device:
        """Where payloads and gradients live."""
        return self.model.device

    def inputs(self, images: np.ndarray) -> Tensor:
        """Return what training caches of uint8 images (N, H, W, 3): tokens (N, T, d).

        A pool adds one row, the query.
        """
        tokens = self.model.tokens(images)
        if not self.selected:
            return tokens
        with torch.no_grad():
            parts = tokens.split(_chunk(self.model, tokens, 0))
            queries = torch.cat([self.model.features(part) for part in parts])
        return torch.cat([tokens, queries[:, None].to(tokens.dtype)], 1)

    def initial(
        self,
        clients: Sequence[int],
        *,
        count: int,
        patch: int,
        num_classes: int,
        init: Literal["shared", "per_client"] = "shared",
        seed: int,
    ) -> Payload:
        """Prompts drawn from U(-v, v), v = sqrt(6 / (3·patch² + width)), and heads of zeros.

        clients are global numbers; the leading axis of the payload follows them. "shared" gives
        every client the same draw, "per_client" each its own.
        """
        width = self.model.width
        v = (6 / (3 * patch * patch + width)) ** 0.5
        keys = [0 if init == "shared" else c for c in clients]
        draws = [seeds.stream(seed, "prompts", 0, k).uniform(-v, v, (count, width)) for k in keys]
        return {
            "prompts": torch.from_numpy(np.stack(draws).astype(np.float32)),
            "head.weight": torch.zeros(len(keys), num_classes, width),
            "head.bias": torch.zeros(len(keys), num_classes),
        }

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
        """Gradients of every client's mean cross-entropy on its own batch; see `Learner`.

        A client's batch is cut only when it is larger than a chunk.
        """
        chunk = chunk or _chunk(self.model, inputs, payload["prompts"].shape[1])
        pad = pad or max(counts)
        names = [name for name in payload if name != COUNT]
        grads = {name: torch.zeros_like(payload[name]) for name in names}
        losses = torch.zeros(len(counts), device=inputs.device)
        done = 0
        for first, sizes in _chunks(counts, chunk):
            mine = slice(first, first + len(sizes))
            part = slice(done, done := done + sum(sizes))
            leaves = {name: payload[name][mine].detach().requires_grad_() for name in names}
            held = payload[COUNT][mine].tolist() if COUNT in payload else None
            features, pulled = self._features(inputs[part], leaves["prompts"], sizes, held)
            features = normalise(features) if self.normalise else features
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
            total = loss.sum()
            if pulled is not None:
                owners = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
                total = total - self.pull * (pulled / batch[owners.to(batch.device)]).sum()
            found = torch.autograd.grad(total, list(leaves.values()))
            for name, g in zip(leaves, found, strict=True):
                grads[name][mine] += g
            losses[mine] += loss.detach()
        return grads, losses

    @torch.no_grad()
    def evaluate(
        self, payload: Payload, inputs: Tensor, labels: Tensor, *, chunk: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Score every client on the same samples.

        Args:
            payload: C clients' trainables.
            inputs: (B, T, d) from `inputs`.
            labels: (B,) int64.
            chunk: images per pass; None: as many as suit the device.

        Returns:
            Correct predictions (C,) int64 and mean cross-entropy (C,) float32, on the CPU.
        """
        weights, biases = payload["head.weight"], payload["head.bias"]
        correct = torch.zeros(len(weights), dtype=torch.int64, device=self.device)
        loss = torch.zeros(len(weights), device=self.device)
        for part, c, features in self._walk(payload, inputs, chunk):
            y = labels[part].to(self.device)
            logits = F.linear(features, weights[c], biases[c])
            correct[c] += (logits.argmax(1) == y).sum()
            loss[c] += F.cross_entropy(logits, y, reduction="sum")
        return correct.cpu(), loss.cpu() / len(inputs)

    def _walk(
        self, payload: Payload, inputs: Tensor, chunk: int | None = None
    ) -> Iterator[tuple[slice, int, Tensor]]:
        """Yield (rows of inputs, client, that client's features of them)."""
        prompts = payload["prompts"]
        held = payload[COUNT].tolist() if COUNT in payload else [prompts.shape[1]] * len(prompts)
        chunk = chunk or _chunk(self.model, inputs, prompts.shape[1])
        for start in range(0, len(inputs), chunk):
            part = slice(start, min(start + chunk, len(inputs)))
            x = inputs[part].to(self.device)
            query = x[:, -1:] if self.selected else x[:, :0]
            x = x[:, :-1] if self.selected else x
            if x.shape[2] == self.model.width:
                x = self.model.project(x)  # once for all clients
            for c, count in enumerate(held):
                own = prompts[c : c + 1, : int(count)]
                if self.selected:
                    chosen, _ = self._select(query[:, 0, : self.model.width], own, [len(x)])
                    features = self.model.features(x, chosen)
                else:
                    features = self.model.features(x, own, [len(x)])
                yield part, c, normalise(features) if self.normalise else features

    @torch.no_grad()
    def features(
        self, payload: Payload, inputs: Tensor, client: int
    ) -> Iterator[tuple[slice, Tensor]]:
        """Yield (rows of inputs, features (b, d)) under the prompts of one client, in chunks."""
        own = {name: value[client : client + 1] for name, value in payload.items()}
        for part, _, found in self._walk(own, inputs):
            yield part, found

    def _features(
        self, inputs: Tensor, prompts: Tensor, counts: list[int], held: list[int] | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return features (B, d) and, of a pool, the sum of the selected cosines (B,)."""
        if self.selected:
            query = inputs[:, -1, : self.model.width]
            chosen, pulled = self._select(query, prompts, counts)
            return self.model.features(inputs[:, :-1], chosen), pulled
        if held is None or len(set(held)) == 1:
            own = prompts if held is None else prompts[:, : held[0]]
            return self.model.features(inputs, own, counts), None
        # Clients with equal numbers of prompts go through the backbone together.
        pieces = list(inputs.split(counts))
        found: list[Tensor] = [inputs] * len(counts)
        for count in sorted(set(held)):
            group = [c for c, n in enumerate(held) if n == count]
            sizes = [counts[c] for c in group]
            x = torch.cat([pieces[c] for c in group])
            features = self.model.features(x, prompts[group, :count], sizes).split(sizes)
            for c, part in zip(group, features, strict=True):
                found[c] = part
        return torch.cat(found), None

    def _select(
        self, query: Tensor, prompts: Tensor, counts: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """Return the selected prompts (B, selected, d) and the sum of their cosines (B,)."""
        owners = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
        owners = owners.to(prompts.device)
        keys = F.normalize(prompts, dim=-1)[owners]
        cosine = torch.einsum("bd,bnd->bn", F.normalize(query.float(), dim=-1), keys)
        best, index = cosine.topk(min(self.selected, prompts.shape[1]), dim=1)
        return prompts[owners[:, None], index], best.sum(1)


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
