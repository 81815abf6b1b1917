"""A frozen vision transformer with learnable prompts, the images of many clients in one batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from timm.models.convit import ConVit
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

from fedscale.models import convit, vit
from fedscale.models.frozen import Tape

Precision = Literal["float32", "bfloat16"]
DTYPES: dict[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def native_bfloat16() -> bool:
    """Return whether this machine's processor computes in bfloat16 itself."""
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


class Preprocessing(Protocol):
    """What `tokens` reads of a BackboneSpec."""

    @property
    def image_size(self) -> int: ...  # noqa: D102
    @property
    def mean(self) -> Sequence[float]: ...  # noqa: D102
    @property
    def std(self) -> Sequence[float]: ...  # noqa: D102


class Prompted:
    """Frozen backbone; prompts join after the position embedding, between CLS and patches.

    In a CLIP they join before the norm that precedes the blocks, in a ConViT with CLS, after the
    blocks of positional attention. Prompts have no positions of their own.

    Weights are cast to the compute type once. Prompts, features and their gradients are float32.

    Attributes:
        width: token width d.
        dtype: the compute type, which is also the type of cached tokens.

    Args:
        backbone: a timm VisionTransformer (also DeiT and CLIP) with pre-norm blocks and a CLS
            token, or a ConVit; put in eval mode.
        spec: image size and normalisation (a `BackboneSpec`).
        precision: "float32" or "bfloat16".
        device: where weights and computations live.

    Raises:
        Unsupported: the architecture has a part whose effect is not reproduced here.
        ValueError: an unknown precision.
    """

    def __init__(
        self,
        backbone: VisionTransformer | ConVit,
        spec: Preprocessing,
        *,
        precision: Precision | str = "float32",
        device: str | torch.device = "cpu",
    ) -> None:
        if precision not in DTYPES:
            raise ValueError(f"precision={precision!r} is unknown; allowed: {', '.join(DTYPES)}")
        self.precision = precision
        self.device = torch.device(device)
        self.dtype = DTYPES[precision]
        if isinstance(backbone, ConVit):
            layers = convit.read(backbone, dtype=self.dtype, device=self.device)
        else:
            layers = vit.read(backbone, dtype=self.dtype, device=self.device)
        self.embed, self.norm_pre, self.blocks, self.last, self.norm = layers
        self.width = self.norm.width
        self.spec = spec
        backbone.eval().requires_grad_(False).to(self.device)

    @torch.no_grad()
    def tokens(
        self, images: np.ndarray | Tensor, *, projected: bool = False, batch: int = 256
    ) -> Tensor:
        """Return all that prompts cannot reach, (B, T, d) in the compute type.

        images is uint8 (B, H, W, 3) of any size; resized (bicubic, antialiased) and normalised
        as the backbone was trained. The T tokens are CLS, registers if any, and patches, after
        the position embedding and, where there is one, the norm before the first block; in a
        ConViT, after the blocks of positional attention.
        projected adds the first block's queries, keys and values, see `project`.

        Raises:
            ValueError: no images.
        """
        if not len(images):
            raise ValueError("images: at least one is needed")
        size = self.spec.image_size
        mean, std = (torch.tensor(v).view(3, 1, 1) for v in (self.spec.mean, self.spec.std))
        out = []
        for start in range(0, len(images), batch):
            part = images[start : start + batch]
            # A copy: torch warns of arrays that are read-only, as those of the object store are.
            if isinstance(part, np.ndarray):
                part = torch.from_numpy(part.copy())
            # A convolution may round one image alone differently from one among others.
            x = part if len(part) > 1 else part.repeat(2, 1, 1, 1)
            x = x.permute(0, 3, 1, 2).float() / 255
            if x.shape[-2:] != (size, size):
                x = F.interpolate(x, (size, size), mode="bicubic", antialias=True).clamp(0, 1)
            x = ((x - mean) / std).to(self.device)
            x = self.embed(x).to(self.dtype)[: len(part)]
            out.append(self.project(x) if projected else x)
        return torch.cat(out)

    @torch.no_grad()
    def project(self, tokens: Tensor) -> Tensor:
        """Append the first block's queries, keys and values: (B, T, d) → (B, T, 4·d).

        Prompts cannot reach these either. Kept with the tokens they save 3 % of a step of a
        shallow backbone at four times the memory; evaluation shares them over the clients.
        """
        if not self.blocks:
            return tokens
        y = self.blocks[0].norm.forward(tokens)[0]
        qkv = self.blocks[0].qkv.forward(y.flatten(0, 1))
        return torch.cat([tokens, qkv.view(*tokens.shape[:2], -1)], 2)

    def features(
        self, tokens: Tensor, prompts: Tensor | None = None, counts: Sequence[int] | None = None
    ) -> Tensor:
        """Return CLS after the final norm, (B, d) float32, differentiable in prompts.

        Args:
            tokens: (B, T, d) from `tokens`, or (B, T, 4·d) from `project`.
            prompts: (C, n, d) float32; the first counts[0] images get prompts[0], the next
                counts[1] get prompts[1], and so on. None: no prompts.
            counts: C positive numbers that sum to B; None: a set of prompts per image, C = B.

        Raises:
            ValueError: counts, prompts and tokens that do not fit.
        """
        runs = [1] * len(tokens) if counts is None else [int(n) for n in counts]
        if prompts is None:
            prompts = tokens.new_empty(len(runs), 0, self.width, dtype=torch.float32)
        if len(runs) != len(prompts) or sum(runs) != len(tokens) or min(runs, default=1) < 1:
            raise ValueError(
                f"counts {runs} must be positive, one per set of prompts {tuple(prompts.shape)}, "
                f"and sum to the images of tokens {tuple(tokens.shape)}"
            )
        d = self.width
        if prompts.ndim != 3 or prompts.shape[2] != d or tokens.shape[2:] not in ((d,), (4 * d,)):
            raise ValueError(
                f"prompts {tuple(prompts.shape)} and tokens {tuple(tokens.shape)} must be "
                f"(C, n, {d}) and (B, T, {d} or {4 * d})"
            )
        rows: Tensor = _Backbone.apply(tokens, prompts, runs, self)
        return F.layer_norm(rows, (self.width,), self.norm.weight, self.norm.bias, self.norm.eps)

    def _forward(
        self, tokens: Tensor, prompts: Tensor, counts: list[int], keep: bool
    ) -> tuple[Tensor, Tape]:
        B, d = len(tokens), self.width
        if tokens.shape[2] == d:
            tokens = self.project(tokens)
        own = prompts.to(self.dtype)
        tapes: list[Tape] = []
        if self.norm_pre is not None:
            own, tape = self.norm_pre.forward(own)
            tapes.append(tape)
        x = _join(tokens[..., :d], own, counts)
        for block in self.blocks:
            if block is self.blocks[0]:
                # Before the first attention a client's prompts are alike for all its images.
                y, norm = block.norm.forward(own)
                qkv = block.qkv.forward(y.flatten(0, 1)).view(*own.shape[:2], tokens.shape[2] - d)
                x, mix = block.mix(x, _join(tokens[..., d:], qkv, counts), B)
                tape = norm, mix
            else:
                x, tape = block.forward(x, B)
            if keep:
                tapes.append(tape)
        x, tape = self.last.forward(x, B)
        return x, (*tapes, tape)

    def _backward(self, tapes: Tape, g: Tensor, counts: list[int], n: int) -> Tensor:
        if n == 0:
            return g.new_empty(len(counts), 0, self.width, dtype=torch.float32)
        rest = list(tapes)
        B, C, own = len(g), len(counts), slice(1, n + 1)
        g = self.last.backward(rest.pop(), g)
        for block in self.blocks[:0:-1]:
            g = block.backward(rest.pop(), g)
        through: Tensor | int = 0
        if self.blocks:
            block = self.blocks[0]
            norm, mix = rest.pop()
            g, gqkv = block.mix_backward(mix, g, own)
            gqkv = _sum_runs(gqkv.view(B, n, -1), counts)
            gy = block.qkv.backward(gqkv.flatten(0, 1))
            through = block.norm.backward(norm, gy.view(C, n, -1))
        g = _sum_runs(g.view(B, -1, self.width)[:, own], counts) + through
        if self.norm_pre is not None:
            g = self.norm_pre.backward(rest.pop(), g)
        return g.float()


