"""A frozen vision transformer with learnable prompts, the images of many clients in one batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import timm.layers
import torch
import torch.nn.functional as F
from timm.layers.attention import Attention
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn

from fedscale.models.frozen import (
    FrozenBlock,
    FrozenLastBlock,
    FrozenLinear,
    FrozenMLP,
    FrozenNorm,
    Tape,
)

Precision = Literal["float32", "bfloat16"]
DTYPES: dict[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Preprocessing(Protocol):
    """What `tokens` reads of a BackboneSpec."""

    @property
    def image_size(self) -> int: ...
    @property
    def mean(self) -> Sequence[float]: ...
    @property
    def std(self) -> Sequence[float]: ...


class Unsupported(ValueError):
    """An architecture whose forward pass this module does not reproduce; one line."""


class Prompted:
    """Frozen backbone; prompts join after the position embedding, between CLS and patches.

    Weights are cast to the compute type once; inputs and outputs of `features` that carry
    gradients stay float32.

    Attributes:
        width: token width d.
        dtype: the compute type; `tokens` returns it, so that caches are as small as may be.

    Args:
        backbone: a timm VisionTransformer with pre-norm blocks and a CLS token.
        spec: image size and normalisation (a `BackboneSpec`).
        precision: "float32" or "bfloat16".
        device: where weights and computations live.

    Raises:
        Unsupported: the architecture has a part whose effect is not reproduced here.
        ValueError: an unknown precision.
    """

    def __init__(
        self,
        backbone: VisionTransformer,
        spec: Preprocessing,
        *,
        precision: Precision | str = "float32",
        device: str | torch.device = "cpu",
    ) -> None:
        if precision not in DTYPES:
            raise ValueError(f"precision={precision!r}: allowed are {', '.join(DTYPES)}")
        _check(backbone)
        self.device = torch.device(device)
        self.dtype = DTYPES[precision]
        self.precision = precision
        self.width: int = backbone.embed_dim
        self.spec = spec
        self.stem = backbone.eval().requires_grad_(False).to(self.device)
        options = {"dtype": self.dtype, "device": self.device}
        self.norm_pre = _norm(backbone.norm_pre, **options)
        self.blocks = [_block(block, **options) for block in backbone.blocks[:-1]]
        self.last = FrozenLastBlock(_block(backbone.blocks[-1], **options))
        self.norm = _norm(backbone.norm, dtype=torch.float32, device=self.device)

    @torch.no_grad()
    def tokens(self, images: np.ndarray | Tensor, batch: int = 256) -> Tensor:
        """Return all that prompts cannot reach, (B, T, d) in the compute type.

        images is uint8 (B, H, W, 3) of any size; resized (bicubic, antialiased) and normalised
        as the backbone was trained. The T tokens are CLS, registers if any, and patches, after
        the position embedding and the norm before the first block (CLIP).
        """
        pixels = torch.as_tensor(images)
        size = self.spec.image_size
        mean, std = (torch.tensor(v).view(3, 1, 1) for v in (self.spec.mean, self.spec.std))
        out = []
        for part in pixels.split(batch):
            x = part.permute(0, 3, 1, 2).float() / 255
            if x.shape[-2:] != (size, size):
                x = F.interpolate(x, (size, size), mode="bicubic", antialias=True).clamp(0, 1)
            x = ((x - mean) / std).to(self.device)
            x = self.stem.norm_pre(self.stem._pos_embed(self.stem.patch_embed(x)))
            out.append(x.to(self.dtype))
        return torch.cat(out)

    def features(
        self, tokens: Tensor, prompts: Tensor | None = None, counts: Sequence[int] | None = None
    ) -> Tensor:
        """Return CLS after the final norm, (B, d) float32.

        Args:
            tokens: (B, T, d) from `tokens`.
            prompts: (C, n, d) float32; the first counts[0] images get prompts[0], the next
                counts[1] get prompts[1], and so on. None: no prompts.
            counts: C numbers that sum to B; None: one set of prompts per image, C = B.

        Raises:
            ValueError: shapes that do not fit.
        """
        if prompts is None:
            prompts = tokens.new_empty(len(tokens), 0, self.width)
        counts = [1] * len(tokens) if counts is None else list(counts)
        if len(counts) != len(prompts) or sum(counts) != len(tokens):
            raise ValueError(
                f"counts of {len(counts)} runs and {sum(counts)} images do not fit prompts "
                f"{tuple(prompts.shape)} and tokens {tuple(tokens.shape)}"
            )
        return self._features(tokens, prompts, counts)

    def _features(self, tokens: Tensor, prompts: Tensor, counts: list[int]) -> Tensor:
        if not (torch.is_grad_enabled() and prompts.requires_grad):
            return self.norm(self._forward(tokens, prompts, counts)[0].float())
        rows: Tensor = _Backbone.apply(tokens, prompts, counts, self)
        return self.norm(rows)

    def _forward(self, tokens: Tensor, prompts: Tensor, counts: list[int]) -> tuple[Tensor, Tape]:
        p = prompts.to(self.dtype)
        pre: Tape = ()
        if self.norm_pre is not None:
            p, pre = self.norm_pre.forward(p)
        B, d = len(tokens), self.width
        x = _join(tokens[..., :d], p, counts)
        tapes = []
        for i, block in enumerate(self.blocks):
            if i == 0:
                # Before the first attention a client's prompts are alike for all its images.
                own, norm = block.norm.forward(p)
                own = block.qkv.forward(own.flatten(0, 1)).view(*p.shape[:2], -1)
                if tokens.shape[2] == d:
                    tokens = self.project(tokens)
                x, mix = block.mix(x, _join(tokens[..., d:], own, counts), B)
                tape = norm, mix
            else:
                x, tape = block.forward(x, B)
            tapes.append(tape)
        x, tape = self.last.forward(x, B)
        return x, (*tapes, tape, pre)

    def project(self, tokens: Tensor) -> Tensor:
        block = self.blocks[0]
        qkv = block.qkv.forward(block.norm(tokens).flatten(0, 1))
        return torch.cat([tokens, qkv.view(*tokens.shape[:2], -1)], 2)

    def _backward(self, tape: Tape, g: Tensor, counts: list[int], n: int) -> Tensor:
        *tapes, last, pre = tape
        B = len(g)
        g = self.last.backward(last, g)
        for block, tape in zip(self.blocks[:0:-1], tapes[:0:-1]):
            g = block.backward(tape, g)
        if self.blocks:
            block = self.blocks[0]
            norm, mix = tapes[0]
            g, gqkv = block.mix_backward(mix, g)
            own = _sum_runs(gqkv.view(B, -1, gqkv.shape[1])[:, 1 : n + 1], counts)
            through = block.norm.backward(norm, block.qkv.backward(own.flatten(0, 1)).view(len(counts), n, -1))
        gp = _sum_runs(g.view(B, -1, g.shape[1])[:, 1 : n + 1], counts)
        if self.blocks:
            gp = gp + through
        if self.norm_pre is not None:
            gp = self.norm_pre.backward(pre, gp)
        return gp.float()


class _Backbone(torch.autograd.Function):
    """Prompts (C, n, d) float32 → CLS rows (B, d) float32 before the final norm."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, prompts: Tensor, counts: list[int], model: Prompted) -> Tensor:
        x, ctx.tape = model._forward(tokens, prompts, counts)
        ctx.call = counts, prompts.shape[1], model
        return x.float()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[None, Tensor, None, None]:
        counts, n, model = ctx.call
        return None, model._backward(ctx.tape, g.to(model.dtype), counts, n), None, None


