"""Optimizers as functions on stacked tensors: every row of the leading axis is one client.

An optimizer is two functions. `init(params)` makes the moments it keeps, one tuple per name;
`update(params, grads, moments, rates, step)` moves params and moments in place. Both act on each
client alone, so any leading rows of params, grads and moments move exactly as those clients would
alone. Coefficients are numbers, or tensors with one value per client, of which the leading rows
are used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

Params = dict[str, Tensor]
Moments = dict[str, tuple[Tensor, ...]]
Coefficient = float | Tensor
Steps = int | Tensor
"""Steps taken with these moments, this one included: a number, or one per client (C,)."""

NAMES = ("adam", "sgd", "sam")


@dataclass(frozen=True)
class Optimizer:
    """One rule; see the module's docstring for the arguments of `init` and `update`.

    Attributes:
        perturb: (params, grads) → params at which the gradient is taken a second time; None for
            rules that need one gradient.
    """

    init: Callable[[Params], Moments]
    update: Callable[[Params, Params, Moments, Mapping[str, float], Steps], None]
    perturb: Callable[[Params, Params], Params] | None = None


def _zeros(params: Params, copies: int) -> Moments:
    return {k: tuple(torch.zeros_like(p) for _ in range(copies)) for k, p in params.items()}


def per_client(value: Coefficient, p: Tensor) -> Coefficient:
    """Shape a coefficient per client so that it multiplies the rows of p."""
    if not isinstance(value, Tensor):
        return value
    return value[: len(p)].to(p).view(-1, *[1] * (p.ndim - 1))


def _adam_update(
    params: Params,
    grads: Params,
    moments: Moments,
    rates: Mapping[str, float],
    step: Steps,
    *,
    beta1: float,
    beta2: float,
    eps: float,
) -> None:
    for name, p in params.items():
        m, v = moments[name]
        g = grads[name]
        m.lerp_(g, 1 - beta1)
        v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        taken = per_client(step, p)
        scale = v.sqrt().div_((1 - beta2**taken) ** 0.5).add_(eps)
        if isinstance(taken, Tensor):
            p.sub_(m / scale * (rates[name] / (1 - beta1**taken)))
        else:
            p.addcdiv_(m, scale, value=-rates[name] / (1 - beta1**taken))


def _sgd_update(
    params: Params,
    grads: Params,
    moments: Moments,
    rates: Mapping[str, float],
    step: Steps,
    *,
    momentum: Coefficient,
) -> None:
    for name, p in params.items():
        d = grads[name]
        if moments[name]:
            (b,) = moments[name]
            d = b.mul_(per_client(momentum, p)).add_(d)
        p.sub_(d, alpha=rates[name])


def adam(beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-8) -> Optimizer:
    """Adam with bias correction; `step` counts from 1."""
    return Optimizer(
        partial(_zeros, copies=2), partial(_adam_update, beta1=beta1, beta2=beta2, eps=eps)
    )


def sgd(momentum: Coefficient = 0.0) -> Optimizer:
    """Gradient descent with a heavy ball: b = momentum·b + g, p = p − lr·b; no dampening.

    Over the steps of one regime b is g_q + Σ_{p<q} ρ^{q−p} g_p, equation (9) of SSD-FL.
    """
    copies = 1 if isinstance(momentum, Tensor) or momentum else 0
    return Optimizer(partial(_zeros, copies=copies), partial(_sgd_update, momentum=momentum))


def sam(rho: float = 0.01, momentum: Coefficient = 0.0) -> Optimizer:
    """Adaptive sharpness-aware minimisation over `sgd` (Kwon et al. 2021, arXiv:2102.11600).

    The gradient is taken at p + e on the same batch, e = ρ·p²⊙g / (‖|p|⊙g‖ + 1e-12); the norm is
    over all trainables of one client.
    """
    base = sgd(momentum)
    return Optimizer(base.init, base.update, partial(_ascend, rho=rho))


def _ascend(params: Params, grads: Params, *, rho: float) -> Params:
    squares = [(p.abs() * grads[k]).flatten(1).square().sum(1) for k, p in params.items()]
    scale = rho / (torch.stack(squares).sum(0).sqrt() + 1e-12)
    return {k: p + per_client(scale, p) * p.square() * grads[k] for k, p in params.items()}


def build(name: str, *, momentum: Coefficient = 0.0, rho: float = 0.01) -> Optimizer:
    """Return the optimizer called `name`; `adam` reads neither momentum nor rho.

    Raises:
        ValueError: an unknown name, a momentum outside [0, 1), a rho that is not positive.
    """
    ok = float(torch.as_tensor(momentum).min()) >= 0 and float(torch.as_tensor(momentum).max()) < 1
    if not ok:
        raise ValueError(f"local.momentum={momentum} must lie in [0, 1)")
    if name == "adam":
        return adam()
    if name == "sgd":
        return sgd(momentum)
    if name == "sam":
        if not rho > 0:
            raise ValueError(f"local.rho={rho} must be positive")
        return sam(rho, momentum)
    raise ValueError(f"local.optimizer={name!r} is unknown; allowed: {', '.join(NAMES)}")
