"""A frozen vision transformer with learnable prompts, many clients in one batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor


class Prompted:
    """Frozen backbone with prompts between CLS and patches (first, plain version)."""

    def __init__(self, backbone, spec=None, *, precision="float32", device="cpu"):
        self.device = torch.device(device)
        self.dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[precision]
        self.stem = backbone.eval().requires_grad_(False).to(self.device)
        import copy

        self.body = copy.deepcopy(backbone).to(self.dtype)
        self.spec = spec
        self.width = backbone.embed_dim

    @torch.no_grad()
    def tokens(self, images: np.ndarray, batch: int = 256) -> Tensor:
        size = self.spec.image_size if self.spec else 32
        mean = torch.tensor(self.spec.mean if self.spec else (0.5,) * 3).view(3, 1, 1)
        std = torch.tensor(self.spec.std if self.spec else (0.5,) * 3).view(3, 1, 1)
        out = []
        for s in range(0, len(images), batch):
            x = torch.from_numpy(np.ascontiguousarray(images[s : s + batch])).permute(0, 3, 1, 2)
            x = x.float() / 255
            if x.shape[-2:] != (size, size):
                x = F.interpolate(x, (size, size), mode="bicubic", antialias=True).clamp(0, 1)
            x = ((x - mean) / std).to(self.device)
            x = self.stem._pos_embed(self.stem.patch_embed(x))
            out.append(self.stem.norm_pre(x).to(self.dtype))
        return torch.cat(out)

    def features(
        self, tokens: Tensor, prompts: Tensor | None, counts: Sequence[int] | None = None
    ) -> Tensor:
        x = tokens.to(self.dtype)
        if prompts is not None:
            p = self.body.norm_pre(prompts.to(self.dtype))
            if counts is not None:
                p = p.repeat_interleave(torch.as_tensor(counts), 0)
            x = torch.cat([x[:, :1], p, x[:, 1:]], 1)
        return self.body.norm(self.body.blocks(x)[:, 0]).float()