def _join(tokens: Tensor, prompts: Tensor, counts: list[int]) -> Tensor:
    """Rows of CLS, the image's prompts, patches: (B, T, w) and (C, n, w) → (B·(T+n), w)."""
    B, T, w = tokens.shape
    n = prompts.shape[1]
    x = tokens.new_empty(B, T + n, w)
    x[:, :1] = tokens[:, :1]
    x[:, n + 1 :] = tokens[:, 1:]
    for part, own in zip(x[:, 1 : n + 1].split(counts), prompts):
        part.copy_(own)
    return x.flatten(0, 1)


def _sum_runs(g: Tensor, counts: list[int]) -> Tensor:
    """Add the gradients (B, n, w) of each client's images, in float32: (C, n, w)."""
    return torch.stack([part.sum(0, dtype=torch.float32) for part in g.split(counts)]).to(g.dtype)


_GELUS = (nn.GELU, timm.layers.GELU)


def _check(vit: nn.Module) -> None:
    """Refuse what `Prompted` would compute differently from timm's forward pass."""

    def need(holds: bool, what: str) -> None:
        if not holds:
            raise Unsupported(f"{type(vit).__name__} with {what} is not supported")

    need(type(vit) is VisionTransformer, "a forward pass of its own")
    need(vit.has_class_token, "no CLS token")
    need(isinstance(vit.norm, nn.LayerNorm), f"final norm {type(vit.norm).__name__}")
    need(isinstance(vit.fc_norm, nn.Identity), "a norm after pooling")
    need(vit.attn_pool is None, "attention pooling")
    need(not vit.dynamic_img_size, "dynamic image sizes")
    need(isinstance(vit.norm_pre, nn.Identity | nn.LayerNorm), type(vit.norm_pre).__name__)
    need(len(vit.blocks) > 0, "no blocks")
    for block in vit.blocks:
        need(type(block) is Block, f"blocks of type {type(block).__name__}")
        need(type(block.attn) is Attention, f"attention {type(block.attn).__name__}")
        a, mlp = block.attn, block.mlp
        norms = (block.norm1, block.norm2)
        need(all(isinstance(n, nn.LayerNorm) for n in norms), f"norm {type(norms[0]).__name__}")
        need(isinstance(a.q_norm, nn.Identity), "normalised queries and keys (qk_norm)")
        need(isinstance(getattr(a, "norm", nn.Identity()), nn.Identity), "scale_attn_norm")
        need(getattr(a, "gate", None) is None, "gated attention")
        need(type(mlp) is timm.layers.Mlp, f"MLP {type(mlp).__name__}")
        need(isinstance(mlp.norm, nn.Identity), "scale_mlp_norm")
        need(isinstance(mlp.fc1, nn.Linear), "a convolutional MLP")
        scales = (block.ls1, block.ls2)
        known = nn.Identity | timm.layers.LayerScale
        need(all(isinstance(s, known) for s in scales), f"{type(scales[0]).__name__}")


