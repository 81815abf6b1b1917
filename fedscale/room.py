"""Room for a run: which workers fit on which machines, and waiting until a cluster has grown.

A worker's CPUs and GPUs lie on one machine, a share below 1 on one GPU, so totals say too little:
4 workers of 2 CPUs do not fit on 8 machines of 1 CPU, 80 of 0.18 GPU not on 15 GPUs. Ray lets what
does not fit wait for ever; here it is computed first, and every wait has an end.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedscale.config import ConfigError, RunConfig, gpu_share

GROWTH_S = 1200.0
"""Seconds that a cluster is given to grow (a spot GPU to start and to install)."""
JOIN_S = 180.0
"""Seconds that the machines which a cluster always has are given to join."""


@dataclass(frozen=True)
class Machine:
    """What Ray may place on one machine of a cluster."""

    cpus: float
    gpus: float = 0.0


def fitting(machines: Sequence[Machine], cpus: int, share: float) -> int:
    """Return how many workers of `cpus` CPUs and `share` of a GPU fit at once."""
    count = 0
    for machine in machines:
        here = min(machine.cpus, 10**9) // cpus if cpus else 10**9
        if 0 < share < 1:
            here = min(here, int(machine.gpus) * int(1 / share + 1e-2))
        elif share:
            here = min(here, machine.gpus // share)
        count += int(here)
    return count


def largest_share(machines: Sequence[Machine], workers: int) -> float:
    """Return the largest share 1/k, floored to 4 digits, of which `workers` fit; 0 without GPUs."""
    gpus = sum(int(machine.gpus) for machine in machines)
    per_gpu = -(-workers // gpus) if gpus else 0
    return int(1e4 / per_gpu) / 1e4 if per_gpu else 0.0


def fit(config: RunConfig, machines: Sequence[Machine], share: float | None = None) -> float:
    """Return the GPUs of each worker of a run, if all its workers fit on these machines at once.

    Args:
        config: the run.
        machines: those there are, or may be.
        share: GPUs of each worker, in place of `config.gpus_per_worker`.

    Raises:
        ConfigError: they do not; says what was asked, what there is and what would fit.
    """
    workers, cpus = len(config.blocks()), config.cpus_per_worker
    largest = largest_share(machines, workers)
    if share is None:
        asked = gpu_share(config.gpus_per_worker)
        share = largest if asked < 0 else asked
    if share and fitting(machines, 0, share) < workers:
        gpus = sum(machine.gpus for machine in machines)
        raise ConfigError(
            f"gpus_per_worker={config.gpus_per_worker}: {workers} worker(s) of {share:g} GPU need "
            f"more than the {gpus:g} GPUs there are; {fitting(machines, 0, share)} would fit, or "
            f"gpus_per_worker={largest:g}"
        )
    held = fitting(machines, cpus, share)
    if held < workers:
        most = max((int(m.cpus) for m in machines if m.gpus >= share), default=0)
        would = f"workers={held} would fit" if held else f"at most cpus_per_worker={most}"
        with_gpu = f" and {share:g} GPU" if share else ""
        raise ConfigError(
            f"workers={workers}: with cpus_per_worker={cpus} each needs {cpus} CPUs{with_gpu} on "
            f"one machine, there are {listed(machines)}; {would}"
        )
    return share


def listed(machines: Sequence[Machine]) -> str:
    """Return the machines in words, equal ones counted."""
    kinds = Counter(m for m in machines if m.cpus or m.gpus).most_common(4)
    words = [f"{n} × {m.cpus:g} CPUs" + (f" + {m.gpus:g} GPUs" if m.gpus else "") for m, n in kinds]
    return ", ".join(words) or "no machines"


def machines_here() -> list[Machine]:
    """Return the living machines of the session's cluster."""
    import ray

    alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return [Machine(found.get("CPU", 0.0), found.get("GPU", 0.0)) for found in alive]


def machines_to_come(address: str) -> list[Machine]:
    """Return the machines that the autoscaler of `ray up` may start; of unknown size: 0 CPUs.

    The limits lie on the head, in the file from which the autoscaler has them.
    """
    kinds, most = _limits(address)
    found = [
        Machine(kind.get("resources", {}).get("CPU", 0), kind.get("resources", {}).get("GPU", 0))
        for kind in kinds
        for _ in range(kind.get("max_workers", 0))
    ]
    return sorted(found, key=lambda machine: (-machine.gpus, -machine.cpus))[:most]


def _limits(address: str) -> tuple[list[dict[str, Any]], int]:
    note = Path.home() / "ray_bootstrap_config.yaml"
    if address == "local" or not note.is_file():
        return [], 0
    try:
        content = json.loads(note.read_text())
        return list(content["available_node_types"].values()), content["max_workers"]
    except (ValueError, KeyError):  # written by something else
        return [], 0


def most_machines(address: str) -> int:
    """Return how many machines the session's cluster has or may have at once."""
    return max(len(machines_here()), 1 + len(machines_to_come(address)))


def admit(
    config: RunConfig,
    address: str = "local",
    tell: Callable[[str], Any] = lambda line: None,
    growth_s: float = GROWTH_S,
    join_s: float = JOIN_S,
) -> float:
    """Return the GPUs of each worker of a run, once the session's cluster can hold the run.

    A cluster of `ray up` is given time to start what it must and may; every other cluster is
    judged as it is. Nothing is left pending.

    Args:
        config: the run.
        address: of the session, as resolved.
        tell: called with a line before each wait.
        growth_s: seconds that machines are given to start.
        join_s: seconds that the machines a cluster always has are given to join.

    Raises:
        ConfigError: the run does not fit, or the machines did not come; says what was asked, what
            there is and what would fit.
    """
    promised = 1 + sum(kind.get("min_workers", 0) for kind in _limits(address)[0])
    limit = time.monotonic() + join_s
    if len(machines_here()) < promised:
        tell(f"waiting for {promised} machines, at most {join_s:.0f} s ...")
    while len(machines_here()) < promised and time.monotonic() < limit:
        time.sleep(min(1.0, join_s))
    here = machines_here()
    more = Counter(machines_to_come(address)) - Counter(here)
    share = fit(config, [*here, *more.elements()])
    workers = len(config.blocks())
    if fitting(here, config.cpus_per_worker, share) < workers:
        tell(f"waiting for the cluster to grow, at most {growth_s:.0f} s ...")
        _grow(config.cpus_per_worker, share, workers, growth_s)
    return share


def _grow(cpus: int, share: float, workers: int, growth_s: float) -> None:
    """Ask the autoscaler for room for one run and wait for it."""
    from ray.util import placement_group, remove_placement_group

    bundle = {"CPU": float(cpus)} | ({"GPU": share} if share else {})
    group = placement_group([bundle] * workers)
    try:
        if not group.wait(timeout_seconds=growth_s):
            raise ConfigError(
                f"workers={workers}: of {cpus} CPUs and {share:g} GPU did not find room within "
                f"{growth_s:.0f} s; there are {listed(machines_here())} (`ray status` on the head "
                "says why no more came)"
            )
    finally:
        remove_placement_group(group)
