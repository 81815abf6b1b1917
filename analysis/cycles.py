"""Accuracy over cycles, and cycles to a threshold (SSD-FL's figures and tables)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from rich.table import Table

from analysis.figures import COLORS, canvas, finish, save
from analysis.networks import network_picture
from analysis.report import report, save_table, terminal
from analysis.tables import describe, text, varying_keys
from fedscale import store

SHARES = (0.8, 0.95)
"""Thresholds, as shares of the best final accuracy of a setting's methods."""


def cycles_to(rounds: pd.DataFrame, threshold: float) -> pd.Series:
    """Return per run the first cycle whose accuracy is at least `threshold`; NaN if none.

    Args:
        rounds: `fedscale.load(folder)`; rounds that were not measured are passed over.
        threshold: a share of the test images.
    """
    measured = rounds[rounds["accuracy_mean"].notna()]
    reached = measured[measured["accuracy_mean"] >= threshold]
    first = reached.groupby("run_id", observed=True)["cycle"].min()
    return first.reindex(measured["run_id"].unique())


def threshold_table(rounds: pd.DataFrame, keys: Sequence[str]) -> pd.DataFrame:
    """Set methods beside each other by the cycles they need.

    Args:
        rounds: `fedscale.load(folder)`.
        keys: configuration keys that make a setting.

    Returns:
        One row per setting, threshold and method: the keys, threshold (share of test images),
        method, cycles (mean over the seeds that reach it), std, reached (seeds), runs (seeds).
    """
    done = rounds[(rounds["status"] == "completed") & rounds["accuracy_mean"].notna()]
    rows = []
    for values, setting in done.groupby(list(keys), dropna=False):
        last = setting.groupby("run_id", observed=True)["cycle"].transform("max")
        finals = setting[setting["cycle"] == last]
        best = finals.groupby("method")["accuracy_mean"].mean().max()
        for share in SHARES:
            threshold = round(float(share * best), 2)
            for method, part in setting.groupby("method"):
                cycles = cycles_to(part, threshold)
                rows.append(
                    {
                        **dict(zip(keys, values, strict=True)),
                        "threshold": threshold,
                        "method": method,
                        "cycles": cycles.mean(),
                        "std": cycles.std(ddof=1),
                        "reached": int(cycles.notna().sum()),
                        "runs": len(cycles),
                    }
                )
    return pd.DataFrame(rows)


def cycles_curve(
    rounds: pd.DataFrame,
    key: str,
    *,
    runs: pd.DataFrame | None = None,
    order: Sequence[object] = (),
) -> Figure:
    """Draw accuracy against the cycle, a line per method, in the smallest and largest setting.

    Args:
        rounds: `fedscale.load(folder)`.
        key: the swept key; its first and last values get a panel each, in the first case.
        runs: not read.
        order: not read.
    """
    done = rounds[(rounds["status"] == "completed") & rounds["accuracy_mean"].notna()]
    if done.empty:
        raise ValueError("no completed run in the records: nothing to draw")
    case = "extreme" if "extreme" in set(done["case"]) else done["case"].iloc[0]
    shown = done[done["case"] == case]
    values = list(dict.fromkeys(shown[key]))
    values = sorted(values) if not isinstance(values[0], str) else values
    figure, panels = canvas(f"{describe(done)} · {case}")
    for axes, value in zip(panels, (values[0], values[-1]), strict=True):
        part = shown[shown[key] == value]
        for color, (method, own) in zip(COLORS, part.groupby("method", sort=False), strict=False):
            grouped = own.groupby("cycle")["accuracy_mean"]
            mean, std = 100 * grouped.mean(), 100 * grouped.std(ddof=1).fillna(0)
            axes.plot(mean.index, mean, color=color, label=str(method))
            axes.fill_between(
                mean.index, mean - std, mean + std, color=color, alpha=0.12, linewidth=0
            )
        axes.set_title(f"{key} = {text(value)}", fontsize="medium")
        axes.set_xlabel("cycle")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_ylabel("accuracy on the test set (%)")
    return finish(figure, panels[0], "mean and standard deviation over seeds", "")


def cycles_report(key: str) -> Callable[[str, str], list[str]]:
    """Return the report (results, sweep) of a sweep of SSD-FL and its baselines."""

    def made(results: str, sweep: str) -> list[str]:
        written = report(results, sweep, key, cycles_curve)
        rounds = store.load(store.join(results, sweep))
        if not (rounds["status"] == "completed").any():
            return written
        keys = [key, *(name for name in varying_keys(rounds) if name != key)]
        table = threshold_table(rounds, keys)
        terminal().print(_render(table, keys))
        written.append(save_table(results, f"{sweep}_cycles", table))
        stem = store.join(results, "figures", f"{sweep}_network")
        return written + save(network_picture(store.join(results, sweep)), stem)

    return made


def _render(table: pd.DataFrame, keys: Sequence[str]) -> Table:
    methods = list(dict.fromkeys(table["method"]))
    shown = Table(
        title="cycles to a threshold",
        caption="mean over the seeds that reach it; (reached of runs) where some do not; the least "
        "of a row is bold",
        title_justify="left",
        caption_justify="left",
    )
    for name in (*keys, "accuracy %", *methods):
        shown.add_column(name, justify="right")
    for values, part in table.groupby([*keys, "threshold"], dropna=False):
        own = part.set_index("method")
        full = own[own["reached"] == own["runs"]]["cycles"]
        least = full.min() if len(full) else np.nan
        cells = []
        for method in methods:
            row = own.loc[method]
            cell = "–" if not row["reached"] else f"{row['cycles']:.1f}"
            if row["reached"] < row["runs"]:
                cell += f" ({row['reached']} of {row['runs']})"
            cells.append(f"[bold]{cell}[/bold]" if row["cycles"] == least else cell)
        *setting, threshold = values
        accuracy = f"{100 * float(str(threshold)):.0f}"
        shown.add_row(*(text(value) for value in setting), accuracy, *cells)
    return shown
