"""OT merge: a neighbourhood's prompts become n representatives (D-FROST, eq. 6–9).

The whole merge runs in float64 whatever the input: it is a percent or so of a round, and in
float32 the softmax of costs divided by a small epsilon has no correct digits left.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedscale import seeds

SCHEDULES = ("fixed", "anneal")
# Padded prompts × width that one batched call may hold; 64 MiB in float64.
CHUNK_ELEMENTS = 2**23


@dataclass(frozen=True, eq=False)
class OTMerge:
    """Result of `ot_merge`; the first three are in the dtype of its input, the others float64.

    Attributes:
        phi: (…, n, d) representatives.
        plan: (…, N, n) transport plan; rows sum to 1/N, to 0 where masked.
        mass: (…, n) column sums of the plan; a representative without mass lies at 0.
        delta: (…, S) ‖P(s) − P(s−1)‖_F + ‖Φ(s) − Φ(s−1)‖_F per step, from the uniform plan
            P(0) = 1/(nN); 0 after an element has stopped.
        objective: (…, 2S + 1) J at (P(0), Φ(0)) and after each transport and each barycenter
            half-step, always at the final epsilon; constant after an element has stopped. None
            unless asked for.
    """

    phi: Tensor
    plan: Tensor
    mass: Tensor
    delta: Tensor
    objective: Tensor | None


@torch.no_grad()
def ot_merge(
    omega: Tensor,
    phi0: Tensor,
    *,
    epsilon: float = 0.01,
    lam: float = 1e-3,
    sigma2: float = 1.0,
    steps: int = 50,
    mask: Tensor | None = None,
    schedule: str = "fixed",
    epsilon_init: float = 1.0,
    tolerance: float = 0.0,
    objective: bool = False,
) -> OTMerge:
    """Alternate transport and barycenter steps from phi0.

        C_ai = ‖z_a − φ_i‖² / (2 sigma2)                        (6)
        P_ai = (1/N) softmax_i(−C_ai / epsilon)                 (8)
        φ_i  = Σ_a P_ai z_a / (Σ_a P_ai + lam)                  (9)

    which never increases J = <P, C> + epsilon Σ P (log P − 1) + lam/(2 sigma2) Σ ‖φ_i‖² (7).

    Args:
        omega: (…, N, d) prompts of the neighbourhood, equal mass each.
        phi0: (…, n, d) start, with the same leading axes, dtype and device.
        steps: S, the number of alternations.
        lam: 0 or more; Theorem 1 needs more than 0.
        mask: (…, N) bool, False for padding, whose values are ignored.
        schedule: "fixed", or "anneal": geometric from epsilon_init at the first step to epsilon
            at the last.
        tolerance: an element of the batch stops, whatever the others do, after the first step
            whose delta is below this; 0 runs all steps. Not for "anneal", whose epsilon arrives
            at the last step only.
        objective: also return J.

    Raises:
        ValueError: a bad option, shape, dtype or device; a non-finite or empty input.
    """
    _check_options(epsilon, lam, sigma2, steps, schedule, epsilon_init, tolerance)
    mask = _check_tensors(omega, phi0, mask)
    z, f = torch.where(mask.unsqueeze(-1), omega, 0).double(), phi0.double()
    largest = max(_largest("omega", z), _largest("phi0", f), 1e-300)
    smallest = min(epsilon, epsilon_init) if schedule == "anneal" else epsilon
    digits = 2 * math.log10(largest) + math.log10(4 * z.shape[-1] / sigma2)
    if digits - min(0.0, math.log10(smallest)) > 300:
        raise ValueError(
            f"omega, phi0: values up to {largest:g} are too large for float64; allowed are costs "
            f"below 1e300 and below 1e300 x epsilon ({smallest:g})"
        )

    lam = max(lam, 1e-300)  # so that at lam = 0, too, a representative without mass goes to 0
    q = (mask.double() / mask.sum(-1, keepdim=True)).unsqueeze(-2)
    y, origin, x = _coordinates(f, z, mask)
    # P and C are held transposed, (…, n, N): a softmax over short rows is seven times slower.
    plan = (q / f.shape[-2]).expand(*q.shape[:-2], f.shape[-2], q.shape[-1])
    cost = _cost(y, x, sigma2)
    delta = torch.zeros(*mask.shape[:-1], steps, dtype=torch.float64, device=z.device)
    running = torch.ones_like(q[..., :1], dtype=torch.bool)
    history = [_objective(plan, cost, y - origin, epsilon, lam, sigma2)] if objective else []

    for s, current in enumerate(_epsilons(schedule, epsilon, epsilon_init, steps)):
        plan_before, y_before = plan, y
        plan = torch.where(running, q * torch.softmax(-cost / current, -2), plan)
        if objective:
            history.append(_objective(plan, cost, y - origin, epsilon, lam, sigma2))
        # The regulariser pulls like one more prompt, of mass lam, at the origin.
        pulled = plan @ x + lam * origin
        y = torch.where(running, pulled / (plan.sum(-1, keepdim=True) + lam), y)
        cost = _cost(y, x, sigma2)
        if objective:
            history.append(_objective(plan, cost, y - origin, epsilon, lam, sigma2))
        delta[..., s] = _frobenius(plan - plan_before) + _frobenius(y - y_before)
        if tolerance > 0:
            running = running & (delta[..., s, None, None] >= tolerance)
            if not running.any():
                break

    history += history[-1:] * (2 * steps + 1 - len(history))
    mass = plan.sum(-1)
    phi = plan @ z / (mass + lam).unsqueeze(-1)
    return OTMerge(
        phi=phi.to(omega.dtype),
        plan=plan.mT.to(omega.dtype),
        mass=mass.to(omega.dtype),
        delta=delta,
        objective=torch.stack(history, -1) if objective else None,
    )


@torch.no_grad()
def merge_neighbourhoods(
    support: Tensor | np.ndarray,
    updated: Tensor,
    start: Tensor,
    own: Tensor | np.ndarray,
    *,
    trace: list[OTMerge] | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Merge every client's closed neighbourhood: ragged, padded, in as few calls as fit.

    Args:
        support: (C, M) bool, whose prompts each client merges, its own included.
        updated: (M, n, d) every client's prompts after training.
        start: (C, n, d) Φ(0): the clients' previous prompts, `updated[own]` or `sample_starts`.
        own: (C,) ints, each client's own row of `updated`.
        trace: the batched results of all calls are appended to it.
        options: of `ot_merge`.

    Returns:
        phi (C, n, d) and mass (C, n). A client with no neighbour keeps updated[own] bit for bit,
        with mass 1/n each.

    Raises:
        ValueError: shapes that do not fit, a client outside its own support, prompts that are not
            finite (named by client), or as `ot_merge`.
    """
    support = torch.as_tensor(support, dtype=torch.bool, device=updated.device)
    own = torch.as_tensor(own, dtype=torch.long, device=updated.device)
    if (
        updated.ndim != 3
        or support.shape != (len(own), len(updated))
        or start.shape != (len(own), *updated.shape[1:])
    ):
        raise ValueError(
            f"support {tuple(support.shape)}, updated {tuple(updated.shape)}, start "
            f"{tuple(start.shape)}, own {tuple(own.shape)}: allowed are (C, M), (M, n, d), "
            "(C, n, d), (C,)"
        )
    outside = ~support.gather(1, own.unsqueeze(1)).squeeze(1)
    if outside.any():
        raise ValueError(f"support: client {int(own[outside][0])} is not in its own neighbourhood")
    sizes = support.sum(1)
    merging = sizes > 1
    broken = support[merging].any(0) & ~updated.isfinite().flatten(1).all(1)
    if broken.any():
        raise ValueError(
            f"updated: the prompts of client {int(broken.nonzero()[0])} are not finite"
        )

    n = updated.shape[1]
    phi = updated[own].clone()
    mass = torch.full_like(phi[..., 0], 1 / n)
    # Neighbourhoods of like size share a call, so that little of it is padding.
    order = sizes.argsort(stable=True)[len(sizes) - int(merging.sum()) :]
    neighbours = (~support).to(torch.uint8).argsort(dim=1, stable=True)
    while len(order):
        width = int(sizes[order[-1]])
        fits = max(1, CHUNK_ELEMENTS // (width * updated[0].numel()))
        order, rows = order[:-fits], order[-fits:]
        omega = updated[neighbours[rows, :width]].flatten(1, 2)
        present = torch.arange(width, device=updated.device) < sizes[rows].unsqueeze(1)
        mask = present.repeat_interleave(n, dim=1)
        merged = ot_merge(omega, start[rows], mask=mask, **options)
        phi[rows], mass[rows] = merged.phi, merged.mass
        if trace is not None:
            trace.append(merged)
    return phi, mass


def theorem_1(trace: list[OTMerge], epsilon: float, lam: float, sigma2: float) -> dict[str, float]:
    """Summarise merges traced with `objective=True` beside D-FROST's Theorem 1.

    min_s Δ(s) ≤ sqrt(4 (J(0) − J*) / (μS)), μ = min(ε, λ/σ²). The last J stands for J*: the proof
    sums over the falls of J, so the sharper bound holds too.

    Returns:
        Means over clients: objective (the last J), delta (the least Δ), bound (infinite for λ = 0);
        and their number, clients. Empty without a merge.
    """
    if not trace:
        return {}
    J = torch.cat([_objectives(merge) for merge in trace])
    delta = torch.cat([merge.delta for merge in trace])
    mu = min(epsilon, lam / sigma2)
    fall = (J[:, 0] - J[:, -1]).clamp(min=0)
    bound = (4 * fall / (mu * delta.shape[1])).sqrt() if mu else torch.full_like(fall, torch.inf)
    return {
        "objective": float(J[:, -1].mean()),
        "delta": float(delta.min(dim=1).values.mean()),
        "bound": float(bound.mean()),
        "clients": len(J),
    }


def _objectives(merge: OTMerge) -> Tensor:
    assert merge.objective is not None, "asked for"
    return merge.objective


def sample_starts(
    support: Tensor | np.ndarray,
    updated: Tensor,
    own: Tensor | np.ndarray,
    *,
    seed: int,
    round: int,
) -> Tensor:
    """Draw each client's Φ(0) from its neighbourhood, n prompts without replacement.

    Args:
        support, updated, own: as `merge_neighbourhoods`; `own` holds the global client numbers
            and so keys the draws, which do not depend on who else is in the call.

    Returns:
        (C, n, d).
    """
    reach = torch.as_tensor(support, dtype=torch.bool).cpu().numpy()
    n = updated.shape[1]
    starts = []
    for row, client in zip(reach, torch.as_tensor(own).tolist(), strict=True):
        pool = np.flatnonzero(row)
        rng = seeds.stream(seed, "merge_start", round, client)
        pick = rng.choice(len(pool) * n, n, replace=False)
        starts.append(updated[torch.from_numpy(pool[pick // n]), torch.from_numpy(pick % n)])
    return torch.stack(starts)


def _coordinates(phi0: Tensor, z: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Coordinates of phi0, the origin and z in an orthonormal basis of what they span.

    Every iterate is a combination of these points, so all distances can be taken here, in at most
    N + n + 1 dimensions instead of d. Householder QR rounds each point by its own length; taking
    the shortest point as the centre first makes that small also when all points lie far from 0.
    """
    points = torch.cat([phi0, torch.zeros_like(phi0[..., :1, :]), z], -2)
    candidate = torch.ones_like(points[..., 0], dtype=torch.bool)
    candidate[..., phi0.shape[-2] :] = F.pad(mask, (1, 0), value=False)
    length = torch.linalg.vector_norm(points, dim=-1).masked_fill(~candidate, torch.inf)
    index = length.argmin(-1)[..., None, None].expand(*length.shape[:-1], 1, z.shape[-1])
    points = points - points.gather(-2, index)
    if points.shape[-2] < points.shape[-1]:
        points = torch.linalg.qr(points.mT, mode="r").R.mT.contiguous()
    y, origin, x = points.split([phi0.shape[-2], 1, z.shape[-2]], -2)
    return y.contiguous(), origin, x.contiguous()


def _cost(y: Tensor, x: Tensor, sigma2: float) -> Tensor:
    # By differences: |x|² + |y|² − 2xy loses the small distances beside large norms.
    mode = "donot_use_mm_for_euclid_dist"
    return torch.cdist(y, x, compute_mode=mode).square() / (2 * sigma2)


def _objective(
    plan: Tensor, cost: Tensor, phi: Tensor, epsilon: float, lam: float, sigma2: float
) -> Tensor:
    transport = (plan * cost).sum((-2, -1))
    entropy = -(torch.special.entr(plan) + plan).sum((-2, -1))
    return transport + epsilon * entropy + lam / (2 * sigma2) * phi.square().sum((-2, -1))


def _largest(name: str, values: Tensor) -> float:
    low, high = values.aminmax()
    largest = max(float(high), -float(low))
    if not math.isfinite(float(high) - float(low)) and not values.isfinite().all():
        where = tuple((~values.isfinite()).nonzero()[0].tolist())
        raise ValueError(f"{name}: {float(values[where])} at {where}; allowed are finite values")
    return largest


def _frobenius(difference: Tensor) -> Tensor:
    return torch.linalg.vector_norm(difference, dim=(-2, -1))


def _epsilons(schedule: str, epsilon: float, epsilon_init: float, steps: int) -> Iterator[float]:
    for s in range(1, steps + 1):
        left = (steps - s) / (steps - 1) if schedule == "anneal" and steps > 1 else 0.0
        yield epsilon ** (1 - left) * epsilon_init**left


def _check_options(
    epsilon: float,
    lam: float,
    sigma2: float,
    steps: int,
    schedule: str,
    epsilon_init: float,
    tolerance: float,
) -> None:
    positive = {"epsilon": epsilon, "sigma2": sigma2, "epsilon_init": epsilon_init}
    for name, value in positive.items():
        if not 0 < value < math.inf:
            raise ValueError(f"{name}={value}: allowed are finite numbers above 0")
    if steps < 1 or steps != int(steps):
        raise ValueError(f"steps={steps}: allowed are whole numbers from 1")
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule={schedule!r} is unknown; allowed: {', '.join(SCHEDULES)}")
    for name, value in {"lam": lam, "tolerance": tolerance}.items():
        if not 0 <= value < math.inf:
            raise ValueError(f"{name}={value}: allowed are finite numbers from 0")
    if tolerance > 0 and schedule == "anneal":
        raise ValueError(f"tolerance={tolerance}: with schedule='anneal' allowed is 0")


def _check_tensors(omega: Tensor, phi0: Tensor, mask: Tensor | None) -> Tensor:
    """Return the mask, all True where none was given."""
    if not omega.is_floating_point() or omega.dtype != phi0.dtype:
        raise ValueError(f"omega {omega.dtype}, phi0 {phi0.dtype}: allowed is one floating dtype")
    if mask is None:
        mask = torch.ones(omega.shape[:-1], dtype=torch.bool, device=omega.device)
    devices = {str(tensor.device) for tensor in (omega, phi0, mask)}
    if len(devices) > 1:
        raise ValueError(f"omega, phi0, mask are on {', '.join(sorted(devices))}: allowed is one")
    shapes = f"omega {tuple(omega.shape)}, phi0 {tuple(phi0.shape)}, mask {tuple(mask.shape)}"
    fits = (
        min(omega.ndim, phi0.ndim) >= 2
        and omega.shape[:-2] == phi0.shape[:-2]
        and omega.shape[-1] == phi0.shape[-1]
        and mask.shape == omega.shape[:-1]
    )
    if not fits or mask.dtype != torch.bool:
        raise ValueError(f"{shapes} {mask.dtype}: allowed are (…, N, d), (…, n, d), (…, N) bool")
    if not (omega.numel() and phi0.numel() and mask.any(-1).all()):
        raise ValueError(f"{shapes}: every element of the batch needs a prompt")
    return mask
