"""ConViT as frozen layers: gated positional self-attention first, then CLS and prompts join.

The first `local_up_to_layer` blocks attend among patches by a learned mixture of content and
relative position (d'Ascoli et al., arXiv 2103.10697, eq. 7–9). CLS enters after them, so prompts,
which stand between CLS and the patches, enter there too: the positional attention is defined on
the grid of patches alone, and nothing before that point depends on prompts.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from timm.models.convit import MHSA, Block, ConVit
from torch import Tensor

from fedscale.models.vit import NORMS, Layers, check_block, kind, need, stack


def read(convit: ConVit, *, dtype: torch.dtype, device: torch.device) -> Layers:
    """Return the layers from where CLS joins, in the given type, the last norm in float32.

    Raises:
        Unsupported: a part whose effect would be lost, named.
    """
    check(convit)
    model: Any = convit
    blocks = model.blocks[model.local_up_to_layer :]
    return Layers(partial(embed, convit), None, *stack(blocks, model.norm, dtype, device))


def embed(convit: Any, images: Tensor) -> Tensor:
    """Return CLS and the patches after the positional blocks: (B, 3, S, S) → (B, T + 1, d).

    CLS is the learned token itself: it has no position and has seen no image yet.
    """
    x = convit.patch_embed(images)
    if convit.use_pos_embed:
        x = x + convit.pos_embed
    # Image by image: a product's rounding depends on its rows, and the attention over all pairs of
    # patches takes several hundred megabytes at a hundred images.
    rows = []
    for one in x.split(1):
        for block in convit.blocks[: convit.local_up_to_layer]:
            one = block(one)
        rows.append(torch.cat([convit.cls_token, one], 1))
    return torch.cat(rows)


def check(convit: Any) -> None:
    """Refuse what `read` does not carry over from timm's forward pass.

    Raises:
        Unsupported: the first part that is not understood.
    """
    need(type(convit) is ConVit, convit, "a forward pass of its own")
    need(convit.global_pool != "avg", convit, "average pooling")
    joined = getattr(convit, "cls_token", None) is not None
    need(joined and convit.local_up_to_layer < len(convit.blocks), convit, "no CLS token")
    need(type(convit.norm) in NORMS, convit, f"final norm {kind(convit.norm)}")
    for block in convit.blocks[convit.local_up_to_layer :]:
        need(type(block) is Block, convit, f"blocks {kind(block)}")
        need(type(block.attn) is MHSA, convit, f"attention {kind(block.attn)}")
        check_block(convit, block)
