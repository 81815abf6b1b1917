"""Transformer layers whose weights never change, with their input's gradient written out.

This is where a step spends its time, so it is written for speed on CPUs: linear layers run in
oneDNN with weights laid out once (faster in float32 than the default product on many processors),
attention is a plain product–softmax–product (the fused kernel is slow at a few dozen tokens),
and the gradients of frozen weights are never formed. `forward` returns the output and a tape,
the tensors that `backward` needs; `backward(tape, g)` maps the gradient of the output to that of
the input. On GPUs, and where oneDNN is missing, PyTorch's public operators take their place.

Rows: the N tokens of B images are one matrix (B·N, d), image by image.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Tape = tuple[Any, ...]
Activation = Literal["gelu", "gelu_tanh", "quick_gelu"]

ATTENTION_BYTES = 3 * 2**20
"""Bytes of queries, keys and values that attention works on at a time, so that they stay in the
processor's cache. Measured on 1 MiB of L2: the best of 0.25–8 MiB, by 2 % of a step."""


class FrozenLinear:
    """y = x Wᵀ + b (+ residual) for constant W (out, in) and b (out,) or None."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        w = weight.detach().to(device, dtype).contiguous()
        self.bias = None if bias is None else bias.detach().to(device, dtype)
        self.packed = _pack(w, self.bias)
        self.weight = w if self.packed is None else None

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Map x (M, in) to (M, out), plus residual (M, out)."""
        if self.packed is not None:
            return _product(x, residual, self.packed[0], self.bias)
        assert self.weight is not None
        y = F.linear(x, self.weight, self.bias)
        return y if residual is None else y.add_(residual)

    def backward(self, g: Tensor) -> Tensor:
        """Map the gradient (M, out) of y to that of x, (M, in)."""
        if self.packed is not None:
            return _product(g, None, self.packed[1], None)
        assert self.weight is not None
        return g @ self.weight


def _product(x: Tensor, residual: Tensor | None, packed: Tensor, bias: Tensor | None) -> Tensor:
    product = torch.ops.mkldnn._linear_pointwise
    y: Tensor
    if residual is None:
        y = product.default(x, packed, bias, "none", [], "")
    else:
        y = product.binary(x, residual, packed, bias, "add")
    return y


