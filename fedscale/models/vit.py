"""timm's vision transformers as frozen layers: reads what it understands, refuses the rest."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
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
    """A backbone cut where prompts join.

    Attributes:
        embed: normalised images (B, 3, S, S) → tokens (B, T, d), CLS first: all that prompts
            cannot reach. It runs the backbone's own modules, where these are.
        norm_pre: the norm of prompts before they join, the one that `embed` ends with; or None.
        blocks: the blocks from there on, but the last.
        last: the last block.
        norm: the norm after it, in float32.
    """

    embed: Callable[[Tensor], Tensor]
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
    return Layers(partial(embed, vit), pre, *stack(model.blocks, model.norm, dtype, device))


def embed(vit: Any, images: Tensor) -> Tensor:
    """Return the tokens that enter the blocks: CLS, registers if any, patches."""
    tokens: Tensor = vit.norm_pre(vit._pos_embed(vit.patch_embed(images)))
    return tokens


def stack(
    blocks: Any, norm: Any, dtype: torch.dtype, device: torch.device
) -> tuple[list[FrozenBlock], FrozenLastBlock, FrozenNorm]:
    """Return all blocks but the last, the last, and the norm after it in float32.

    The blocks' parts must have passed `check_block` and be named as timm names them.
    """
    first = [_block(block, dtype, device) for block in blocks[:-1]]
    last = _last(blocks[-1], dtype, device)
    return first, last, _norm(norm, torch.float32, device)


def check(vit: Any) -> None:
    """Refuse what `read` does not carry over from timm's forward pass.

    Raises:
        Unsupported: the first part that is not understood.
    """
    need(type(vit) is VisionTransformer, vit, "a forward pass of its own")
    need(vit.has_class_token, vit, "no CLS token")
    need(vit.attn_pool is None, vit, "attention pooling")
    need(isinstance(vit.fc_norm, nn.Identity), vit, "a norm after pooling")
    need(type(vit.norm) in NORMS, vit, f"final norm {kind(vit.norm)}")
    need(not vit.dynamic_img_size, vit, "dynamic image sizes")
    need(type(vit.norm_pre) in (nn.Identity, *NORMS), vit, f"first norm {kind(vit.norm_pre)}")
    need(len(vit.blocks) > 0, vit, "no blocks")
    for block in vit.blocks:
        need(type(block) is Block, vit, f"blocks {kind(block)}")
        need(type(block.attn) is Attention, vit, f"attention {kind(block.attn)}")
        check_block(vit, block)


def check_block(model: nn.Module, block: Any) -> None:
    """Refuse parts of a pre-norm block with timm's names for them, whose class is known.

    Raises:
        Unsupported: the first part that is not understood, with the class of `model`.
    """
    a, mlp = block.attn, block.mlp
    need(_absent(a, "q_norm"), model, "normalised queries and keys (qk_norm)")
    need(_absent(a, "norm"), model, "scale_attn_norm")
    need(getattr(a, "gate", None) is None, model, "gated attention")
    need(type(mlp) is Mlp and isinstance(mlp.fc1, nn.Linear), model, f"MLP {kind(mlp)}")
    need(isinstance(mlp.norm, nn.Identity), model, "scale_mlp_norm")
    need(activation(mlp.act) is not None, model, f"activation {kind(mlp.act)}")
    for norm in (block.norm1, block.norm2):
        need(type(norm) in NORMS, model, f"norm {kind(norm)}")
    for scale in (_ls(block, 1), _ls(block, 2)):
        need(type(scale) in (nn.Identity, LayerScale), model, f"scale {kind(scale)}")


def need(holds: bool, model: nn.Module, what: str) -> None:
    """Refuse a model with `what` unless `holds`.

    Raises:
        Unsupported: one line with the class of `model` and `what`.
    """
    if not holds:
        raise Unsupported(f"backbone {kind(model)} with {what} is not supported")


def kind(module: Any) -> str:
    """Name the class of a module."""
    return type(module).__name__


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
    attn = block.attn
    return FrozenBlock(
        norm=_norm(block.norm1, dtype, device),
        qkv=FrozenLinear(*_scaled(attn.qkv, _query_scale(attn)), dtype=dtype, device=device),
        proj=FrozenLinear(*_scaled(attn.proj, _gamma(_ls(block, 1))), dtype=dtype, device=device),
        mlp=_mlp(block, dtype, device),
        heads=attn.num_heads,
    )


def _last(block: Any, dtype: torch.dtype, device: torch.device) -> FrozenLastBlock:
    attn, H = block.attn, block.attn.num_heads
    w, b = _scaled(attn.qkv, _query_scale(attn))
    Q, K, V = (part.unflatten(0, (H, -1)) for part in w.double().chunk(3))  # (H, e, d)
    w, bias = _scaled(attn.proj, _gamma(_ls(block, 1)))
    P = w.double().unflatten(1, (H, -1))  # (d, H, e)
    probe, gather = torch.einsum("hei,hej->hij", K, Q), torch.einsum("dhe,hei->dhi", P, V)
    probe_bias, gather_bias = None, None if bias is None else bias.double()
    if b is not None:
        q, _, v = b.double().view(3, H, -1)
        probe_bias = torch.einsum("hei,he->hi", K, q).flatten()
        moved = torch.einsum("dhe,he->d", P, v)
        gather_bias = moved if gather_bias is None else gather_bias + moved
    return FrozenLastBlock(
        norm=_norm(block.norm1, dtype, device),
        probe=FrozenLinear(probe.flatten(0, 1), probe_bias, dtype=dtype, device=device),
        gather=FrozenLinear(gather.flatten(1), gather_bias, dtype=dtype, device=device),
        mlp=_mlp(block, dtype, device),
        heads=H,
    )


def _mlp(block: Any, dtype: torch.dtype, device: torch.device) -> FrozenMLP:
    act = activation(block.mlp.act)
    assert act is not None, "checked before"
    fc2 = _scaled(block.mlp.fc2, _gamma(_ls(block, 2)))
    return FrozenMLP(
        norm=_norm(block.norm2, dtype, device),
        fc1=FrozenLinear(*_scaled(block.mlp.fc1, None), dtype=dtype, device=device),
        activation=act,
        fc2=FrozenLinear(*fc2, dtype=dtype, device=device),
    )


def _absent(module: nn.Module, name: str) -> bool:
    return isinstance(getattr(module, name, nn.Identity()), nn.Identity)


def _ls(block: nn.Module, number: int) -> Any:
    """Return the first or second LayerScale; blocks of other transformers have none."""
    return getattr(block, f"ls{number}", nn.Identity())


def _gamma(scale: nn.Module) -> Tensor | None:
    return scale.gamma if isinstance(scale, LayerScale) else None
