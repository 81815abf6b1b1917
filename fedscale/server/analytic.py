"""Ridge regression in closed form: FedOPAL's head, and AFL's law that joins clients' heads.

FedOPAL: arXiv 2607.08368. AFL: He et al. 2025, "AFL: a single-round analytic approach for
federated learning with pre-trained models". Everything is float64.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from scipy.linalg.lapack import dpocon
from torch import Tensor

from fedscale.local.statistics import packed_size

log = logging.getLogger(__name__)

EPS = torch.finfo(torch.float64).eps
FLOAT32, FLOAT64 = 4, 8
"""Bytes of a number: clients send prompts in float32, statistics in float64."""


class SingularSystem(ValueError):
    """The statistics do not determine a head; names the rank, λ and what to do."""


def ridge_solve(R: Tensor, C: Tensor, lam: float, *, key: str = "head.lam") -> Tensor:
    """Return W = (R + λI)⁻¹ C, (d, K) float64: equation (9) of FedOPAL.

    This is ridge regression without an intercept on one-hot labels. A class that no client has
    gives a column of zeros. Where λ is too small to make R + λI invertible in float64, W is the
    limit for λ → 0, the least-squares head of smallest norm, and the condition is logged.

    Args:
        R: (d, d), Σ h hᵀ.
        C: (d, K), Σ h yᵀ.
        lam: λ, at least 0.
        key: of λ in messages.

    Raises:
        SingularSystem: λ = 0 and R has no inverse in float64.
        ValueError: shapes that do not fit; values that are not finite; a negative λ; an R that is
            no sum of h hᵀ (not symmetric, a negative eigenvalue); a head that overflows.
    """
    R, C = R.double(), C.double()
    _check_shapes(R, C, "R", "C")
    if not 0 <= lam < math.inf:
        raise ValueError(f"{key}={lam}: allowed are finite numbers from 0")
    system = R + lam * _eye(R)
    return solve(system, C, system.diagonal(), lam=lam, name="R + λI", key=key)


def solve(
    system: Tensor,
    right: Tensor,
    size: Tensor,
    *,
    lam: float,
    name: str,
    key: str = "head.lam",
    samples: float = 0,
) -> Tensor:
    """Solve a symmetric positive semi-definite system (d, d) for right-hand sides (d, K).

    Rows and columns are first divided by √size, so that neither the features' units nor digits
    lost in forming the system pass for information. Cholesky solves it if its condition (LAPACK's
    estimate) can be resolved in float64; else an eigen-solve over the eigenvalues that can.

    Args:
        system: λI included, finite.
        right: finite.
        size: (d,), the diagonal before digits cancelled: entry (i, j) of the system is right to
            about eps·√(size_i size_j).
        lam: λ. Above 0, unresolved directions get the limit λ → 0: no part in the solution.
        name: of the system, for messages.
        key: of λ in messages.
        samples: N, where digits cancelled: errors of a sum of N terms are up to N·eps.

    Raises:
        SingularSystem: λ = 0 and not all eigenvalues can be resolved.
        ValueError: values that are not finite, a system that is not semi-definite.
    """
    if not (system.isfinite().all() and right.isfinite().all()):
        raise ValueError(f"{name}: allowed are finite values, found NaN or infinite ones")
    if (size < 0).any():
        raise ValueError(f"{name}: allowed are sums of h hᵀ, found a negative diagonal")
    scale = size.where(size > 0, 1).rsqrt()
    scaled = scale[:, None] * system * scale
    if not torch.allclose(scaled, scaled.T, rtol=0, atol=1e-8):
        raise ValueError(f"{name}: allowed are symmetric matrices")
    d = len(system)
    resolution = (10 * d + samples) * EPS
    factor, failed = torch.linalg.cholesky_ex(scaled)
    if not int(failed) and _resolved(scaled, factor, resolution):
        return _finite(scale[:, None] * torch.cholesky_solve(scale[:, None] * right, factor), name)

    values, vectors = torch.linalg.eigh(scaled)
    largest = max(float(values[-1]), 1.0)
    if float(values[0]) < -1e-5 * largest:
        raise ValueError(f"{name}: allowed are sums of h hᵀ, found a negative eigenvalue")
    kept = values > resolution * largest
    rank = int(kept.sum())
    if rank < d and lam == 0:
        raise SingularSystem(
            f"{key}=0: {name} has rank {rank} of {d} (fewer samples than features, or features "
            f"that depend on each other); allowed: {key} > 0, for example 1e-3"
        )
    log.warning(
        "%s=%g: %s has condition %.3g in float64; solved in %d of %d directions",
        key, lam, name, largest / max(abs(float(values[0])), 1e-300), rank, d,
    )  # fmt: skip
    inner = (vectors[:, kept].T @ (scale[:, None] * right)) / values[kept, None]
    solution = scale[:, None] * (vectors[:, kept] @ inner)
    # Of the solutions the smallest; a feature's unit must not blow rounding in vectors up.
    lost = vectors[:, ~kept]
    hidden, _ = torch.linalg.qr(scale[:, None] * lost.where(lost.abs() > resolution, 0))
    return _finite(solution - hidden @ (hidden.T @ solution), name)


class Message(NamedTuple):
    """What an AFL client sends: its head W_k (d, K), and C_k = R_k + rg·I (d, d)."""

    weight: Tensor
    gram: Tensor


def afl_message(R: Tensor, C: Tensor, rg: float) -> Message:
    """Return a client's message from its statistics.

    Args:
        R: (d, d), Σ h hᵀ.
        C: (d, K), Σ h yᵀ.
        rg: γ of AFL; above 0 it makes the client's own system solvable.

    Raises:
        SingularSystem: rg = 0 and R has no inverse in float64.
        ValueError: as `ridge_solve` with λ = rg.
    """
    return Message(ridge_solve(R, C, rg, key="rg"), R.double() + rg * _eye(R))


def afl_join(u: Message, v: Message) -> Message:
    """Join two messages by the absolute aggregation law: the head on both clients' samples.

    AFL writes it W = [I − R_u C_v + R_u C_v (C_u + C_v)⁻¹ C_v] W_u + [u ↔ v] with R = C⁻¹, and
    C = C_u + C_v. It is evaluated here as W = (C_u + C_v)⁻¹ (C_u W_u + C_v W_v), its equal by
    R_u C_v (C_u + C_v)⁻¹ C_u = (C_u + C_v)⁻¹ C_v: as written it cancels about as many digits as
    the condition numbers of C_u and C_v have.

    Raises:
        SingularSystem: C_u + C_v has no inverse in float64.
        ValueError: shapes that differ.
    """
    if u.weight.shape != v.weight.shape or u.gram.shape != v.gram.shape:
        raise ValueError(
            f"messages: W {tuple(u.weight.shape)} and {tuple(v.weight.shape)}, C "
            f"{tuple(u.gram.shape)} and {tuple(v.gram.shape)}: allowed are equal shapes"
        )
    both = u.gram + v.gram
    moments = u.gram @ u.weight + v.gram @ v.weight
    weight = solve(both, moments, both.diagonal(), lam=0.0, name="C_u + C_v", key="rg")
    return Message(weight, both)


def afl_aggregate(
    messages: Iterable[tuple[Tensor, Tensor]], rg: float, lam: float | None = 0.0
) -> Tensor:
    """Join the clients' (W_k, C_k) one by one; return the head (d, K).

    The joined system carries K·rg for K clients. AFL's RI removal takes it out; here down to λ:
    W ← W + e (C − e·I)⁻¹ W with e = K·rg − λ, which is the head of `ridge_solve` on the sums.

    Args:
        messages: of `afl_message`, in any order, which changes the result by rounding only.
        rg: what they were made with.
        lam: λ that stays in: 0 as AFL does, None for all of K·rg.

    Raises:
        SingularSystem: λ = 0 and the sum of R_k has no inverse in float64, or rg is too small
            for the sums on the way.
        ValueError: no messages, shapes that differ, a negative rg or λ.
    """
    for key, value in (("rg", rg), ("head.lam", lam)):
        if value is not None and not 0 <= value < math.inf:
            raise ValueError(f"{key}={value}: allowed are finite numbers from 0")
    joined: Message | None = None
    count = 0
    for weight, gram in messages:
        message = Message(weight.double(), gram.double())
        _check_shapes(message.gram, message.weight, "C_k", "W_k")
        joined = message if joined is None else afl_join(joined, message)
        count += 1
    if joined is None:
        raise ValueError("messages: allowed are those of one client or more, found none")
    if lam is None:
        return joined.weight
    excess = count * rg - lam
    rest = joined.gram - excess * _eye(joined.gram)
    size = torch.maximum(joined.gram.diagonal(), rest.diagonal())
    return joined.weight + excess * solve(
        rest, joined.weight, size, lam=lam, name="the joined system without K·rg"
    )


def message_bytes(width: int, num_classes: int, prompts: int = 0) -> int:
    """Bytes that a client sends once: packed R or C_k, C or W_k, and FedOPAL's prompts.

    8·(d(d+1)/2 + dK) + 4·nd; AFL has no prompts, and its message is of the same size.
    """
    statistics = packed_size(width) + width * num_classes
    return FLOAT64 * statistics + FLOAT32 * prompts * width


def _check_shapes(square: Tensor, wide: Tensor, first: str, second: str) -> None:
    d = len(wide) if wide.ndim == 2 else 0
    if square.shape != (d, d) or not wide.numel():
        raise ValueError(
            f"{first} {tuple(square.shape)} and {second} {tuple(wide.shape)}: "
            "allowed are (d, d) and (d, K)"
        )
    if not (square.isfinite().all() and wide.isfinite().all()):
        raise ValueError(
            f"{first}, {second}: allowed are finite values, found NaN or infinite ones"
        )


def _eye(like: Tensor) -> Tensor:
    return torch.eye(len(like), dtype=torch.float64, device=like.device)


def _resolved(matrix: Tensor, factor: Tensor, resolution: float) -> bool:
    """Whether 1/‖A⁻¹‖₁, estimated from the lower Cholesky factor, stands out of rounding."""
    norm = float(torch.linalg.matrix_norm(matrix, 1))
    condition, _ = dpocon(factor.cpu().numpy().T, norm, uplo="U")
    return float(condition) * norm > resolution * max(norm, 1.0)


def _finite(solution: Tensor, name: str) -> Tensor:
    if not solution.isfinite().all():
        raise ValueError(f"{name}: its solution overflows float64; scale features or head.lam")
    return solution
