"""Figures from the records: DataFrame → matplotlib Figure, without pyplot's global state.

Each takes what `fedscale.load` returns. In a notebook a figure as the last line of a cell shows
itself; `save` writes PNG and SVG, the same bytes for the same records.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from itertools import cycle
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import colormaps, rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator
from matplotlib.transforms import ScaledTranslation

from analysis.tables import describe, final_rounds, sweep_table, text, varying_keys
from fedscale import store

LOG_SPAN = 30.0
"""Positive values that span more than this factor get a logarithmic axis."""

_LABELS = {
    "merge.epsilon": "entropy weight ε of the OT merge",
    "merge.lam": "regularization weight λ of the OT merge",
    "prompts.count": "prompts per client",
    "graph.name": "communication graph",
}
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
_GREYS = ("#555555", "#999999", "#bbbbbb")
_PANELS = (
    ("accuracy", "accuracy_mean", 100.0, "accuracy on the test set (%)"),
    ("consensus_error", "consensus_error", 1.0, "consensus error (mean W₂²)"),
    ("bytes_sent", "bytes_sent", 1e-3, "kB sent per client and round"),
)


def epsilon_curve(
    rounds: pd.DataFrame,
    key: str = "merge.epsilon",
    *,
    runs: pd.DataFrame | None = None,
    order: Sequence[Any] = (),
) -> Figure:
    """Draw accuracy and consensus error against ε: `sweep_curve` for the merge's entropy weight."""
    return sweep_curve(rounds, key, runs=runs, order=order)


def sweep_curve(
    rounds: pd.DataFrame,
    key: str,
    *,
    runs: pd.DataFrame | None = None,
    order: Sequence[Any] = (),
    beside: str = "consensus_error",
) -> Figure:
    """Draw accuracy and consensus error at the last measured round against a swept key.

    Lines are means over seeds with the standard deviation as error bars, faint dots the seeds;
    references are horizontal lines with a band of one standard deviation. Runs that differ in
    another key too get one line per value of it. Values that are names are not joined by lines.

    Args:
        rounds: `fedscale.load(folder)`.
        key: the configuration key on the horizontal axis, numbers or names.
        runs: `fedscale.load(folder, "runs")`, for a complete count of runs not completed.
        order: values of the key from left to right, where they are names; () = sorted.
        beside: what the second panel shows, "consensus_error" or "bytes_sent".

    Raises:
        ValueError: an unknown key, or no completed run.
    """
    table = sweep_table(rounds, key, runs=runs, order=order)
    shown = [panel for panel in _PANELS if panel[0] in ("accuracy", beside)]
    finals = final_rounds(rounds)
    if finals.empty:
        raise ValueError("no completed run in the records: nothing to draw")
    others = [name for name in varying_keys(rounds if runs is None else runs) if name != key]
    place = _places(table[key].dropna())
    named = any(value != where for value, where in place.items())
    figure, panels = canvas(describe(finals))
    apart_by = ScaledTranslation(7 / 72, 0, figure.dpi_scale_trans)
    for axes, (column, measure, unit, label) in zip(panels, shown, strict=True):
        lines = table.groupby(["reference", "name", *others], dropna=False)
        colors = {False: iter(cycle(COLORS)), True: iter(cycle(_GREYS))}
        apart = iter(np.linspace(-0.3, 0.3, len(lines)) if named and len(lines) > 1 else [0.0] * 99)
        for (reference, *group), part in lines:
            if not part["runs"].any():
                continue
            aside = next(apart)
            color = next(colors[bool(reference)])
            name = _name(group, ["name", *others], part["runs"].tolist())
            mean, std = unit * part[column], unit * part.get(f"{column}_std", 0 * part[column])
            std = std.fillna(0.0)
            if part[key].isna().all():
                low, high = (mean - std).iloc[0], (mean + std).iloc[0]
                axes.axhline(mean.iloc[0], color=color, linestyle="--", label=name, zorder=1)
                axes.axhspan(low, high, color=color, alpha=0.15, linewidth=0, zorder=0)
                continue
            joined = "" if named else "--" if reference else "-"
            style: dict[str, Any] = {"color": color, "linestyle": joined}
            x = [place[value] + aside for value in part[key]]
            axes.errorbar(x, mean, yerr=std, marker="o", capsize=3, label=name, zorder=3, **style)
            if part["runs"].max() == 1:
                continue
            seeds = _of(finals, bool(reference), ["name", *others], group)
            single = unit * seeds[measure]
            axes.update_datalim([(0.0, float(y)) for y in single.dropna()], updatex=False)
            axes.plot(
                [place[value] + aside for value in seeds[key]],
                single,
                color=color,
                linestyle="",
                marker="o",
                markersize=4,
                markeredgewidth=0,
                alpha=0.4,
                transform=axes.transData + apart_by,
            )
        axes.set_ylabel(label)
        axes.set_xlabel(_label(key))
        _scale(axes, list(place.items()))
        if column != "accuracy" and _wide(unit * table[column]):
            axes.set_yscale("log")
        elif column != "accuracy":
            axes.set_ylim(bottom=0)
    legend = "mean ± standard deviation; faint dots: single runs" if table["runs"].max() > 1 else ""
    return finish(figure, panels[0], legend, _not_completed(table, [key, *others]))


