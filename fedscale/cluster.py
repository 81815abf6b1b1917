"""Ray sessions: find or start one, check that what is asked for fits, end only what was started."""

from __future__ import annotations

import os
import shlex
import socket
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedscale.config import ConfigError, RunConfig, gpu_share

QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_SCHEDULER_EVENTS": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_GLOBAL_CHECKPOINT_S": "1",
    "TUNE_WARN_EXCESSIVE_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S": "0",
    "RAY_AIR_NEW_OUTPUT": "0",
}
SOCKET_ROOM = 60
"""Longest temporary folder in whose depth Ray's sockets still fit the 107 bytes of a path."""


def cpu_count() -> int:
    """Return the processors this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def reachable(address: str, timeout_s: float = 2.0) -> bool:
    """Return whether something listens at host:port."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]") or "127.0.0.1", int(port)), timeout_s):
            return True
    except (OSError, ValueError):
        return False


def running_cluster() -> str:
    """Return the address of a cluster this machine belongs to, or "".

    Ray's own search waits minutes for a cluster that was killed and left its address behind;
    this one asks the address first.
    """
    found = os.environ.get("RAY_ADDRESS", "")
    if not found:
        root = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
        note = Path(root) / "ray" / "ray_current_cluster"
        found = note.read_text().strip() if note.is_file() else ""
    return found if found and reachable(found) else ""


def resolve(address: str) -> str:
    """Return "local" or the host:port to attach to.

    Raises:
        ConfigError: an address that is none of auto, local and host:port, or where nobody listens.
    """
    if address == "auto":
        return running_cluster() or "local"
    if address == "local":
        return address
    host, sign, port = address.rpartition(":")
    if not (sign and host and port.isdigit() and 0 < int(port) < 65536):
        raise ConfigError(f"address={address}: allowed: auto, local, host:port")
    if not reachable(address):
        raise ConfigError(f"address={address}: no cluster answers there")
    return address


@contextmanager
def session(address: str) -> Iterator[None]:
    """Attach to the cluster at `address` (see `resolve`), or start a local one, while inside.

    A session that the caller had already is used and left as it is.
    """
    os.environ.update({k: v for k, v in QUIET.items() if k not in os.environ})
    import ray

    if ray.is_initialized():
        yield
        return
    options: dict[str, Any] = {"logging_level": "ERROR", "log_to_driver": False}
    if address == "local":
        options |= {"include_dashboard": False, "_temp_dir": short_temp_dir()}
        if shlex.quote(sys.executable) != sys.executable:
            # Ray starts the workers of trials by a shell line in which it quotes all but this.
            options["runtime_env"] = {"py_executable": shlex.quote(sys.executable)}
    ray.init(address=address, **{k: v for k, v in options.items() if v is not None})
    try:
        yield
    finally:
        ray.shutdown()


def short_temp_dir() -> str | None:
    """Return a temporary folder with room for Ray's sockets, or None where the default has it."""
    default = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    if len(os.path.join(default, "ray")) <= SOCKET_ROOM:
        return None
    return tempfile.mkdtemp(prefix="ray-", dir="/tmp")


def local_gpus() -> int:
    """Return the GPUs of this machine."""
    import torch

    return torch.cuda.device_count()


def share_of_gpu(config: RunConfig, gpus: float) -> float:
    """Return the GPUs of each worker, given how many there are in all.

    Raises:
        ConfigError: a share is asked for where there is no GPU, or all workers need more.
    """
    share = gpu_share(config.gpus_per_worker)
    workers = len(config.blocks())
    if share < 0:
        return packed_share(workers, int(gpus))
    if share == 0:
        return 0.0
    fits = int(gpus) * int(1 / share + 1e-2) if share < 1 else int(gpus // share)
    if fits < workers:
        raise ConfigError(
            f"gpus_per_worker={config.gpus_per_worker}: {workers} worker(s) of {share:g} GPU need "
            f"more than the {gpus:g} GPUs there are; {fits} would fit, or gpus_per_worker=0"
        )
    return share


def packed_share(workers: int, gpus: int) -> float:
    """Return the largest share, at most one GPU, at which all workers of a run have one."""
    per_gpu = -(-workers // gpus) if gpus else 0
    return int(1e4 / per_gpu) / 1e4 if per_gpu else 0.0


def check_cpus(config: RunConfig, cpus: float) -> None:
    """Check that the workers of one run fit.

    Raises:
        ConfigError: they do not; says what was asked, what there is and what would fit.
    """
    workers = len(config.blocks())
    if config.uses_ray and workers * config.cpus_per_worker > cpus:
        raise ConfigError(
            f"workers={workers}: with cpus_per_worker={config.cpus_per_worker} they need "
            f"{workers * config.cpus_per_worker} CPUs, there are {cpus:g}; at most "
            f"workers={int(cpus // config.cpus_per_worker)}"
        )


def preflight(config: RunConfig, address: str) -> None:
    """Check a run against this machine before anything starts (`address` as resolved)."""
    if address == "local" or not config.uses_ray:
        check_cpus(config, cpu_count())
        if gpu_share(config.gpus_per_worker) > 0:
            share_of_gpu(config, local_gpus())
