"""Where a run's numbers come from: time, versions, revision of the source."""

from __future__ import annotations

import json
import platform
import subprocess
from datetime import datetime, timezone
from functools import lru_cache
from importlib import metadata
from pathlib import Path


def now() -> str:
    """Return the time in UTC, ISO 8601."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


@lru_cache(maxsize=1)
def versions() -> str:
    """Return the versions that numbers depend on, as JSON."""
    names = ("fedscale-sweeps", "torch", "ray", "timm", "numpy", "scipy", "scikit-learn", "optuna")
    found = {"python": platform.python_version(), "machine": platform.machine()}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return json.dumps(found, sort_keys=True)


@lru_cache(maxsize=1)
def revision() -> str:
    """Return the git revision of the source tree, or "" when it is not a checkout."""
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