def _norm(norm: nn.Module, *, dtype: torch.dtype, device: torch.device) -> FrozenNorm | None:
    if not isinstance(norm, nn.LayerNorm):
        return None
    weight, bias = (
        None if p is None else p.detach().to(device, dtype) for p in (norm.weight, norm.bias)
    )
    return FrozenNorm(weight, bias, norm.eps, norm.normalized_shape[0])


def _scaled(linear: nn.Linear, gamma: Tensor | None) -> tuple[Tensor, Tensor | None]:
    w, b = linear.weight.detach(), None if linear.bias is None else linear.bias.detach()
    if gamma is None:
        return w, b
    return w * gamma[:, None], None if b is None else b * gamma


def _block(block: Block, *, dtype: torch.dtype, device: torch.device) -> FrozenBlock:
    options = {"dtype": dtype, "device": device}
    a, mlp = block.attn, block.mlp
    scale = torch.ones(a.qkv.out_features, device=a.qkv.weight.device)
    scale[: a.attn_dim] = a.scale
    gammas = [getattr(ls, "gamma", None) for ls in (block.ls1, block.ls2)]
    return FrozenBlock(
        norm=_norm(block.norm1, **options),
        qkv=FrozenLinear(*_scaled(a.qkv, scale), **options),
        proj=FrozenLinear(*_scaled(a.proj, gammas[0]), **options),
        mlp=FrozenMLP(
            norm=_norm(block.norm2, **options),
            fc1=FrozenLinear(mlp.fc1.weight, mlp.fc1.bias, **options),
            activation="gelu",
            fc2=FrozenLinear(*_scaled(mlp.fc2, gammas[1]), **options),
        ),
        heads=a.num_heads,
    )
