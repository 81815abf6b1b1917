"""timm's vision transformers as frozen layers: reads what it understands, refuses the rest."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from timm.layers import GELU, GELUTanh, LayerNorm, LayerNormFp32, LayerScale, Mlp, QuickGELU
from timm.layers.attention import Attention
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn

from fedscale.models.frozen import (
    Activation,
    FrozenBlock,
    FrozenLastBlock,
    FrozenLinear,
    FrozenMLP,
    FrozenNorm,
)

NORMS = (nn.LayerNorm, LayerNorm, LayerNormFp32)


class Unsupported(ValueError):
    """An architecture whose forward pass is not reproduced here; one line."""


class Layers(NamedTuple):
    """The norm before the blocks, all blocks but the last, the last, the norm after it."""

    norm_pre: FrozenNorm | None
    blocks: list[FrozenBlock]
    last: FrozenLastBlock
    norm: FrozenNorm


def read(vit: VisionTransformer, *, dtype: torch.dtype, device: torch.device) -> Layers:
    """Return the layers after the position embedding in the given type, the last norm in float32.

    1/sqrt(e) is folded into the queries' weights and LayerScale into the layer before it.

    Raises:
        Unsupported: a part whose effect would be lost, named.
    """
    check(vit)
    model: Any = vit
    pre = None if isinstance(model.norm_pre, nn.Identity) else _norm(model.norm_pre, dtype, device)
    *first, last = (_block(block, dtype, device) for block in model.blocks)
    attn = model.blocks[-1].attn
    weight, bias = _scaled(attn.qkv, _query_scale(attn))
    bias = None if bias is None else bias.to(device, dtype)
    end = FrozenLastBlock(last, weight.to(device, dtype), bias)
    return Layers(pre, first, end, _norm(model.norm, torch.float32, device))


def check(vit: Any) -> None:
    """Refuse what `read` does not carry over from timm's forward pass.

    Raises:
        Unsupported: the first part that is not understood.
    """

    def need(holds: bool, what: str) -> None:
        if not holds:
            raise Unsupported(f"backbone {kind(vit)} with {what} is not supported")

    def kind(module: Any) -> str:
        return type(module).__name__

    need(type(vit) is VisionTransformer, "a forward pass of its own")
    need(vit.has_class_token, "no CLS token")
    need(vit.attn_pool is None, "attention pooling")
    need(isinstance(vit.fc_norm, nn.Identity), "a norm after pooling")
    need(type(vit.norm) in NORMS, f"final norm {kind(vit.norm)}")
    need(not vit.dynamic_img_size, "dynamic image sizes")
    need(type(vit.norm_pre) in (nn.Identity, *NORMS), f"first norm {kind(vit.norm_pre)}")
    need(len(vit.blocks) > 0, "no blocks")
    for block in vit.blocks:
        need(type(block) is Block, f"blocks {kind(block)}")
        a, mlp = block.attn, block.mlp
        need(type(a) is Attention, f"attention {kind(a)}")
        need(isinstance(a.q_norm, nn.Identity), "normalised queries and keys (qk_norm)")
        need(isinstance(getattr(a, "norm", nn.Identity()), nn.Identity), "scale_attn_norm")
        need(getattr(a, "gate", None) is None, "gated attention")
        need(type(mlp) is Mlp and isinstance(mlp.fc1, nn.Linear), f"MLP {kind(mlp)}")
        need(isinstance(mlp.norm, nn.Identity), "scale_mlp_norm")
        need(activation(mlp.act) is not None, f"activation {kind(mlp.act)}")
        for norm in (block.norm1, block.norm2):
            need(type(norm) in NORMS, f"norm {kind(norm)}")
        for scale in (block.ls1, block.ls2):
            need(type(scale) in (nn.Identity, LayerScale), f"scale {kind(scale)}")


def activation(act: nn.Module) -> Activation | None:
    """Name an activation layer; None if it is not one of those with a written gradient."""
    if isinstance(act, nn.GELU):
        return "gelu" if act.approximate == "none" else "gelu_tanh"
    known: dict[type, Activation] = {GELU: "gelu", GELUTanh: "gelu_tanh", QuickGELU: "quick_gelu"}
    return known.get(type(act))


def _norm(norm: nn.LayerNorm, dtype: torch.dtype, device: torch.device) -> FrozenNorm:
    weight, bias = (
        None if p is None else p.detach().to(device, dtype) for p in (norm.weight, norm.bias)
    )
    return FrozenNorm(weight, bias, norm.eps, norm.normalized_shape[0])


def _scaled(linear: nn.Linear, scale: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of a linear layer whose outputs are then multiplied by scale."""
    w, b = linear.weight.detach(), None if linear.bias is None else linear.bias.detach()
    if scale is None:
        return w, b
    return w * scale[:, None], None if b is None else b * scale


def _query_scale(attn: Any) -> Tensor:
    scale = torch.ones_like(attn.qkv.weight[:, 0])
    scale[: len(scale) // 3] = attn.scale
    return scale


def _block(block: Any, dtype: torch.dtype, device: torch.device) -> FrozenBlock:
    def linear(layer: nn.Linear, scale: Tensor | None = None) -> FrozenLinear:
        return FrozenLinear(*_scaled(layer, scale), dtype=dtype, device=device)

    act = activation(block.mlp.act)
    assert act is not None, "checked before"
    return FrozenBlock(
        norm=_norm(block.norm1, dtype, device),
        qkv=linear(block.attn.qkv, _query_scale(block.attn)),
        proj=linear(block.attn.proj, getattr(block.ls1, "gamma", None)),
        mlp=FrozenMLP(
            norm=_norm(block.norm2, dtype, device),
            fc1=linear(block.mlp.fc1),
            activation=act,
            fc2=linear(block.mlp.fc2, getattr(block.ls2, "gamma", None)),
        ),
        heads=block.attn.num_heads,
    )
