"""Methods as values: method name × scale → RunConfig.

A method is what it changes from the defaults of `RunConfig` (which are the paper's D-FROST); a
scale is the data, the backbone and the budget it runs on, one per family of methods.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fedscale.config import ConfigError, RunConfig, from_flat


@dataclass(frozen=True)
class Method:
    """One method: its paper's family, what it changes from the defaults, and at `offline` only."""

    family: str
    overrides: Mapping[str, Any]
    offline: Mapping[str, Any] = field(default_factory=dict)


def _prompts(optimizer: str, merge: str = "mean", more: Mapping[str, Any] | None = None) -> Method:
    return Method("dfrost", {"local.optimizer": optimizer, "merge.name": merge, **(more or {})})


def _pool(method: Method) -> Method:
    return Method(method.family, {**method.overrides, "prompts.pool": 20, "prompts.count": 10})


_CYCLES = {"merge.name": "mean", "graph.resample": False, "local.optimizer": "sgd"}


def _cycles(name: str) -> Method:
    return Method("ssdfl", {**_CYCLES, "regime.name": name})


_ONE_SHOT = {"regime.name": "server", "merge.name": "mean", "rounds": 1}
_NO_TRAINING = {"prompts.count": 0, "regime.average": "uniform"}


def _oneshot(more: Mapping[str, Any]) -> Method:
    return Method("fedopal", {**_ONE_SHOT, **more})


def _untrained(head: str, more: Mapping[str, Any] | None = None) -> Method:
    return _oneshot({**_NO_TRAINING, "head.name": head, **(more or {})})


def _distilled(server: str) -> Method:
    networks = {"backbone.name": "cnn", "server.name": server, "local.optimizer": "sgd"}
    small = {
        "backbone.channels": "16-32-64",
        "local.lr": 0.05,
        "local.momentum": 0.9,
        "server.generator_steps": 10,
        "server.generator_width": 16,
        "server.student_steps": 20,
    }
    return Method("fedopal", {**_ONE_SHOT, **networks, "local.lr": 0.01}, small)


DFROST = _prompts("adam", "ot")
DPSGD = _prompts("sgd", more={"local.epochs": 1})
DFEDAVGM = _prompts("sgd", more={"local.momentum": 0.99})
DFEDSAM = _prompts("sam", more={"local.rho": 0.01})
DAVG_ADAM = _prompts("adam")

METHODS: dict[str, Method] = {
    "dfrost": DFROST,
    "davg_adam_pt": DAVG_ADAM,
    "dfedavgm_pt": DFEDAVGM,
    "dfedsam_pt": DFEDSAM,
    "dpsgd_pt": DPSGD,
    "dfrost_pp": _pool(DFROST),
    "davg_adam_pp": _pool(DAVG_ADAM),
    "dfedavgm_pp": _pool(DFEDAVGM),
    "dfedsam_pp": _pool(DFEDSAM),
    "dpsgd_pp": _pool(DPSGD),
    "pfpt_dec": _prompts("adam", "pfpt"),
    "ssdfl": _cycles("ssdfl"),
    "sdfl": _cycles("sdfl"),
    "pdfl": _cycles("pdfl"),
    "stc": _cycles("stc"),
    "cstc": _cycles("cstc"),
    "fedopal": _oneshot({"head.name": "ridge", "local.mu": 0.1, "regime.average": "uniform"}),
    "fedopal_gossip": Method(
        "fedopal",
        {
            "regime.name": "gossip",
            "regime.train_rounds": 1,
            "rounds": 12,
            "merge.name": "mean",
            "head.name": "ridge",
            "local.mu": 0.1,
        },
    ),
    "afl": _untrained("ridge"),
    "fedcgs": _untrained("fedcgs", {"head.lam": 1e-3}),
    "fedpft": _untrained("fedpft"),
    "fedavg": _oneshot({}),
    "local": _oneshot({"regime.average": "none"}),
    "dense": _distilled("dense"),
    "coboosting": _distilled("coboosting"),
}
"""Every method of the three papers, and what they compare with."""

_OFFLINE_DATA = {
    "data.name": "offline",
    "data.train_size": 160,
    "data.test_size": 50,
    "backbone.name": "nano",
    "prompts.count": 4,
}

SCALES: dict[str, dict[str, dict[str, Any]]] = {
    "dfrost": {
        "paper": {},
        "offline": {
            **_OFFLINE_DATA,
            "data.partition": "extreme",
            "data.clients": 12,
            "local.lr": 1e-3,
            "local.epochs": 2,
            "graph.degree": 4,
            "rounds": 10,
            "eval_every": 5,
        },
    },
    "ssdfl": {
        "paper": {
            "data.name": "fmnist",
            "data.partition": "labels_per_client",
            "data.clients": 30,
            "backbone.name": "cnn",
            "local.lr": 0.01,
            "local.epochs": 1,
            "local.batch_size": 64,
            "local.devices": "mixed",
            "graph.name": "erdos_renyi",
            "graph.probability": 0.1,
            "regime.tau_a": 3,
            "rounds": 20,
        },
        "offline": {
            "data.name": "fashion",
            "data.partition": "labels_per_client",
            "data.clients": 10,
            "data.train_size": 1000,
            "data.test_size": 500,
            "backbone.name": "cnn",
            "backbone.channels": "16-32-64",
            "local.lr": 0.05,
            "local.epochs": 1,
            "local.batch_size": 20,
            "local.devices": "mixed",
            "graph.name": "erdos_renyi",
            "graph.probability": 0.3,
            "regime.tau_a": 3,
            "rounds": 8,
            "precision": "float32",
        },
    },
    "fedopal": {
        "paper": {
            "data.name": "cifar10",
            "data.clients": 10,
            "backbone.name": "clip_b16",
            "local.lr": 1e-3,
            "local.batch_size": 64,
        },
        "offline": {
            **_OFFLINE_DATA,
            "data.clients": 12,
            "data.train_size": 480,
            "data.test_size": 100,
            "local.lr": 1e-3,
            "local.batch_size": 64,
            "graph.degree": 4,
        },
    },
}
"""Family → scale. `paper`: the papers' data and networks. `offline`: two CPU cores."""


def scales() -> tuple[str, ...]:
    """Return the names of the scales."""
    return tuple(SCALES["dfrost"])


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
    if scale not in scales():
        raise ConfigError(f"scale={scale}: unknown; allowed: {', '.join(scales())}")
    chosen = METHODS[method]
    named = {"method": method, "scale": scale}
    base = {**SCALES[chosen.family][scale], **chosen.overrides}
    if scale == "offline":
        base |= chosen.offline
    return from_flat({**base, **named, **(overrides or {}), **more})
