"""Figures of what rounds cost: seconds, bytes, prompts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from analysis.figures import COLORS, canvas, finish, mean_line, sweep_curve
from analysis.tables import describe


def cost_bars(
    rounds: pd.DataFrame,
    key: str = "method",
    *,
    runs: pd.DataFrame | None = None,
    order: Sequence[object] = (),
) -> Figure:
    """Draw seconds per client and round (training, merging) and bytes per client and round.

    Seconds are summed over workers and divided by the clients that took part; bars are means over
    rounds and runs, whiskers the standard deviation over runs.

    Args:
        rounds: `fedscale.load(folder)`.
        key: the key whose values are set beside each other.
        runs: not read.
        order: values of the key from left to right; () = as they come.
    """
    done = rounds[rounds["status"] == "completed"]
    if done.empty:
        raise ValueError("no completed run in the records: nothing to draw")
    clients = done["active_clients"].clip(lower=1)
    each = pd.DataFrame(
        {
            "train": done["train_seconds"] / clients,
            "merge": done["merge_seconds"] / clients,
            "bytes": done["bytes_sent"] / clients,
        }
    ).assign(name=done[key], run=done["run_id"].astype(str))
    per_run = each.groupby(["name", "run"], sort=False).mean().reset_index()
    names = list(order) or list(dict.fromkeys(per_run["name"]))
    mean = per_run.groupby("name")[["train", "merge", "bytes"]].mean().loc[names]
    spread = per_run.groupby("name")[["train", "merge", "bytes"]].std(ddof=1).fillna(0).loc[names]
    figure, panels = canvas(describe(done))
    x = np.arange(len(names))
    panels[0].bar(
        x, mean["train"], yerr=spread["train"], capsize=3, color=COLORS[0], label="training"
    )
    panels[0].bar(x, mean["merge"], bottom=mean["train"], color=COLORS[1], label="merging")
    panels[0].set_ylabel("seconds per client and round")
    tops = mean["train"] + mean["merge"]
    for place, top, merge, above in zip(x, tops, mean["merge"], spread["train"], strict=True):
        panels[0].annotate(
            f"merge {100 * merge / top:.2g} %",
            (place, top + above),
            (0, 3),
            textcoords="offset points",
            ha="center",
            fontsize="small",
        )
    panels[1].bar(x, mean["bytes"] / 1e3, color=COLORS[2])
    panels[1].set_ylabel("kB sent per client and round")
    for axes in panels:
        axes.set_xticks(x, [str(name) for name in names], rotation=20, ha="right")
    return finish(figure, panels[0], "", "")


def one_shot_curve(
    rounds: pd.DataFrame,
    key: str,
    *,
    runs: pd.DataFrame | None = None,
    order: Sequence[object] = (),
) -> Figure:
    """Draw accuracy, and what a client sends, against a key; arguments as `sweep_curve`'s."""
    return sweep_curve(rounds, key, runs=runs, order=order, beside="bytes_sent")


def prompts_curve(
    rounds: pd.DataFrame,
    key: str = "method",
    *,
    runs: pd.DataFrame | None = None,
    order: Sequence[object] = (),
) -> Figure:
    """Draw the mean number of prompts per client, and the accuracy, against the round.

    Runs that ended early (a client passed `prompts.limit`) are drawn as far as they came.

    Args:
        rounds: `fedscale.load(folder)`.
        key: the key whose values get a line each.
        runs: not read.
        order: not read.
    """
    done = rounds[rounds["prompts_mean"].notna()]
    if done.empty:
        raise ValueError("no measured round in the records: nothing to draw")
    figure, panels = canvas(describe(done))
    measures = (
        ("prompts_mean", 1.0, "prompts per client"),
        ("accuracy_mean", 100.0, "accuracy (%)"),
    )
    for axes, (column, unit, measure) in zip(panels, measures, strict=True):
        for color, (name, part) in zip(COLORS, done.groupby(key, sort=False), strict=False):
            count = part["run_id"].nunique()
            label = f"{name} ({count} run{'s' if count != 1 else ''})"
            mean_line(axes, (unit * part[column]).groupby(part["round"]), color, label)
        axes.set_xlabel("communication round")
        axes.set_ylabel(measure)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    panels[0].set_ylim(bottom=0)
    return finish(figure, panels[0], "mean ± standard deviation over runs", "")


def head_error_curve(
    rounds: pd.DataFrame,
    key: str = "graph.name",
    *,
    runs: pd.DataFrame | None = None,
    order: Sequence[object] = (),
) -> Figure:
    """Draw the error of gossiped heads, and the accuracy, against the round.

    The dashed lines fall by the largest rate that the graph's mixing matrix allows, ρ per round.

    Args:
        rounds: `fedscale.load(folder)`.
        key: the key whose values get a line each.
        runs: not read.
        order: not read.
    """
    done = rounds[rounds["head_error"].notna() & (rounds["label"] == "")]
    if done.empty:
        raise ValueError("no head error in the records: nothing to draw")
    figure, panels = canvas(describe(done))
    for color, (name, part) in zip(COLORS, done.groupby(key, sort=False), strict=False):
        grouped = part.groupby("round")
        error, accuracy = grouped["head_error"].mean(), 100 * grouped["accuracy_mean"].mean()
        rho = part.groupby("run_id", observed=True)["rho"].first().mean()
        shown = error[error > 1e-12]
        panels[0].plot(shown.index, shown, color=color, marker="o", markersize=3, label=f"{name}")
        if len(shown):
            line = shown.iloc[0] * rho ** (shown.index - shown.index[0])
            panels[0].plot(shown.index, line, color=color, linestyle="--", linewidth=0.8)
        panels[1].plot(accuracy.index, accuracy, color=color, marker="o", markersize=3)
    for label, part in rounds[rounds["label"] != ""].groupby("label"):
        panels[1].axhline(
            100 * part["accuracy_mean"].mean(), color="#555555", linestyle="--", label=str(label)
        )
        panels[1].legend(frameon=False)
    panels[0].set_yscale("log")
    panels[0].set_ylabel("relative error of clients' heads (dashed: ρ per round)")
    panels[1].set_ylabel("accuracy on the test set (%)")
    for axes in panels:
        axes.set_xlabel("communication round")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return finish(figure, panels[0], "", "")
