"""Ridge regression in closed form: FedOPAL's head, and AFL's law that joins clients' heads.

FedOPAL: arXiv 2607.08368. AFL: He et al. 2025, Analytic Federated Learning, arXiv:2405.16240.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

log = logging.getLogger(__name__)


class SingularSystem(ValueError):
    """The statistics do not determine a head; names the rank, λ and what to do."""


def ridge_solve(R: Tensor, C: Tensor, lam: float) -> Tensor:
    """Return W = (R + λI)⁻¹ C, (d, K) float64: the ridge regression without intercept.

    Cholesky; where rounding makes R + λI indefinite, a symmetric eigen-solve whose condition
    number is logged.

    Args:
        R: (d, d), Σ h hᵀ.
        C: (d, K), Σ h yᵀ.
        lam: λ, at least 0.

    Raises:
        SingularSystem: R + λI has no inverse in float64.
        ValueError: shapes that do not fit, values that are not finite, a negative λ.
    """
    R, C = R.double(), C.double()
    d = len(R)
    if R.shape != (d, d) or C.ndim != 2 or len(C) != d:
        raise ValueError(
            f"R {tuple(R.shape)} and C {tuple(C.shape)}: allowed are (d, d) and (d, K)"
        )
    if not lam >= 0:
        raise ValueError(f"head.lam={lam}: allowed: 0 or more")
    if not (R.isfinite().all() and C.isfinite().all()):
        raise ValueError("the statistics R, C are not finite")
    system = R + lam * torch.eye(d, dtype=R.dtype, device=R.device)
    return solve(system, C, f"head.lam={lam:g}", log_as="R + λI")


def solve(system: Tensor, right: Tensor, key: str, *, log_as: str) -> Tensor:
    """Solve a symmetric positive definite system (d, d) for (d, K), all float64.

    Raises:
        SingularSystem: it has no inverse; `key` is what the user set.
    """
    values = torch.linalg.eigvalsh(system)
    largest = float(values[-1])
    smallest_kept = len(system) * torch.finfo(system.dtype).eps * max(largest, 0.0)
    rank = int((values > smallest_kept).sum())
    if rank < len(system) or largest <= 0:
        raise SingularSystem(
            f"{key}: {log_as} has rank {rank} of {len(system)} (too few samples, or features that "
            "depend on each other); use a larger head.lam, for example 1e-3"
        )
    factor, failed = torch.linalg.cholesky_ex(system)
    if not int(failed):
        return torch.cholesky_solve(right, factor)
    log.warning("%s is not positive definite: condition %.3g", log_as, largest / float(values[0]))
    values, vectors = torch.linalg.eigh(system)
    return vectors @ ((vectors.T @ right) / values[:, None])


class Local(NamedTuple):
    """One client's AFL message: its ridge head W (d, K) and C = XᵀX + rg·I (d, d)."""

    weight: Tensor
    gram: Tensor


def afl_local(R: Tensor, C: Tensor, rg: float) -> Local:
    """Return a client's message from its statistics; rg > 0 makes its own system solvable."""
    return Local(ridge_solve(R, C, rg), R.double() + rg * torch.eye(len(R), dtype=torch.float64))


def afl_join(u: Local, v: Local) -> Local:
    """Join two messages by the absolute aggregation law: the ridge head on both data sets.

    W = [I − R_u C_v + R_u C_v (C_u + C_v)⁻¹ C_v] W_u + [u ↔ v], R = C⁻¹.
    """
    both = u.gram + v.gram
    eye = torch.eye(len(both), dtype=both.dtype)

    def part(own: Local, other: Local) -> Tensor:
        carried = torch.linalg.solve(own.gram, other.gram)
        return (eye - carried + carried @ torch.linalg.solve(both, other.gram)) @ own.weight

    return Local(part(u, v) + part(v, u), both)


def afl_aggregate(messages: Iterable[Local], rg: float, *, remove: bool = True) -> Tensor:
    """Join messages client by client; return the head (d, K).

    Args:
        messages: of K clients, in any order (the result depends on it by rounding only).
        rg: the rg of `afl_local`.
        remove: undo the K·rg that the joined system carries (AFL's RI removal), so that the head
            is the one of plain least squares: W ← W + K·rg·(C − K·rg·I)⁻¹ W.

    Raises:
        SingularSystem: without rg the joint system has no inverse.
        ValueError: no message.
    """
    joined, count = None, 0
    for message in messages:
        joined = message if joined is None else afl_join(joined, message)
        count += 1
    if joined is None:
        raise ValueError("messages: need at least one client")
    if not remove:
        return joined.weight
    plain = joined.gram - count * rg * torch.eye(len(joined.gram), dtype=torch.float64)
    moved = solve(plain, joined.weight, "head.lam=0", log_as="Σ XᵀX")
    return joined.weight + count * rg * moved


def message_numbers(width: int, num_classes: int) -> int:
    """Numbers in a client's message: packed R, and C."""
    return width * (width + 1) // 2 + width * num_classes


def joint_solution(messages: Sequence[tuple[Tensor, Tensor]], lam: float) -> Tensor:
    """Return the head of all clients' statistics (R, C) together."""
    R = torch.stack([R.double() for R, _ in messages]).sum(0)
    C = torch.stack([C.double() for _, C in messages]).sum(0)
    return ridge_solve(R, C, lam)
