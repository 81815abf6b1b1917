"""A frozen vision transformer with learnable prompts, the images of many clients in one batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import timm.layers
import torch
import torch.nn.functional as F
from timm.layers.attention import Attention
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn

from fedscale.models.frozen import CLSAttention, FrozenLinear, FrozenNorm, attention, repeat_runs

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


@dataclass(frozen=True)
class _Layer:
    """One pre-norm block; queries carry the factor 1/sqrt(e), LayerScale is in proj and fc2."""

    norm1: FrozenNorm
    qkv: FrozenLinear
    proj: FrozenLinear
    norm2: FrozenNorm
    fc1: FrozenLinear
    act: Callable[[Tensor], Tensor]
    fc2: FrozenLinear
    heads: int

    def mix(self, x: Tensor, qkv: Tensor) -> Tensor:
        """Add attention over qkv (B, N, 3·d), then the MLP, to x (B, N, d)."""
        return self.mlp(self.proj(attention(qkv, self.heads), residual=x))

    def mlp(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(self.norm2(x))), residual=x)


@dataclass(frozen=True)
class _LastLayer:
    """The last block as far as the CLS row needs it; see `CLSAttention`."""

    layer: _Layer
    attend: CLSAttention

    def __call__(self, x: Tensor) -> Tensor:
        """Map all rows x (B, N, d) to the new CLS row (B, d)."""
        cls, mixed = self.attend(x)
        return self.layer.mlp(self.layer.proj(mixed, residual=cls))


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
        self.layers = [_layer(block, **options) for block in backbone.blocks[:-1]]
        self.last = _last(backbone.blocks[-1], **options)
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

    def _features(self, tokens: Tensor, prompts: Tensor, counts: Sequence[int]) -> Tensor:
        p = prompts.to(self.dtype)
        if self.norm_pre is not None:
            p = self.norm_pre(p)
        x = _join(tokens, repeat_runs(p, counts))
        for i, layer in enumerate(self.layers):
            if i == 0:
                # Before the first attention prompts are alike for all images of a client.
                own = layer.qkv(layer.norm1(p))
                qkv = _join(layer.qkv(layer.norm1(tokens)), repeat_runs(own, counts))
            else:
                qkv = layer.qkv(layer.norm1(x))
            x = layer.mix(x, qkv)
        return self.norm(self.last(x).float())


def _join(tokens: Tensor, prompts: Tensor) -> Tensor:
    return torch.cat([tokens[:, :1], prompts, tokens[:, 1:]], 1)


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


def _layer(block: Block, *, dtype: torch.dtype, device: torch.device) -> _Layer:
    options = {"dtype": dtype, "device": device}
    a = block.attn
    scale = torch.ones(a.qkv.out_features, device=a.qkv.weight.device)
    scale[: a.attn_dim] = a.scale
    gammas = [getattr(ls, "gamma", None) for ls in (block.ls1, block.ls2)]
    return _Layer(
        norm1=_norm(block.norm1, **options),
        qkv=FrozenLinear(*_scaled(a.qkv, scale), **options),
        proj=FrozenLinear(*_scaled(a.proj, gammas[0]), **options),
        norm2=_norm(block.norm2, **options),
        fc1=FrozenLinear(block.mlp.fc1.weight, block.mlp.fc1.bias, **options),
        act=block.mlp.act,
        fc2=FrozenLinear(*_scaled(block.mlp.fc2, gammas[1]), **options),
        heads=a.num_heads,
    )


def _last(block: Block, *, dtype: torch.dtype, device: torch.device) -> _LastLayer:
    layer = _layer(block, dtype=dtype, device=device)
    return _LastLayer(layer, CLSAttention(layer.norm1, layer.qkv, layer.heads))
