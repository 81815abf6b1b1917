"""Decentralized, semi-decentralized and one-shot federated learning as Ray-distributed sweeps.

The public face: `run`, `RunConfig`, `preset`, `load`. Importing the package loads neither torch
nor Ray; using a name loads what it needs.
"""

from __future__ import annotations

from importlib import import_module, metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedscale.api import Run, run
    from fedscale.config import ConfigError, RunConfig
    from fedscale.presets import preset
    from fedscale.store import load

_HOMES = {
    "run": "api",
    "Run": "api",
    "RunConfig": "config",
    "ConfigError": "config",
    "preset": "presets",
    "load": "store",
}
__all__ = ["ConfigError", "Run", "RunConfig", "load", "preset", "run"]


def _refuse_namesake() -> None:
    try:
        other = metadata.version("fedscale")
    except metadata.PackageNotFoundError:
        return
    raise ImportError(
        f"another project named fedscale ({other}) is installed here and shares this package's "
        "import name; run: pip uninstall fedscale && pip install --force-reinstall fedscale-sweeps"
    )


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"fedscale.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'fedscale' has no attribute {name!r}")


_refuse_namesake()
