"""Ray sessions: find or start one, check that what is asked for fits, end only what was started.

Ray itself waits where this module answers: for a cluster that is gone, for a token that is wrong,
for a worker that no machine can hold. Every wait here has an end.
"""

from __future__ import annotations

import logging
import os
import shlex
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedscale.config import ConfigError, RunConfig, gpu_share
from fedscale.room import Machine, fit

QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_SCHEDULER_EVENTS": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    # What Tune keeps is never read, so seldom written (some 25 requests to an object store).
    "TUNE_GLOBAL_CHECKPOINT_S": "60",
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


def local_gpus() -> int:
    """Return the GPUs of this machine."""
    import torch

    return torch.cuda.device_count()


def reachable(address: str, timeout_s: float = 2.0) -> bool:
    """Return whether a server that speaks gRPC, as Ray's do, answers at host:port.

    That a port is open says little: the port of a cluster that was killed may be another's now,
    and Ray waits minutes for a server that is silent.
    """
    host, _, port = address.rpartition(":")
    settings = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])  # an empty frame of type 4, which both sides send
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout_s) as link:
            if os.environ.get("RAY_USE_TLS") == "1":
                return True
            link.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + settings)
            answer = b""
            while len(answer) < 4 and (more := link.recv(len(settings))):
                answer += more
            return answer[3:4] == settings[3:4]
    except (OSError, ValueError, OverflowError):
        return False


def running_cluster() -> str:
    """Return the address of a cluster this machine belongs to and may use, or ""."""
    found = os.environ.get("RAY_ADDRESS", "")
    if found in ("", "auto"):
        root = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
        try:
            found = (Path(root) / "ray" / "ray_current_cluster").read_text().strip()
        except (OSError, ValueError):  # none, or another user's
            return ""
    return "" if _fault(found) else found


def resolve(address: str) -> str:
    """Return "local" or the host:port to attach to.

    Raises:
        ConfigError: an address that is none of auto, local and host:port, or a cluster that this
            machine cannot use; says why, and how to run on its head.
    """
    key, asked = "address", address
    if address == "auto":
        key, asked = "RAY_ADDRESS", os.environ.get("RAY_ADDRESS") or "auto"
    if asked == "auto":
        return running_cluster() or "local"
    if asked == "local":
        return asked
    host, sign, port = asked.rpartition(":")
    if not (sign and host and "/" not in host and port.isdigit() and 0 < int(port) < 65536):
        raise ConfigError(f"{key}={asked}: allowed: auto, local, host:port")
    fault = _fault(asked)
    if fault:
        raise ConfigError(f"{key}={asked}: {fault}")
    return asked


def _fault(address: str) -> str:
    """Return why this machine cannot use the cluster at host:port, or ""; takes seconds."""
    how = f"run on the cluster's head: {on_the_head()}"
    if not reachable(address):
        return f"no cluster answers there; {how}"
    from ray._private.authentication import authentication_token_setup
    from ray._private.services import find_node_ids
    from ray._raylet import GcsClient  # type: ignore[attr-defined]

    logging.getLogger("ray").setLevel(logging.ERROR)
    answer = _greet(address)
    if "InvalidAuthToken" in answer and "RAY_AUTH_MODE" not in os.environ:
        # Ray shows the token that it has only where no address is given.
        authentication_token_setup.maybe_enable_token_auth_if_token_available(False)
        answer = _greet(address)
    if "InvalidAuthToken" in answer:
        return "the cluster wants another token than ~/.ray/auth_token or RAY_AUTH_TOKEN"
    if "WrongClusterID" not in answer:
        return f"no Ray cluster answers there; {how}"
    try:
        nodes = GcsClient(address=address).get_all_node_info(timeout=5)
    except Exception as error:  # it ended just now
        return f"the cluster does not answer: {' '.join(str(error).split())[:200]}"
    if not {node.hex() for node in nodes} & set(find_node_ids()):
        return f"this machine is not one of that cluster; {how}"
    return ""


def _greet(address: str) -> str:
    """Return what Ray's server says to a client of another cluster.

    With the right number of the cluster Ray retries for 20 s before it says that a token is
    wrong; a wrong number is answered at once.
    """
    from ray._raylet import GcsClient  # type: ignore[attr-defined]

    try:
        GcsClient(address=address, cluster_id="ab" * 28).check_alive([], timeout=3)
    except Exception as error:  # of several kinds, none of them public
        return str(error)
    return ""


def on_the_head() -> str:
    """Return the command that runs this script on the head of the cluster of cluster.yaml."""
    script = Path(sys.argv[0])
    name = script.name if script.parent.name == "sweeps" else "dfrost_eps.py"
    return f"ray exec cluster.yaml 'cd ~/fedscale && python sweeps/{name} …'"


def elsewhere(address: str) -> str:
    """Return a line for a user who started a cluster from here and is about to run here, or ""."""
    if address != "local" or not list(Path(tempfile.gettempdir()).glob("ray-config-*")):
        return ""
    return f"running on this machine; on the cluster that `ray up` started: {on_the_head()}"


@contextmanager
def session(address: str) -> Iterator[None]:
    """Attach to the cluster at `address` (see `resolve`), or start a local one, while inside.

    A session that the caller had already is used and left as it is.

    Raises:
        ConfigError: the cluster refuses, for one by its version of Ray or Python.
    """
    os.environ.update({k: v for k, v in QUIET.items() if k not in os.environ})
    import ray

    if ray.is_initialized():
        yield
        return
    options: dict[str, Any] = {"logging_level": "ERROR", "log_to_driver": False}
    own_folder = short_temp_dir() if address == "local" else None
    if address == "local":
        options |= {"include_dashboard": False, "_temp_dir": own_folder}
        if shlex.quote(sys.executable) != sys.executable:
            # Ray starts the workers of trials by a shell line in which it quotes all but this.
            options["runtime_env"] = {"py_executable": shlex.quote(sys.executable)}
    try:
        ray.init(address=address, **{k: v for k, v in options.items() if v is not None})
    except (ConnectionError, RuntimeError) as error:
        if address == "local":
            raise
        cause = " ".join(str(error).split())[:300]
        raise ConfigError(f"address={address}: the cluster refuses: {cause}") from None
    try:
        yield
    finally:
        ray.shutdown()
        if own_folder:
            shutil.rmtree(own_folder, ignore_errors=True)


def short_temp_dir() -> str | None:
    """Return a temporary folder with room for Ray's sockets, or None where the default has it."""
    default = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    if len(os.path.join(default, "ray")) <= SOCKET_ROOM:
        return None
    return tempfile.mkdtemp(prefix="ray-", dir="/tmp")


def preflight(config: RunConfig, address: str) -> float:
    """Check a run against this machine before anything starts (`address` as resolved).

    Returns:
        The GPUs of a run without Ray; for others `room.admit` decides, once attached.

    Raises:
        ConfigError: the run does not fit.
    """
    if address != "local" and config.uses_ray:
        return 0.0
    cpus = cpu_count() if config.uses_ray else float("inf")
    gpus = local_gpus() if gpu_share(config.gpus_per_worker) > 0 or not config.uses_ray else 0
    return fit(config, [Machine(cpus, gpus)])
