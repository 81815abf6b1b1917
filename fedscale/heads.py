"""Classifiers that are computed rather than trained: from statistics, or by a server.

Clients describe their data once (`describe_data`); what they sent is mixed like any payload; a
head is then computed from what a client holds (`deploy`), or a server learns one for all
(`learn`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from fedscale import blocks
from fedscale.blocks import MIXTURES, Block
from fedscale.config import RunConfig
from fedscale.local import statistics
from fedscale.local.cohort import CohortData
from fedscale.local.prompting import PromptLearner
from fedscale.models.cnn import Cnn
from fedscale.problems import Learner
from fedscale.server import analytic, coboosting, dense, fedcgs, fedpft

GRAM, SUMS, COUNTS = "stats.gram", "stats.sums", "stats.counts"
"""Σ h hᵀ packed (d(d+1)/2), Σ h yᵀ (d, K), samples per class (K,), of FedCGS only."""


def describe_data(
    config: RunConfig,
    learner: Learner,
    block: Block,
    data: CohortData,
    num_classes: int,
    clients: range,
) -> Block:
    """Compute the statistics of every client's data under its own prompts, in one pass.

    Args:
        config: the run; `head.name` says which statistics.
        learner: a frozen backbone with prompts.
        block: what the clients hold after training.
        data: their samples.
        num_classes: K.
        clients: global numbers of the block's clients.

    Returns:
        The entries `stats.*`, float64, with a leading client axis.
    """
    assert isinstance(learner, PromptLearner), "checked by the configuration"
    payload = blocks.tensors(blocks.owned(block), str(learner.device))
    found: dict[str, list[np.ndarray]] = {}
    for client, rows in enumerate(data.rows):
        index = torch.from_numpy(rows).to(data.inputs.device)
        labels = data.labels[index.to(data.labels.device)]
        parts = learner.features(payload, data.inputs[index], client)
        chunks = ((h, labels[part].to(h.device)) for part, h in parts)
        width = learner.model.width
        if config.head.name == "fedpft":
            each = _mixtures(config, chunks, width, num_classes, clients[client])
        else:
            sums = statistics.client_statistics(chunks, [len(rows)], width, num_classes)
            each = {GRAM: sums.gram[0].cpu().numpy(), SUMS: sums.sums[0].cpu().numpy()}
            if config.head.name == "fedcgs":
                each[COUNTS] = sums.counts[0].cpu().numpy()
        for key, value in each.items():
            found.setdefault(key, []).append(value)
    return {key: np.stack(value) for key, value in found.items()}


def _mixtures(
    config: RunConfig, chunks: Any, width: int, num_classes: int, client: int
) -> dict[str, np.ndarray]:
    empty = np.zeros((0, width), np.float32), np.zeros(0, np.int64)
    pairs = [empty, *((h.cpu().numpy(), y.cpu().numpy()) for h, y in chunks)]
    features, labels = (np.concatenate(part) for part in zip(*pairs, strict=True))
    fitted = fedpft.mixtures(features, labels, num_classes, seed=config.seed, client=client)
    return {MIXTURES: fitted}


def deploy(config: RunConfig, block: Block, clients: int) -> Block:
    """Return the block with the heads that its statistics give.

    Args:
        config: the run.
        block: C clients' payload; each holds the network's mean statistics, or its view of it.
        clients: M; sums over the network are M times the mean.

    Raises:
        SingularSystem: the statistics decide no head; says what to do.
    """
    if config.head.name not in ("ridge", "fedcgs") or GRAM not in block:
        return block
    first, where = blocks.distinct(blocks.statistics(block))
    weights, biases = [], []
    for row in first:
        gram = statistics.unpack_symmetric(torch.as_tensor(block[GRAM][row] * clients))
        sums = torch.as_tensor(block[SUMS][row] * clients)
        if config.head.name == "ridge":
            weight = analytic.ridge_solve(gram, sums, config.head.lam)
            bias = torch.zeros(sums.shape[1], dtype=torch.float64)
        else:
            counts = torch.as_tensor(block[COUNTS][row] * clients)
            weight, bias = fedcgs.head(sums, counts, gram, config.head.lam)
        weights.append(weight.T.float().numpy())
        biases.append(bias.float().numpy())
    heads = {
        "head.weight": np.ascontiguousarray(np.stack(weights)[where]),
        "head.bias": np.stack(biases)[where],
    }
    return block | heads


def head_error(deployed: Block, average: Block) -> float | None:
    """Return the mean over clients of ‖W_u − W‖ / ‖W‖, W the head of all statistics together.

    Args:
        deployed: all M clients' payload with their heads, of `deploy`.
        average: their mean, deployed; symmetric mixing keeps the mean of the statistics, so its
            head is the exact one.

    Returns:
        None where heads do not come from sums.
    """
    if GRAM not in deployed:
        return None
    exact, heads = average["head.weight"], deployed["head.weight"]
    gaps = np.linalg.norm((heads - exact).reshape(len(heads), -1).astype(np.float64), axis=1)
    return float(gaps.mean() / np.linalg.norm(exact))


def learn(config: RunConfig, learner: Learner, block: Block, samples: Sequence[int]) -> Block:
    """Learn one model for all clients from what they sent, as the server does.

    Args:
        config: the run.
        learner: what clients train.
        block: all M clients' payload and statistics.
        samples: training samples of each client.

    Returns:
        The entries that every client replaces, with a leading axis of 1.
    """
    if config.head.name == "fedpft":
        weight, bias = fedpft.learn(block[MIXTURES], seed=config.seed)
        return blocks.arrays({"head.weight": weight[None], "head.bias": bias[None]})
    assert isinstance(learner, Cnn), "checked by the configuration"
    payload = blocks.tensors(blocks.owned(block), str(learner.device))
    method = dense if config.server.name == "dense" else coboosting
    student = method.distil(
        learner,
        payload,
        samples,
        epochs=config.server.epochs,
        lr=config.server.lr,
        batch=config.local.batch_size,
        seed=config.seed,
        generator_steps=config.server.generator_steps,
        generator_width=config.server.generator_width,
        student_steps=config.server.student_steps,
    )
    return blocks.arrays(student)