def rounds_curve(
    rounds: pd.DataFrame,
    key: str | Sequence[str] = "merge.epsilon",
    *,
    runs: pd.DataFrame | None = None,
) -> Figure:
    """Draw accuracy and consensus error against the round, one line per value of the swept key.

    Lines are means over the seeds of completed runs; references are dashed.

    Args:
        rounds: `fedscale.load(folder)`.
        key: the swept key or keys; () for one line per method.
        runs: `fedscale.load(folder, "runs")`, for a complete count of runs not completed.

    Raises:
        ValueError: an unknown key, or no completed run.
    """
    table = sweep_table(rounds, key, runs=runs)
    keys = [name for name in table.columns[2 : list(table.columns).index("runs")]]
    done = rounds[(rounds["status"] == "completed") & rounds["accuracy_mean"].notna()]
    if done.empty:
        raise ValueError("no completed run in the records: nothing to draw")
    swept = int((~table["reference"]).sum())
    named = not keys or table["name"].iloc[:swept].nunique() > 1
    shades = colormaps["viridis"](np.linspace(0.0, 0.9, max(swept, 2)))
    figure, panels = canvas(describe(done))
    for axes, (column, measure, unit, label) in zip(panels, _PANELS[:2], strict=True):
        for index, row in enumerate(table.to_dict("records")):
            reference = bool(row["reference"])
            given = ["name", *(name for name in keys if text(row[name]))]
            part = _of(done, reference, given, [row[name] for name in given])
            if part.empty:
                continue
            mean = unit * part.groupby("round")[measure].mean()
            shown = given if named or reference else given[1:]
            axes.plot(
                mean.index,
                mean,
                color=_GREYS[(index - swept) % len(_GREYS)] if reference else shades[index],
                linestyle="--" if reference else "-",
                marker="o",
                markersize=3,
                label=_name([row[name] for name in shown], shown, [row["runs"]]),
            )
        axes.set_xlabel("communication round")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_ylabel(label)
        if column == "consensus_error" and _wide(unit * done[measure]):
            axes.set_yscale("log")
    return finish(figure, panels[0], "", _not_completed(table, keys))


def save(figure: Figure, path_stem: store.Place) -> list[str]:
    """Write `<path_stem>.png` (1200 pixels wide) and `<path_stem>.svg`; return the two places.

    Raises:
        StoreError: they cannot be written.
    """
    base, mark, query = os.fspath(path_stem).partition("?")
    folder, name = os.path.split(base if "://" in base else os.fspath(path_stem))
    written = []
    for kind, metadata in (("png", {"Software": None}), ("svg", {"Date": None, "Creator": None})):
        sink = io.BytesIO()
        with rc_context({"svg.hashsalt": "fedscale"}):
            figure.savefig(sink, format=kind, metadata=metadata, dpi=1200 / figure.get_figwidth())
        place = (folder or ".") + (mark + query if "://" in base else "")
        written.append(store.write_bytes(place, f"{name}.{kind}", sink.getvalue()))
    return written


def canvas(title: str) -> tuple[Figure, Sequence[Axes]]:
    """Return a figure with a title and two panels side by side."""
    _show_in_notebooks()
    figure = Figure(figsize=(10, 4.6), layout="constrained")
    panels = figure.subplots(1, 2, sharex=True)
    for axes in panels:
        axes.grid(color="#e5e5e5", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize="large")
    return figure, panels


def mean_line(axes: Axes, grouped: Any, color: str, label: str) -> None:
    """Draw mean ± standard deviation of a grouped series against the groups' key."""
    mean, std = grouped.mean(), grouped.std(ddof=1).fillna(0)
    axes.errorbar(mean.index, mean, yerr=std, capsize=3, marker="o", color=color, label=label)


