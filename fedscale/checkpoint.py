"""The state from which an unfinished run goes on: one safetensors file per run.

It is written beside and renamed after the records of the same round, so a run resumes from the
last round whose records are complete. Safetensors holds arrays and text, never code.
"""

from __future__ import annotations

import json

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from fedscale import files, store

State = dict[str, np.ndarray]


def _name(sweep: str, run_id: str) -> str:
    return f"{sweep}/_state/{run_id}.safetensors"


def write(root: str, sweep: str, run_id: str, round: int, state: State) -> None:
    """Write a run's payload after `round`; it replaces the one before at once.

    Raises:
        StoreError: the file cannot be written.
    """
    order = json.dumps(list(state))
    content = save({**state, "round": np.array(round)}, {"order": order})
    files.write_bytes(root, _name(sweep, run_id), content)


def read(root: str, sweep: str, run_id: str) -> tuple[int, State] | None:
    """Return (round, payload) of the last committed round, or None.

    A file that is no valid state (damaged by someone else) counts as none: the run starts over.

    Raises:
        StoreError: there may be one, but it cannot be read now.
    """
    content = files.read_bytes(root, _name(sweep, run_id)) if root else None
    if content is None:
        return None
    try:
        state = load(content)
        # Sums over a payload's arrays go in its order, which the format does not keep.
        return int(state["round"]), {name: state[name] for name in _order(content)}
    except (SafetensorError, KeyError, ValueError):
        return None


def resumable(root: str, sweep: str, run_id: str) -> tuple[int, State] | None:
    """Return (round, payload) from which a run can go on, or None where it starts over.

    None too if records of rounds before are missing: someone removed them, or they were removed
    while a process that nobody knew of went on.

    Raises:
        StoreError: as `read`; or a file among the records that is not of the store.
    """
    found = read(root, sweep, run_id)
    return found if found and store.reaches(root, sweep, run_id, found[0]) else None


def _order(content: bytes) -> list[str]:
    """Return the names of a state's arrays in the order in which they were written."""
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    return list(json.loads(header["__metadata__"]["order"]))


def remove(root: str, sweep: str, run_id: str) -> None:
    """Forget a run's state, so that it starts over.

    Raises:
        StoreError: it cannot be removed.
    """
    system, path = files.locate(files.join(root, _name(sweep, run_id)))
    with files.named(path):
        if system.get_file_info(path).is_file:
            system.delete_file(path)