def _pack(weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor] | None:
    """Return the weight laid out for `forward` and for `backward`, None without oneDNN."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return None
    try:
        pack = torch.ops.mkldnn._reorder_linear_weight
        pair = pack(weight, None), pack(weight.t().contiguous(), None)
        # These operators are not public: trust them only as far as a small trial goes.
        x = torch.eye(2, weight.shape[1], dtype=weight.dtype)
        expected = F.linear(x, weight, bias)
        found = _product(x, expected, pair[0], bias), _product(expected, None, pair[1], None)
    except (AttributeError, RuntimeError, TypeError):
        return None
    right = expected.float() * 2, expected.float() @ weight.float()
    for a, b in zip(found, right, strict=True):
        if not torch.allclose(a.float(), b, rtol=0, atol=0.03 * float(b.abs().max())):
            return None
    return pair


@dataclass(frozen=True)
class FrozenNorm:
    """Layer normalisation over the last axis with constant scale and shift (None: absent)."""

    weight: Tensor | None
    bias: Tensor | None
    eps: float
    width: int

    def forward(self, x: Tensor) -> tuple[Tensor, Tape]:
        """Normalise x (..., d)."""
        y, mean, rstd = torch.native_layer_norm(x, (self.width,), self.weight, self.bias, self.eps)
        return y, (x, mean, rstd)

    def backward(self, tape: Tape, g: Tensor) -> Tensor:
        """Map the gradient of y to that of x."""
        x, mean, rstd = tape
        gx: Tensor = torch.ops.aten.native_layer_norm_backward.default(
            g, x, (self.width,), mean, rstd, self.weight, self.bias, (True, False, False)
        )[0]
        return gx


@dataclass(frozen=True)
class FrozenMLP:
    """x + fc2(activation(fc1(norm(x)))), row by row."""

    norm: FrozenNorm
    fc1: FrozenLinear
    activation: Activation
    fc2: FrozenLinear

    def forward(self, x: Tensor) -> tuple[Tensor, Tape]:
        """Map x (M, d) to (M, d)."""
        y, norm = self.norm.forward(x)
        h = self.fc1.forward(y)
        if self.activation == "quick_gelu":
            a = h * torch.sigmoid(1.702 * h)
        else:
            a = F.gelu(h, approximate=self._approximate)
        return self.fc2.forward(a, x), (norm, h)

    def backward(self, tape: Tape, g: Tensor) -> Tensor:
        """Map the gradient of the output to that of x."""
        norm, h = tape
        ga = self.fc2.backward(g)
        if self.activation == "quick_gelu":
            s = torch.sigmoid(1.702 * h)
            gh = ga.mul_(s * (1 + 1.702 * h * (1 - s)))
        else:
            gh = torch.ops.aten.gelu_backward.default(ga, h, approximate=self._approximate)
        return self.norm.backward(norm, self.fc1.backward(gh)).add_(g)

    @property
    def _approximate(self) -> str:
        return "tanh" if self.activation == "gelu_tanh" else "none"


def attention(qkv: Tensor, images: int, heads: int) -> tuple[Tensor, Tape]:
    """Self-attention within each image: qkv (B·N, 3·d) → (B·N, d), queries already scaled."""
    z = qkv.view(images, -1, 3, heads, qkv.shape[1] // 3 // heads)
    return _plain_attention(z) if z.device.type == "cpu" else _fused_attention(z)


def _fused_attention(z: Tensor) -> tuple[Tensor, Tape]:
    with torch.enable_grad():
        z = z.detach().requires_grad_()
        q, k, v = z.permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v, scale=1.0)
    return out.detach().transpose(1, 2).flatten(2).flatten(0, 1), (z, out)


def _plain_attention(z: Tensor) -> tuple[Tensor, Tape]:
    B, N, _, H, e = z.shape
    result = z.new_empty(B, N, H, e)
    group = max(1, ATTENTION_BYTES // (z[0].numel() * z.element_size()))
    tape = []
    for part, target in zip(z.split(group), result.split(group), strict=True):
        q, k, v = part.permute(2, 0, 3, 1, 4).reshape(3, -1, N, e)
        p = torch.softmax(torch.bmm(q, k.transpose(1, 2)).float(), -1)
        weights = p.to(v.dtype)
        target.copy_(torch.bmm(weights, v).view(-1, H, N, e).transpose(1, 2))
        tape.append((q, k, v, p, weights))
    return result.view(B * N, H * e), ((B, N, H, e), tape)


def attention_backward(tape: Tape, g: Tensor, rows: slice = slice(None)) -> Tensor:
    """Map the gradient (B·N, d) of `attention`'s output to that of qkv at `rows` of each image."""
    if isinstance(tape[0], Tensor):
        z, out = tape
        B, H, N, e = out.shape
        (gz,) = torch.autograd.grad(out, z, g.view(B, N, H, e).transpose(1, 2))
        return gz[:, rows].reshape(-1, 3 * H * e)
    (B, N, H, e), groups = tape
    group = len(groups[0][0]) // H
    gz = g.new_empty(B, len(range(N)[rows]), 3 * H * e)
    parts = zip(g.view(B, N, H, e).split(group), gz.split(group), groups, strict=True)
    for part, target, (q, k, v, p, weights) in parts:
        go = part.transpose(1, 2).reshape(-1, N, e)
        gp = torch.bmm(go, v.transpose(1, 2)).float()
        gs = torch._softmax_backward_data(gp, p, -1, torch.float32).to(q.dtype)
        gq = torch.bmm(gs[:, rows], k)
        gk = torch.bmm(gs[:, :, rows].transpose(1, 2), q)
        gv = torch.bmm(weights[:, :, rows].transpose(1, 2), go)
        # One cat of the heads is faster than a copy from the transposed tensor.
        pieces = [x for y in (gq, gk, gv) for x in y.view(len(part), H, -1, e).unbind(1)]
        torch.cat(pieces, -1, out=target)
    return gz.view(-1, 3 * H * e)