def finish(figure: Figure, axes: Axes, title: str, note: str) -> Figure:
    """Add the legend of `axes` below the panels and a note above them; return the figure."""
    handles, labels = axes.get_legend_handles_labels()
    columns = max(1, 120 // (max(len(label) for label in labels) + 8))
    figure.set_figheight(4.3 + 0.22 * (-(-len(labels) // columns) + bool(title)))
    figure.legend(
        handles,
        labels,
        loc="outside lower center",
        ncols=columns,
        frameon=False,
        title=title or None,
        title_fontsize="small",
    )
    if note:
        axes.set_title(note, loc="left", fontsize="small", color="#b00020")
    return figure


def _of(
    records: pd.DataFrame, reference: bool, names: Sequence[str], values: Sequence[Any]
) -> pd.DataFrame:
    """Return the records of one line; "name" is the label of a reference, else the method."""
    found = (records["label"] != "") == reference
    for name, value in zip(names, values, strict=True):
        column = records[name if name != "name" else "label" if reference else "method"]
        # A null is a key that the reference does not vary in, whatever its value.
        if text(value):
            found &= column == value
    return records[found]


def _places(values: pd.Series) -> dict[Any, float]:
    """Where each value of the swept key lies: itself, or its index when it is no number."""
    if pd.api.types.is_numeric_dtype(values) and not pd.api.types.is_bool_dtype(values):
        return {value: float(value) for value in values.unique()}
    return {value: float(index) for index, value in enumerate(values.unique())}


def _scale(axes: Axes, places: list[tuple[Any, float]]) -> None:
    x = [place for _, place in places]
    if not x:
        return
    if any(value != place for value, place in places):
        axes.set_xticks(x, [str(value) for value, _ in places])
        if sum(len(str(value)) for value, _ in places) > 45:
            axes.tick_params(axis="x", rotation=20)
            for name in axes.get_xticklabels():
                name.set_horizontalalignment("right")
        return
    positive = [value for value in x if value > 0]
    if _wide(pd.Series(positive)):
        if min(x) > 0:
            margin = (max(x) / min(x)) ** 0.04
            axes.set_xlim(min(x) / margin, max(x) * margin)
            axes.set_xscale("log")
        elif min(x) == 0:
            axes.set_xscale("symlog", linthresh=min(positive))
    if len(x) <= 10:
        axes.set_xticks(x, [f"{value:g}" for value in x])
        axes.xaxis.set_minor_locator(NullLocator())
    else:
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _wide(values: pd.Series) -> bool:
    finite = values[np.isfinite(values)]
    return len(finite) > 0 and finite.min() > 0 and finite.max() / finite.min() > LOG_SPAN


def _label(key: str) -> str:
    if key in ("case", "method"):
        return key
    return f"{_LABELS[key]} ({key})" if key in _LABELS else key


def _name(values: Sequence[Any], keys: Sequence[str], runs: Sequence[int]) -> str:
    """Legend text, `dfrost, graph.name=ring (3 runs)`; the key "name" is left out."""
    parts = [
        text(value) if key == "name" else f"{key}={text(value)}"
        for key, value in zip(keys, values, strict=True)
        if text(value)
    ]
    low, high = min(runs), max(runs)
    count = f"{low}" if low == high else f"{low}–{high}"
    return f"{', '.join(parts)} ({count} run{'s' if high != 1 else ''})"


def _not_completed(table: pd.DataFrame, keys: Sequence[str]) -> str:
    parts = []
    for row in table.to_dict("records"):
        found = [f"{row[status]} {status}" for status in store.STATUSES if row.get(status)]
        if found:
            where = [f"{key}={text(row[key])}" for key in keys if text(row[key])]
            parts.append(f"{', '.join(found)} ({', '.join([row['name'], *where])})")
    more = f"; {len(parts) - 3} more" if len(parts) > 3 else ""
    return f"not completed, not drawn: {'; '.join(parts[:3])}{more}" if parts else ""


def _show_in_notebooks() -> None:
    """Let a notebook show figures that pyplot did not make; outside of one, do nothing.

    IPython shows them only after `%matplotlib inline` or a first use of pyplot.
    """
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if shell is None:
        return
    formatter = shell.display_formatter.formatters["image/png"]
    if Figure not in formatter.type_printers:
        formatter.for_type(Figure, _png)


def _png(figure: Figure) -> bytes:
    sink = io.BytesIO()
    figure.savefig(sink, format="png", dpi=1200 / figure.get_figwidth())
    return sink.getvalue()
