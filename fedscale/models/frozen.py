"""Layers whose weights never change: prepared once, differentiated for their input only.

The functions here are what a step spends its time in, so they are written for speed on CPUs:
linear layers run in oneDNN (whose float32 products are faster than MKL's on many processors),
attention is a plain product–softmax–product (the fused kernel is slow at a few dozen tokens).
On other devices, and where oneDNN is missing, PyTorch's own layers take their place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class FrozenLinear:
    """y = x Wᵀ + b (+ residual) for constant W (out, in) and b (out,) or None.

    Weights are cast to `dtype` once and, where oneDNN takes them, laid out for it once in each
    direction. The gradient with respect to x is one more product; W and b get none.
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.weight = weight.detach().to(device, dtype).contiguous()
        self.bias = None if bias is None else bias.detach().to(device, dtype)
        self.packed = _pack(self.weight, self.bias)

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Map x (..., in) to (..., out); residual has the shape of the result."""
        if self.packed is not None:
            result: Tensor = _OneDNNLinear.apply(x, residual, self)
            return result
        y = F.linear(x, self.weight, self.bias)
        return y if residual is None else y + residual


class _OneDNNLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor | None, layer: FrozenLinear) -> Tensor:
        ctx.layer = layer
        return _product(x, residual, layer.packed[0], layer.bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        needs_x, needs_residual, _ = ctx.needs_input_grad
        grad_x = _product(grad, None, ctx.layer.packed[1], None) if needs_x else None
        return grad_x, grad if needs_residual else None, None


def _product(x: Tensor, residual: Tensor | None, packed: Tensor, bias: Tensor | None) -> Tensor:
    product = torch.ops.mkldnn._linear_pointwise
    if residual is None:
        return product(x, packed, bias, "none", [], "")
    return product.binary(x, residual, packed, bias, "add")


def _pack(weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor] | None:
    """Return the weight laid out for x → y and for the gradient back, None without oneDNN."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return None
    try:
        pack = torch.ops.mkldnn._reorder_linear_weight
        pair = pack(weight, None), pack(weight.t().contiguous(), None)
        # These operators are not public: trust them only as far as a small trial goes.
        x = torch.eye(2, weight.shape[1], dtype=weight.dtype)
        expected = F.linear(x, weight, bias)
        found = _product(x, expected, pair[0], bias)
        back = _product(expected, None, pair[1], None)
    except (AttributeError, RuntimeError, TypeError):
        return None
    close = torch.allclose(found.float(), 2 * expected.float(), rtol=2e-2, atol=1e-2)
    close = close and torch.allclose(
        back.float(), (expected @ weight).float(), rtol=2e-2, atol=1e-2
    )
    return pair if close else None


def attention(qkv: Tensor, heads: int) -> Tensor:
    """Self-attention of qkv (B, N, 3·d), queries already scaled: → (B, N, d)."""
    B, N, width = qkv.shape
    shape = (B, N, 3, heads, width // 3 // heads)
    if qkv.device.type != "cpu":
        q, k, v = qkv.view(shape).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, scale=1.0).transpose(1, 2).flatten(2)
    result: Tensor = _Attention.apply(qkv.view(shape))
    return result


