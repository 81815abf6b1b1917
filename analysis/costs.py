"""Figures of what rounds cost: seconds, bytes, prompts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from analysis.figures import COLORS, canvas, finish
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
    for axes, (column, unit, label) in zip(panels, measures, strict=True):
        for color, (name, part) in zip(COLORS, done.groupby(key, sort=False), strict=False):
            grouped = part.groupby("round")[column]
            mean, std = unit * grouped.mean(), unit * grouped.std(ddof=1).fillna(0)
            count = part["run_id"].nunique()
            axes.errorbar(
                mean.index,
                mean,
                yerr=std,
                capsize=3,
                marker="o",
                color=color,
                label=f"{name} ({count} run{'s' if count != 1 else ''})",
            )
        axes.set_xlabel("communication round")
        axes.set_ylabel(label)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    panels[0].set_ylim(bottom=0)
    return finish(figure, panels[0], "mean ± standard deviation over runs", "")
