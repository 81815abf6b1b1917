"""What a block's clients make of their neighbours' payloads in one round."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from fedscale import blocks
from fedscale.blocks import Block
from fedscale.config import RunConfig
from fedscale.local.cohort import COUNT
from fedscale.merge import mean, ot, pfpt
from fedscale.regimes.step import Step


def mix(
    config: RunConfig,
    clients: range,
    step: Step,
    previous: Block,
    own: Block,
    others: Sequence[Block | None],
) -> tuple[Block, dict[str, Any]]:
    """Merge every client of a block with its neighbours; see `ClientWorker.mix`.

    Args:
        config: the run.
        clients: the block's C clients.
        step: gives the mixing matrix; OT merging reads its support.
        previous: the block before this round's training (the OT merge's start).
        own: the block after training.
        others: every block in order, None where no neighbour lives: after training, or before it
            when step.order is "combine".

    Returns:
        The merged block, and {"bytes", "bytes_prompts", "theorem_1"}.

    Raises:
        pfpt.TooManyPrompts: a client's prompts exceed prompts.limit.
    """
    here = np.arange(clients.start, clients.stop)
    sent = blocks.sent(config, own)
    received = blocks.join(config.blocks(), others, sent)
    weights = torch.as_tensor(step.weights[here])
    merged: dict[str, torch.Tensor] = {}
    trace: list[ot.OTMerge] = []
    name = config.merge.name
    for key, value in received.items():
        if key == "prompts" and name == "ot":
            merged[key] = _transport(config, step, weights != 0, here, previous, value, trace)
        elif key.startswith("prompts") and name == "pfpt":
            continue
        else:
            merged[key] = mean.mean_merge(weights, torch.as_tensor(value))
    if name == "pfpt":
        merged |= _prune(config, clients, step, weights != 0, received)
    result = own | blocks.arrays(merged)
    if step.order == "combine":
        for key in merged:
            result[key] = result[key] + (own[key] - previous[key])
    idle = ~step.active[here]
    if idle.any():
        for key in merged:
            # PFPT keeps idle clients itself; its rows may have another length than before.
            if name != "pfpt" or not key.startswith("prompts"):
                result[key][idle] = own[key][idle]
    m = config.merge
    return result, {
        "bytes": blocks.message_bytes(own, sent),
        "bytes_prompts": blocks.message_bytes(own, [k for k in sent if k == "prompts"]),
        "theorem_1": ot.theorem_1(trace, m.epsilon, m.lam, m.sigma2),
    }


def _prune(
    config: RunConfig, clients: range, step: Step, support: torch.Tensor, received: Block
) -> dict[str, torch.Tensor]:
    """Merge neighbourhoods' prompts by PFPT; pads to the largest number of survivors."""
    prompts, counts = pfpt.merge_neighbourhoods(
        support,
        torch.as_tensor(received["prompts"]),
        torch.as_tensor(received[COUNT]),
        loops=config.merge.loops,
        limit=config.prompts.limit,
        seed=config.seed,
        round=step.round,
        clients=list(clients),
    )
    return {"prompts": prompts, COUNT: counts}


def _transport(
    config: RunConfig,
    step: Step,
    support: torch.Tensor,
    own: np.ndarray,
    previous: Block,
    received: np.ndarray,
    trace: list[ot.OTMerge],
) -> torch.Tensor:
    """Merge neighbourhoods' prompts by optimal transport (eq. 6–9); `own` are own rows."""
    watched, m = config.diagnostics, config.merge
    updated = torch.as_tensor(received)
    if m.start == "previous":
        start = torch.as_tensor(previous["prompts"].copy())
    elif m.start == "updated":
        start = updated[torch.as_tensor(own)]
    else:
        start = ot.sample_starts(support, updated, own, seed=config.seed, round=step.round)
    merged = ot.merge_neighbourhoods(
        support,
        updated,
        start,
        own,
        epsilon=m.epsilon,
        lam=m.lam,
        sigma2=m.sigma2,
        steps=m.steps,
        schedule=m.schedule,
        epsilon_init=m.epsilon_init,
        tolerance=m.tolerance,
        objective=watched,
        trace=trace if watched else None,
    )
    return merged[0]
