"""PFPT's probabilistic merge of prompt sets, run per neighbourhood (D-FROST, fig. 5).

Weng et al. 2024, "Probabilistic Federated Prompt-Tuning with Non-IID and Imbalanced Data". Every
prompt of a neighbourhood is a candidate φ_i that may explain prompts of several clients. Clients
assign their prompts w_l to candidates, one to one within a client, at the largest total of

    score[l, i] = log N(w_l; φ_i, diag s(φ_i)²) + log Bern(c_i; b(φ_i)),

with s and b the sigmoids of two small networks. c_i is the number of prompts of the same client
that its assignment so far gives to candidate i: 0 or 1, since assignments are one to one, so the
Bernoulli term is log b(φ_i) where c_i = 1 and log(1 − b(φ_i)) where c_i = 0. (A count over
clients could exceed 1, where a Bernoulli variable has no probability, and would make the result
depend on the order of the clients.)

What the sources leave open is decided here: the first assignment has no counts (c = 0); each loop
is one Adam step on the sum of the assigned scores of all clients (c = 1 there, by definition) and
then one assignment of every client; φ, s and b are all trained, so a survivor is a candidate moved
by at most a few learning rates per coordinate and loop.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from fedscale import seeds

RATE = 1e-3
HIDDEN = 128

Layers = tuple[Tensor, Tensor, Tensor, Tensor]
"""Weight (128, d) and bias (128,), weight (out, 128) and bias (out,) of one network."""


class TooManyPrompts(ValueError):
    """A client has more prompts than `prompts.limit`; one line names round, client and count."""


def merge_neighbourhoods(
    support: Tensor,
    prompts: Tensor,
    counts: Tensor,
    *,
    loops: int,
    limit: int,
    seed: int,
    round: int,
    clients: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """Merge every client's closed neighbourhood; no result depends on who shares the call.

    Args:
        support: (C, M) bool, whose prompts each client merges, its own included.
        prompts: (M, n_max, d) every client's prompts; what lies behind a client's count is
            ignored, as are clients that no row names.
        counts: (M,) ints, the prompts that each client holds, 1 … n_max.
        loops: alternations of Adam step and assignment; 0 = the first assignment only.
        limit: the largest number of prompts that a client may hold after the merge.
        seed: the run's seed, at least 0.
        round: communication round, at least 0.
        clients: C global client numbers, each row's own; they are also rows of `prompts`.

    Returns:
        Prompts (C, n', d) in the dtype and on the device of `prompts`, padded with zeros to n' =
        the largest count of the result, and counts (C,) int64. Survivors keep the order of their
        candidates: by client, then by place. A client without neighbours keeps its prompts bit
        for bit.

    Raises:
        TooManyPrompts: a client holds more than `limit`.
        ValueError: shapes that do not fit, a count out of range, a client outside its own
            support, or neighbours' prompts that are not finite (named by client) or too large.
    """
    _check(support, prompts, counts, clients, loops, limit)
    sizes = counts.tolist()
    found = []
    for row, client in zip(support.cpu(), clients, strict=True):
        members = row.nonzero()[:, 0].tolist()
        if len(members) == 1:
            merged = prompts[client, : sizes[client]]
        else:
            sets = [prompts[v, : sizes[v]] for v in members]
            broken = [v for v, part in zip(members, sets, strict=True) if not part.isfinite().all()]
            if broken:
                raise ValueError(
                    f"prompts: those of client {broken[0]} in round {round} are not finite; "
                    "allowed are finite numbers"
                )
            merged = merge(sets, loops=loops, seed=seed, round=round, client=client)
        if len(merged) > limit:
            raise TooManyPrompts(
                f"prompts.limit={limit}: client {client} has {len(merged)} prompts after the "
                f"merge of round {round}; allowed are {limit} at most"
            )
        found.append(merged)
    result = torch.tensor([len(part) for part in found], dtype=torch.int64, device=prompts.device)
    longest = max((len(part) for part in found), default=0)
    padded = prompts.new_zeros(len(found), longest, prompts.shape[2])
    for into, part in zip(padded, found, strict=True):
        into[: len(part)] = part
    return padded, result


@torch.enable_grad()
def merge(sets: Sequence[Tensor], *, loops: int, seed: int, round: int, client: int) -> Tensor:
    """Return the candidates to which any prompt is assigned, moved by `loops` Adam steps.

    Computed in float64 on the CPU, so that the order of `sets` changes no more than the order of
    the survivors: Adam would turn float32's rounding of a gradient near 0 into a whole step.

    Args:
        sets: one (n_v, d) per client of the neighbourhood, finite, n_v at least 1.
        loops, seed, round: as `merge_neighbourhoods`.
        client: the client that merges; with seed and round the key of the initial networks.

    Returns:
        (n', d) with max n_v ≤ n' ≤ Σ n_v, in the dtype and on the device of `sets`.

    Raises:
        ValueError: prompts so large that scores overflow.
    """
    parts = [part.detach().cpu().double() for part in sets]
    observed = torch.cat(parts)
    candidates = observed.clone().requires_grad_()
    scale, use = initial_networks(observed.shape[1], seed=seed, round=round, client=client)
    rule = torch.optim.Adam([candidates, *scale, *use], lr=RATE)
    try:
        columns = assign(parts, candidates, scale, use)
        for _ in range(loops):
            rule.zero_grad()
            (-assigned_score(observed, candidates, columns, scale, use)).backward()
            rule.step()
            columns = assign(parts, candidates, scale, use, columns)
    except FloatingPointError as error:
        raise ValueError(
            f"prompts: values up to {float(observed.abs().max()):g} around client {client} in "
            f"round {round} overflow the scores of the merge; allowed are smaller ones"
        ) from error
    return candidates.detach()[columns.unique()].to(sets[0])


@torch.no_grad()
def assign(
    sets: Sequence[Tensor],
    candidates: Tensor,
    scale: Layers,
    use: Layers,
    before: Tensor | None = None,
) -> Tensor:
    """Assign each client's prompts to candidates, one to one, at the largest total score.

    Args:
        sets: one (n_v, d) per client, L prompts in all, none larger than the candidates.
        candidates: (I, d).
        scale, use: the networks of s and b.
        before: (L,) the assignment so far, which sets c; None = no counts.

    Returns:
        (L,) the candidate of each prompt.

    Raises:
        FloatingPointError: a score is not finite.
    """
    log_s = F.logsigmoid(_apply(candidates, scale))
    logit = _apply(candidates, use)[:, 0]
    found: list[Tensor] = []
    first = 0
    for part, density in zip(sets, log_densities(sets, candidates, log_s), strict=True):
        c = torch.zeros_like(logit)
        if before is not None:
            c[before[first : first + len(part)]] = 1
        first += len(part)
        total = density + c * F.logsigmoid(logit) + (1 - c) * F.logsigmoid(-logit)
        if not total.isfinite().all():
            raise FloatingPointError
        found.append(torch.from_numpy(linear_sum_assignment(total.numpy(), maximize=True)[1]))
    return torch.cat(found)


def log_densities(sets: Sequence[Tensor], candidates: Tensor, log_s: Tensor) -> list[Tensor]:
    """Return log N(w_l; φ_i, diag s_i²), one (n_v, I) per set of prompts w (n_v, d).

    Args:
        sets: one (n_v, d) per client.
        candidates: φ (I, d).
        log_s: log s (I, d).
    """
    centre = candidates.mean(0)  # the expanded square cancels less the nearer all lie to 0
    phi, precision = candidates - centre, torch.exp(-2 * log_s)
    linear = phi * precision
    constant = (phi * linear).sum(1) / 2 + log_s.sum(1) + phi.shape[1] / 2 * math.log(2 * math.pi)
    # One product per set, not one for all: equal sets then get equal matrices to the last bit,
    # and so equal assignments also between candidates that tie.
    centred = [part - centre for part in sets]
    return [w @ linear.T - w.square() @ precision.T / 2 - constant for w in centred]


def assigned_score(
    prompts: Tensor, candidates: Tensor, columns: Tensor, scale: Layers, use: Layers
) -> Tensor:
    """Return Σ_l log N(w_l; φ_i, diag s(φ_i)²) + log b(φ_i) with i = columns[l], a scalar.

    Args:
        prompts: (L, d).
        candidates: (I, d).
        columns: (L,) the candidate of each prompt; its c is 1.
        scale, use: the networks of s and b.
    """
    phi = candidates[columns]
    log_s = F.logsigmoid(_apply(candidates, scale))[columns]
    density = ((prompts - phi) * torch.exp(-log_s)).square() / 2 + log_s + math.log(2 * math.pi) / 2
    return F.logsigmoid(_apply(candidates, use))[columns].sum() - density.sum()


def initial_networks(width: int, *, seed: int, round: int, client: int) -> tuple[Layers, Layers]:
    """Draw the networks of s (d-128-d) and b (d-128-1), float64, ready for training.

    Weights and biases are uniform in ±1/√(inputs of the layer); ReLU lies between the layers.
    """
    rng = seeds.stream(seed, "pfpt", round, client)

    def drawn(inputs: int, *shape: int) -> Tensor:
        bound = inputs**-0.5
        return torch.from_numpy(rng.uniform(-bound, bound, shape)).requires_grad_()

    def network(out: int) -> Layers:
        return (
            drawn(width, HIDDEN, width),
            drawn(width, HIDDEN),
            drawn(HIDDEN, out, HIDDEN),
            drawn(HIDDEN, out),
        )

    return network(width), network(1)


def _apply(x: Tensor, layers: Layers) -> Tensor:
    """Return the network's output before its sigmoid, (I, out)."""
    weight, bias, last_weight, last_bias = layers
    return F.linear(F.relu(F.linear(x, weight, bias)), last_weight, last_bias)


def _check(
    support: Tensor,
    prompts: Tensor,
    counts: Tensor,
    clients: Sequence[int],
    loops: int,
    limit: int,
) -> None:
    fits = (
        prompts.ndim == 3
        and prompts.shape[2] > 0
        and support.shape == (len(clients), len(prompts))
        and counts.shape == (len(prompts),)
    )
    floats = prompts.is_floating_point() and not counts.is_floating_point()
    if not fits or support.dtype != torch.bool or not floats:
        raise ValueError(
            f"support {tuple(support.shape)} {support.dtype}, prompts {tuple(prompts.shape)} "
            f"{prompts.dtype}, counts {tuple(counts.shape)} {counts.dtype}, {len(clients)} "
            "clients: allowed are (C, M) bool, (M, n, d) floating point, (M,) ints, C"
        )
    if loops < 0:
        raise ValueError(f"loops={loops}: allowed are whole numbers from 0")
    if limit < 1:
        raise ValueError(f"prompts.limit={limit}: allowed are whole numbers from 1")
    for row, client in zip(support, clients, strict=True):
        if not 0 <= client < len(prompts) or not row[client]:
            raise ValueError(f"support: client {client} is not in its own neighbourhood")
    for v in support.any(0).nonzero()[:, 0].tolist():
        if not 1 <= int(counts[v]) <= prompts.shape[1]:
            raise ValueError(
                f"counts: client {v} has {int(counts[v])}; allowed are 1 to {prompts.shape[1]}"
            )
