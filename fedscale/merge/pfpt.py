"""PFPT's probabilistic merge of prompt sets, run per neighbourhood (`pfpt_dec`).

Weng et al. 2024, Probabilistic Federated Prompt-Tuning with Non-IID and Imbalanced Data. Every
prompt of a neighbourhood is a candidate φ_i; each client's prompts are assigned to candidates one
to one, and candidates that anyone is assigned to survive. Without a server that prunes, each
client's survivors are its neighbours' candidates of the next round, and their number grows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from fedscale import seeds

RATE = 1e-3
HIDDEN = 128


class TooManyPrompts(ValueError):
    """A client's prompts exceed prompts.limit; names round, client and count."""


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
    """Merge every client's neighbourhood; clients do not depend on who shares the call.

    Args:
        support: (C, M) bool, the neighbourhoods, own client included.
        prompts: (M, n_max, d), zeros behind a client's own count.
        counts: (M,) prompts of each client.
        loops: alternations of assignment and Adam step.
        limit: prompts per client at which a run is ended.
        seed: the run's seed.
        round: communication round.
        clients: C global client numbers, the rows of support.

    Returns:
        Prompts (C, n', d) padded with zeros to the largest count, and counts (C,). A client
        without neighbours keeps its prompts exactly.

    Raises:
        TooManyPrompts: more survivors than `limit`.
        ValueError: a client's prompts are not finite.
    """
    finite = prompts.isfinite().flatten(1).all(dim=1)
    if not finite.all():
        raise ValueError(f"prompts: client {int((~finite).nonzero()[0])} is not finite")
    found = []
    for row, client in zip(support, clients, strict=True):
        sets = [prompts[v, : int(counts[v])] for v in row.nonzero()[:, 0].tolist()]
        own = prompts[client, : int(counts[client])]
        merged = own if len(sets) < 2 else merge(sets, loops, seed, round, int(client))
        if len(merged) > limit:
            raise TooManyPrompts(
                f"round {round}, client {client}: {len(merged)} prompts survive the merge, more "
                f"than prompts.limit={limit}; the run ends here, as their number only grows"
            )
        found.append(merged)
    sizes = torch.tensor([len(part) for part in found])
    padded = prompts.new_zeros(len(found), int(sizes.max()), prompts.shape[2])
    for row, part in zip(padded, found, strict=True):
        row[: len(part)] = part
    return padded, sizes


def merge(sets: Sequence[Tensor], loops: int, seed: int, round: int, client: int) -> Tensor:
    """Merge prompt sets (n_v, d); return the surviving candidates, moved by `loops` Adam steps.

    The loss of a step is the negative mean score of the assigned pairs; it trains the candidates
    and the two networks s and b.
    """
    candidates = torch.cat(list(sets)).detach().clone().requires_grad_()
    scale, use = _networks(candidates.shape[1], seed, round, client)
    parameters = [candidates, *scale, *use]
    rule = torch.optim.Adam(parameters, lr=RATE)
    for _ in range(loops):
        rows, columns = assign(sets, candidates, scale, use)
        found = scores(torch.cat(list(sets))[rows], candidates, scale)
        chosen = found.gather(1, columns[:, None])[:, 0]
        used = F.logsigmoid(_mlp(candidates, use)[:, 0])[columns]
        rule.zero_grad()
        (-(chosen + used).mean()).backward()
        rule.step()
    _, columns = assign(sets, candidates, scale, use)
    return candidates.detach()[columns.unique()]


@torch.no_grad()
def assign(
    sets: Sequence[Tensor], candidates: Tensor, scale: list[Tensor], use: list[Tensor]
) -> tuple[Tensor, Tensor]:
    """Assign each client's prompts to candidates, one to one and at the largest total score.

    score[l, i] = log N(w_l; φ_i, diag s(φ_i)²) + log Bern(c_i; b(φ_i)), c_i = 1 if a client before
    has taken candidate i. Clients come in the order of `sets`.

    Returns:
        Rows of the sets one after the other (L,), and their candidates (L,).
    """
    b = _mlp(candidates, use)[:, 0]
    taken = torch.zeros(len(candidates))
    columns = []
    for part in sets:
        prior = torch.where(taken > 0, F.logsigmoid(b), F.logsigmoid(-b))
        found = scores(part, candidates, scale) + prior
        _, chosen = linear_sum_assignment(found.numpy(), maximize=True)
        columns.append(torch.from_numpy(chosen))
        taken[chosen] += 1
    return torch.arange(sum(map(len, sets))), torch.cat(columns)


def scores(prompts: Tensor, candidates: Tensor, scale: list[Tensor]) -> Tensor:
    """Return log N(w_l; φ_i, diag s(φ_i)²), (L, I), with s = sigmoid of a network of φ."""
    s = torch.sigmoid(_mlp(candidates, scale))
    gaps = (prompts[:, None] - candidates[None]) / s
    each = gaps.square().sum(2) / 2 + s.log().sum(1)
    return -each - candidates.shape[1] / 2 * math.log(2 * math.pi)


def _mlp(x: Tensor, weights: list[Tensor]) -> Tensor:
    first, bias, second, last = weights
    return F.linear(F.relu(F.linear(x, first, bias)), second, last)


def _networks(width: int, seed: int, round: int, client: int) -> tuple[list[Tensor], list[Tensor]]:
    rng = seeds.stream(seed, "pfpt", round, client)

    def drawn(*shape: int) -> Tensor:
        bound = shape[-1] ** -0.5
        values = rng.uniform(-bound, bound, shape).astype(np.float32)
        return torch.from_numpy(values).requires_grad_()

    def network(out: int) -> list[Tensor]:
        zeros = [torch.zeros(n, requires_grad=True) for n in (HIDDEN, out)]
        return [drawn(HIDDEN, width), zeros[0], drawn(out, HIDDEN), zeros[1]]

    return network(width), network(1)
