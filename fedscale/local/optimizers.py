"""Optimizers as functions on stacked tensors: every row of the leading axis is one client.

An optimizer is two functions. `init(params)` makes the moments it keeps, one tuple per name;
`update(params, grads, moments, rates, step)` moves params and moments in place. Both act on each
element alone, so any subset of clients (a slice of the rows of params, grads and moments) moves
exactly as those clients would alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

Params = dict[str, Tensor]
Moments = dict[str, tuple[Tensor, ...]]


@dataclass(frozen=True)
class Optimizer:
    """`init` and `update` of one rule; see the module's docstring for their arguments."""

    init: Callable[[Params], Moments]
    update: Callable[[Params, Params, Moments, Mapping[str, float], int], None]


def _zeros(params: Params, copies: int) -> Moments:
    return {k: tuple(torch.zeros_like(p) for _ in range(copies)) for k, p in params.items()}


def _adam_update(
    params: Params,
    grads: Params,
    moments: Moments,
    rates: Mapping[str, float],
    step: int,
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
        scale = v.sqrt().div_((1 - beta2**step) ** 0.5).add_(eps)
        p.addcdiv_(m, scale, value=-rates[name] / (1 - beta1**step))


def _sgd_update(
    params: Params,
    grads: Params,
    moments: Moments,
    rates: Mapping[str, float],
    step: int,
    *,
    momentum: float,
) -> None:
    for name, p in params.items():
        d = grads[name]
        if momentum:
            (b,) = moments[name]
            d = b.mul_(momentum).add_(d)
        p.sub_(d, alpha=rates[name])


def adam(beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-8) -> Optimizer:
    """Adam with bias correction; `step` counts from 1."""
    return Optimizer(
        partial(_zeros, copies=2), partial(_adam_update, beta1=beta1, beta2=beta2, eps=eps)
    )


def sgd(momentum: float = 0.0) -> Optimizer:
    """Gradient descent with a heavy ball: b = momentum·b + g, p = p − lr·b; no dampening."""
    return Optimizer(
        partial(_zeros, copies=1 if momentum else 0), partial(_sgd_update, momentum=momentum)
    )


def build(name: str, *, momentum: float = 0.0) -> Optimizer:
    """Return the optimizer called `name`; momentum is read by `sgd` only.

    Raises:
        ValueError: an unknown name or a momentum outside [0, 1).
    """
    if not 0 <= momentum < 1:
        raise ValueError(f"local.momentum={momentum} must lie in [0, 1)")
    if name == "adam":
        return adam()
    if name == "sgd":
        return sgd(momentum)
    raise ValueError(f"local.optimizer={name!r} is unknown; allowed: adam, sgd")
