"""From what workers report to rows of the records."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedscale import diagnostics, metrics
from fedscale.graphs import mixing
from fedscale.regimes.step import Step

MEASURED = (
    "accuracy_mean",
    "accuracy_min",
    "accuracy_max",
    "accuracy_std",
    "accuracy_averaged",
    "consensus_error",
    "disagreement",
    "prompt_norm",
    "prompts_mean",
    "head_error",
    "measure_seconds",
)
"""Columns of `rounds` that only measured rounds have."""


def of_step(
    step: Step, trained: Sequence[dict[str, Any]], mixed: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """Return a round's row, not yet measured.

    Args:
        step: the round.
        trained: what `ClientWorker.train` reported, per worker; empty without training.
        mixed: what `ClientWorker.mix` reported, per worker.
    """
    loss = np.concatenate([s["loss"] for s in trained]) if trained else np.array([np.nan])
    links = metrics.messages(step.weights) if step.messages < 0 else step.messages
    return {
        **dict.fromkeys(MEASURED),
        "round": step.round,
        "phase": step.phase,
        "cycle": step.cycle,
        "loss": float(np.nanmean(loss)) if np.isfinite(loss).any() else None,
        "rho": mixing.mixing_factor(step.weights),
        "bytes_sent": round(links * mixed[0]["bytes"]),
        "bytes_prompts": round(links * mixed[0]["bytes_prompts"]),
        "train_seconds": sum(s["seconds"] for s in trained),
        "merge_seconds": sum(s["seconds"] for s in mixed),
        **_theorem_1([s["theorem_1"] for s in mixed if s["theorem_1"]]),
        **dict.fromkeys(diagnostics.COLUMNS),
        "active_clients": int(step.active.sum()),
    }


def _theorem_1(found: Sequence[dict[str, float]]) -> dict[str, float | None]:
    clients = sum(f["clients"] for f in found)
    return {
        f"merge_{key}": sum(f[key] * f["clients"] for f in found) / clients if clients else None
        for key in ("objective", "delta", "bound")
    }


def measured(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the columns `MEASURED` of what `ClientWorker.measure` reported, per worker."""
    accuracy = np.concatenate([f["accuracy"] for f in found])
    prompts = np.concatenate([f["prompts"] for f in found])
    network = found[0]
    return {
        "accuracy_mean": float(accuracy.mean()),
        "accuracy_min": float(accuracy.min()),
        "accuracy_max": float(accuracy.max()),
        "accuracy_std": float(accuracy.std()),
        "accuracy_averaged": network["averaged"],
        "consensus_error": network["consensus_error"],
        "disagreement": network["disagreement"],
        "prompt_norm": network["prompt_norm"],
        "prompts_mean": float(prompts.mean()),
        "head_error": network["head_error"],
        "measure_seconds": sum(f["seconds"] for f in found),
    }


def of_clients(
    step: Step,
    found: Sequence[dict[str, Any]],
    homes: Sequence[str],
    parts: Sequence[np.ndarray],
) -> list[dict[str, Any]]:
    """Return the rows of `clients` of a measured round.

    Args:
        step: the round.
        found: what `ClientWorker.measure` reported, per worker.
        homes: domain of every client.
        parts: training samples of every client.
    """
    accuracy, loss, prompts = (
        np.concatenate([f[key] for f in found]) for key in ("accuracy", "loss", "prompts")
    )
    return [
        {
            "round": step.round,
            "client": client,
            "domain": home,
            "samples": len(part),
            "accuracy": float(accuracy[client]),
            "loss": float(loss[client]),
            "prompts": int(prompts[client]),
        }
        for client, (home, part) in enumerate(zip(homes, parts, strict=True))
    ]