@dataclass(frozen=True)
class FrozenBlock:
    """A pre-norm transformer block; queries carry the factor 1/sqrt(e)."""

    norm: FrozenNorm
    qkv: FrozenLinear
    proj: FrozenLinear
    mlp: FrozenMLP
    heads: int

    def forward(self, x: Tensor, images: int) -> tuple[Tensor, Tape]:
        """Map x (B·N, d) to (B·N, d)."""
        y, norm = self.norm.forward(x)
        out, mix = self.mix(x, self.qkv.forward(y), images)
        return out, (norm, mix)

    def backward(self, tape: Tape, g: Tensor) -> Tensor:
        """Map the gradient of the output to that of x."""
        norm, mix = tape
        gx, gqkv = self.mix_backward(mix, g)
        return self.norm.backward(norm, self.qkv.backward(gqkv)).add_(gx)

    def mix(self, x: Tensor, qkv: Tensor, images: int) -> tuple[Tensor, Tape]:
        """Add to x what attention over qkv (B·N, 3·d) brings, then the MLP."""
        a, attend = attention(qkv, images, self.heads)
        out, mlp = self.mlp.forward(self.proj.forward(a, x))
        return out, (attend, mlp)

    def mix_backward(
        self, tape: Tape, g: Tensor, rows: slice = slice(None)
    ) -> tuple[Tensor, Tensor]:
        """Return the gradients of x (all rows) and of qkv (`rows` of each image)."""
        attend, mlp = tape
        gx = self.mlp.backward(mlp, g)
        return gx, attention_backward(attend, self.proj.backward(gx), rows)


@dataclass(frozen=True)
class FrozenLastBlock:
    """The last block as far as the CLS row needs it: only that row's query, output and MLP.

    Keys and values are not formed. With y the normalised rows and q_h = Q_h y_0 + b the query of
    head h, the score of row j is q_h·(K_h y_j) = (K_hᵀ q_h)·y_j up to a constant that softmax
    removes (the key's bias), and the output is sum_h P_h (V_h sum_j p_hj y_j + b_h). So `probe`
    maps y_0 to K_hᵀ q_h for all heads, and `gather` maps the means sum_j p_hj y_j to the output.
    """

    norm: FrozenNorm
    probe: FrozenLinear
    gather: FrozenLinear
    mlp: FrozenMLP
    heads: int

    def forward(self, x: Tensor, images: int) -> tuple[Tensor, Tape]:
        """Map x (B·N, d) to the new CLS rows (B, d)."""
        y, norm = self.norm.forward(x)
        y = y.view(images, -1, x.shape[1])
        probes = self.probe.forward(y[:, 0].contiguous()).view(images, self.heads, -1)
        p = torch.softmax(torch.bmm(probes, y.transpose(1, 2)).float(), -1)
        means = torch.bmm(p.to(y.dtype), y)
        cls = x.view(y.shape)[:, 0].contiguous()
        result, mlp = self.mlp.forward(self.gather.forward(means.flatten(1), cls))
        return result, (norm, y, probes, p, mlp)

    def backward(self, tape: Tape, g: Tensor) -> Tensor:
        """Map the gradient (B, d) of the CLS rows to that of all rows x."""
        norm, y, probes, p, mlp = tape
        g_cls = self.mlp.backward(mlp, g)
        g_means = self.gather.backward(g_cls).view(probes.shape)
        g_p = torch.bmm(g_means, y.transpose(1, 2)).float()
        g_s = torch._softmax_backward_data(g_p, p, -1, torch.float32).to(y.dtype)
        weights = torch.cat([p.to(y.dtype), g_s], 1)
        g_y = torch.bmm(weights.transpose(1, 2), torch.cat([g_means, probes], 1))
        g_y[:, 0] += self.probe.backward(torch.bmm(g_s, y).flatten(1))
        g_x = self.norm.backward(norm, g_y.flatten(0, 1))
        g_x.view(y.shape)[:, 0] += g_cls
        return g_x
