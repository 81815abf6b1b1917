"""The state from which an unfinished run goes on: one safetensors file per run.

It is written beside and renamed after the records of the same round, so a run resumes from the
last round whose records are complete. Safetensors holds arrays and text, never code.
"""

from __future__ import annotations

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from fedscale import store

State = dict[str, np.ndarray]


def _name(run_id: str) -> str:
    return f"_state/{run_id}.safetensors"


def write(root: str, sweep: str, run_id: str, round: int, state: State) -> None:
    """Write a run's payload after `round`; replaces the one before at once."""
    content = save({**state, "round": np.array(round)})
    store.write_bytes(root, f"{sweep}/{_name(run_id)}", content)


def read(root: str, sweep: str, run_id: str) -> tuple[int, State] | None:
    """Return (round, payload) of the last committed round, or None.

    A file that is no valid state (damaged by someone else) counts as none: the run starts over.
    """
    content = store.read_bytes(root, f"{sweep}/{_name(run_id)}") if root else None
    if content is None:
        return None
    try:
        state = load(content)
    except SafetensorError:
        return None
    return int(state.pop("round")), state


def remove(root: str, sweep: str, run_id: str) -> None:
    """Forget a run's state, so that it starts over."""
    store.remove(root, f"{sweep}/{_name(run_id)}")
