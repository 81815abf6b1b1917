"""Block: the payload of a worker's clients as NumPy arrays, and what its entries mean.

`prompts`, `head.*` or a CNN's parameters are what clients train; `stats.*` describe their data;
`kept.*` is what an optimizer remembers and never leaves the client.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch

from fedscale.config import RunConfig
from fedscale.local.cohort import COUNT, Memory, Payload
from fedscale.server import fedpft

Block = dict[str, np.ndarray]
"""The payload of a block of C clients, each array with a leading axis of length C."""

STATS, KEPT = "stats.", "kept."
MIXTURES = "stats.mixtures"


def owned(block: Mapping[str, np.ndarray]) -> Block:
    """Return what clients train: neither statistics nor memory."""
    return {key: value for key, value in block.items() if not key.startswith((STATS, KEPT))}


def statistics(block: Mapping[str, np.ndarray]) -> Block:
    """Return the statistics of the clients' data."""
    return {key: value for key, value in block.items() if key.startswith(STATS)}


def sent(config: RunConfig, block: Mapping[str, np.ndarray]) -> list[str]:
    """Return the entries that clients send; heads that statistics replace stay at home."""
    home: tuple[str, ...] = (KEPT,)
    if config.analytic or config.merge.head == "local":
        home = (KEPT, "head.")
    return [key for key in block if not key.startswith(home)]


def message_bytes(block: Mapping[str, np.ndarray], keys: Iterable[str]) -> float:
    """Return the bytes of these entries per client; of prompts and mixtures only what is held."""
    sizes = {key: block[key].nbytes / len(block[key]) for key in keys}
    if "prompts" in sizes and COUNT in block:
        sizes["prompts"] *= float(block[COUNT].mean()) / block["prompts"].shape[1]
    if MIXTURES in sizes:
        sizes[MIXTURES] = float(np.mean([fedpft.message_bytes(m) for m in block[MIXTURES]]))
    return sum(sizes.values())


def tensors(block: Mapping[str, np.ndarray], device: str) -> Payload:
    """Copy a block onto a device (what comes from the object store is read-only)."""
    return {key: torch.tensor(value, device=device) for key, value in block.items()}


def arrays(payload: Mapping[str, torch.Tensor]) -> Block:
    """Return a payload as arrays."""
    return {key: value.detach().cpu().numpy() for key, value in payload.items()}


def join(
    layout: Sequence[range], parts: Sequence[Block | None], keys: Iterable[str] | None = None
) -> Block:
    """Join blocks to arrays with a leading axis of all M clients; zeros where a block is None.

    Blocks whose clients hold different numbers of prompts are padded with zeros.
    """
    present = [block for block in parts if block is not None]
    whole: Block = {}
    for key in present[0] if keys is None else keys:
        shape = np.max([block[key].shape[1:] for block in present], axis=0).astype(int)
        whole[key] = np.zeros((layout[-1].stop, *shape), present[0][key].dtype)
        for clients, block in zip(layout, parts, strict=True):
            if block is not None:
                value = block[key]
                inner = tuple(slice(0, n) for n in value.shape[1:])
                whole[key][(slice(clients.start, clients.stop), *inner)] = value
    return whole


def average(block: Mapping[str, np.ndarray]) -> Block:
    """Return the index-wise mean over clients, with a leading axis of 1."""
    return {key: v.mean(axis=0, keepdims=True, dtype=v.dtype) for key, v in block.items()}


def distinct(block: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return the first client of each different model, and for every client which one it holds."""
    seen: dict[bytes, int] = {}
    count = len(next(iter(block.values())))
    keys = [b"".join(value[c].tobytes() for value in block.values()) for c in range(count)]
    where = np.array([seen.setdefault(key, len(seen)) for key in keys])
    first = np.array([int(np.argmax(where == number)) for number in range(len(seen))])
    return first, where


def prompt_counts(block: Mapping[str, np.ndarray], count: int) -> np.ndarray:
    """Return the prompts that each client holds (C,)."""
    clients = len(next(iter(block.values())))
    if "prompts" not in block:
        return np.zeros(clients, dtype=np.int64)
    return block.get(COUNT, np.full(clients, block["prompts"].shape[1]))


def remember(memory: Memory) -> Block:
    """Return an optimizer's memory as entries of a block."""
    parts = {
        **{f"{KEPT}anchor.{key}": value for key, value in memory.anchor.items()},
        **{f"{KEPT}moment.{key}": value for key, value in memory.moments.items()},
        f"{KEPT}steps": memory.steps,
    }
    return arrays(parts)


def recall(
    block: Mapping[str, np.ndarray], payload: Payload, restart: bool, carry: bool, device: str
) -> Memory | None:
    """Return the memory that training goes on from; None = anew.

    Args:
        block: the clients' block.
        payload: what they hold, the anchors of a regime that starts here.
        restart: whether a regime starts here.
        carry: whether moments outlive regimes.
        device: where the tensors go.
    """
    if f"{KEPT}steps" not in block or (restart and not carry):
        return None

    def part(prefix: str) -> Payload:
        start = len(KEPT + prefix)
        found = {k[start:]: v for k, v in block.items() if k.startswith(KEPT + prefix)}
        return tensors(found, device)

    anchor = part("anchor.")
    if restart:
        anchor = {key: payload[key].clone() for key in anchor}
    return Memory(anchor, part("moment."), torch.tensor(block[f"{KEPT}steps"]))