class _Attention(torch.autograd.Function):
    """(B, N, 3, H, e) → (B, N, H·e); scores are normalised in float32."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor) -> Tensor:
        B, N, _, H, e = qkv.shape
        q, k, v = qkv.permute(2, 0, 3, 1, 4).reshape(3, B * H, N, e)
        p = torch.softmax(torch.bmm(q, k.transpose(1, 2)).float(), -1)
        out = torch.bmm(p.to(v.dtype), v)
        ctx.save_for_backward(q, k, v, p)
        return out.view(B, H, N, e).transpose(1, 2).reshape(B, N, H * e)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        q, k, v, p = ctx.saved_tensors
        B, N, _ = grad.shape
        H, e = q.shape[0] // B, q.shape[2]
        g = grad.view(B, N, H, e).transpose(1, 2).reshape(B * H, N, e)
        gp = torch.bmm(g, v.transpose(1, 2)).float()
        gs = torch._softmax_backward_data(gp, p, -1, torch.float32).to(q.dtype)
        gqkv = q.new_empty(3, B * H, N, e)
        torch.bmm(gs, k, out=gqkv[0])
        torch.bmm(gs.transpose(1, 2), q, out=gqkv[1])
        torch.bmm(p.to(g.dtype).transpose(1, 2), g, out=gqkv[2])
        return gqkv.view(3, B, H, N, e).permute(1, 3, 0, 2, 4).contiguous()


@dataclass(frozen=True)
class FrozenNorm:
    """Layer normalisation over the last axis with constant scale and shift (None: absent)."""

    weight: Tensor | None
    bias: Tensor | None
    eps: float
    width: int

    def __call__(self, x: Tensor) -> Tensor:
        """Normalise x (..., d)."""
        return F.layer_norm(x, (self.width,), self.weight, self.bias, self.eps)


class CLSAttention:
    """What a pre-norm attention layer hands to the CLS row, without keys and values.

    With y the normalised rows and q_h the query of head h, the score of row j is
    q_h·(K_h y_j) = (K_hᵀ q_h)·y_j up to a constant that softmax removes (the key's bias), and
    sum_j p_j (V_h y_j + b) = V_h (sum_j p_j y_j) + b. So K and V act on one row per head.
    """

    def __init__(self, norm: FrozenNorm, qkv: FrozenLinear, heads: int) -> None:
        self.norm = norm
        q, k, v = qkv.weight.chunk(3)
        biases = (None, None, None) if qkv.bias is None else qkv.bias.chunk(3)
        self.query, self.query_bias = q, biases[0]
        self.keys = k.reshape(heads, -1, k.shape[1]).contiguous()
        self.values = v.reshape(heads, -1, v.shape[1]).transpose(1, 2).contiguous()
        self.value_bias = biases[2]

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Map x (B, N, d) to its CLS row (B, d) and the attention's output there (B, d)."""
        result: tuple[Tensor, Tensor] = _CLSAttention.apply(x, self)
        return result


class _CLSAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: CLSAttention) -> tuple[Tensor, Tensor]:
        norm = layer.norm
        y, mean, rstd = torch.native_layer_norm(x, (norm.width,), norm.weight, norm.bias, norm.eps)
        q = F.linear(y[:, 0], layer.query, layer.query_bias)
        q = q.unflatten(1, (len(layer.keys), -1)).transpose(0, 1)
        probes = torch.bmm(q, layer.keys).transpose(0, 1)
        p = torch.softmax(torch.bmm(probes, y.transpose(1, 2)).float(), -1)
        rows = torch.bmm(p.to(y.dtype), y)
        out = torch.bmm(rows.transpose(0, 1), layer.values).transpose(0, 1).flatten(1)
        ctx.layer = layer
        ctx.save_for_backward(x, y, mean, rstd, probes, p)
        return x[:, 0].clone(), out if layer.value_bias is None else out + layer.value_bias

    @staticmethod
    def backward(ctx: Any, grad_cls: Tensor, grad_out: Tensor) -> tuple[Tensor, None]:
        layer: CLSAttention = ctx.layer
        x, y, mean, rstd, probes, p = ctx.saved_tensors
        g = grad_out.unflatten(1, (len(layer.keys), -1)).transpose(0, 1)
        g_rows = torch.bmm(g, layer.values.transpose(1, 2)).transpose(0, 1)
        g_p = torch.bmm(g_rows, y.transpose(1, 2)).float()
        g_scores = torch._softmax_backward_data(g_p, p, -1, torch.float32).to(y.dtype)
        g_probes = torch.bmm(g_scores, y)
        weights = torch.cat([p.to(y.dtype), g_scores], 1).transpose(1, 2)
        g_y = torch.bmm(weights, torch.cat([g_rows, probes], 1))
        g_q = torch.bmm(g_probes.transpose(0, 1), layer.keys.transpose(1, 2))
        g_y[:, 0] += g_q.transpose(0, 1).flatten(1) @ layer.query
        norm = layer.norm
        g_x = torch.ops.aten.native_layer_norm_backward(
            g_y, x, (norm.width,), mean, rstd, norm.weight, norm.bias, (True, False, False)
        )[0]
        g_x[:, 0] += grad_cls
        return g_x, None


def repeat_runs(x: Tensor, counts: Sequence[int]) -> Tensor:
    """Repeat row c of x (C, ...) counts[c] times: (sum(counts), ...), gradients summed per run."""
    if all(n == 1 for n in counts):
        return x
    result: Tensor = _RepeatRuns.apply(x, counts)
    return result


class _RepeatRuns(torch.autograd.Function):
    # The backward of repeat_interleave adds row by row in the compute type; this sums in float32.

    @staticmethod
    def forward(ctx: Any, x: Tensor, counts: Sequence[int]) -> Tensor:
        ctx.counts = counts
        return torch.cat([row.expand(n, *row.shape) for row, n in zip(x, counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        sums = [part.sum(0, dtype=torch.float32) for part in grad.split(ctx.counts)]
        return torch.stack(sums).to(grad.dtype), None
