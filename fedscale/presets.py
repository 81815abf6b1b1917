"""Methods as values: method name × scale → RunConfig.

A method is what it changes from the defaults of `RunConfig` (which are the paper's D-FROST); a
scale is the data, the backbone and the budget it runs on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedscale.config import ConfigError, RunConfig, from_flat

METHODS: dict[str, dict[str, Any]] = {
    "dfrost": {"local.optimizer": "adam", "merge.name": "ot"},
    "davg_adam_pt": {"local.optimizer": "adam", "merge.name": "mean"},
    "dfedavgm_pt": {"local.optimizer": "sgd", "local.momentum": 0.99, "merge.name": "mean"},
    "dpsgd_pt": {"local.optimizer": "sgd", "local.epochs": 1, "merge.name": "mean"},
}
"""dfrost.md's table: optimizer, merge and epochs of each method."""

SCALES: dict[str, dict[str, Any]] = {
    "paper": {},
    "offline": {
        "data.name": "offline",
        "data.partition": "extreme",
        "data.clients": 12,
        "data.train_size": 240,
        "data.test_size": 50,
        "backbone.name": "nano",
        "prompts.count": 4,
        "local.lr": 1e-3,
        "local.prompt_lr": 0.03,
        "local.epochs": 2,
        "graph.degree": 4,
        "rounds": 10,
        "eval_every": 5,
    },
}
"""`paper`: FiveDataset, 50 clients, κ = 5, 40 rounds, ViT-B/32. `offline`: two CPU cores."""


def preset(
    method: str,
    scale: str = "offline",
    overrides: Mapping[str, Any] | None = None,
    **more: Any,
) -> RunConfig:
    """Return a method's configuration at a scale, with overrides by (dotted) key.

    Example: `preset("dfrost", "offline", rounds=6, **{"merge.epsilon": 0.1})`.

    Raises:
        ConfigError: unknown method, scale or key, or a value that is not allowed.
    """
    if method not in METHODS:
        raise ConfigError(f"method={method}: unknown; allowed: {', '.join(METHODS)}")
    if scale not in SCALES:
        raise ConfigError(f"scale={scale}: unknown; allowed: {', '.join(SCALES)}")
    named = {"method": method, "scale": scale}
    return from_flat({**SCALES[scale], **METHODS[method], **named, **(overrides or {}), **more})