class _Backbone(torch.autograd.Function):
    """Prompts (C, n, d) float32 → CLS rows (B, d) float32 before the final norm."""

    @staticmethod
    def forward(
        ctx: Any, tokens: Tensor, prompts: Tensor, counts: list[int], model: Prompted
    ) -> Tensor:
        x, ctx.tapes = model._forward(tokens, prompts, counts, ctx.needs_input_grad[1])
        ctx.call = counts, prompts.shape[1], model
        return x.float()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor, None, None]:
        counts, n, model = ctx.call
        return None, model._backward(ctx.tapes, grads[0].to(model.dtype), counts, n), None, None


def _join(tokens: Tensor, prompts: Tensor, counts: list[int]) -> Tensor:
    """Rows CLS, prompts, patches: tokens (B, T, w) and prompts (C, n, w) → (B·(T + n), w)."""
    B, T, w = tokens.shape
    n = prompts.shape[1]
    x = tokens.new_empty(B, T + n, w)
    x[:, :1] = tokens[:, :1]
    x[:, n + 1 :] = tokens[:, 1:]
    for part, own in zip(x[:, 1 : n + 1].split(counts), prompts, strict=True):
        part.copy_(own)
    return x.view(-1, w)


def _sum_runs(g: Tensor, counts: list[int]) -> Tensor:
    """Add the gradients (B, n, w) of each client's images, in float32: (C, n, w)."""
    return torch.stack([part.sum(0, dtype=torch.float32) for part in g.split(counts)]).to(g.dtype)
