"""Tables over seeds from the records: pure functions from DataFrame to DataFrame.

They take what `fedscale.load` returns. A run without a label is one of the swept runs; a run with
a label is a reference that the swept ones are set beside, and the label is its name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from rich.table import Table

from fedscale.store import SCHEMAS, STATUSES

LAYOUT_KEYS = (
    "workers",
    "clients_per_worker",
    "cpus_per_worker",
    "gpus_per_worker",
    "scale",
    "case",
)
"""Configuration keys that do not change what a run computes."""

COLUMNS = (
    "runs",
    "accuracy",
    "accuracy_std",
    "consensus_error",
    "consensus_error_std",
    "merge_seconds",
    "bytes_sent",
    *(status for status in STATUSES if status != "completed"),
)
"""Columns of `sweep_table` after the name and the keys."""


def varying_keys(records: pd.DataFrame) -> list[str]:
    """Return the keys that differ between runs of one label, method and case; not seed or layout.

    Args:
        records: any table that `fedscale.load` returns.
    """
    fixed = {*LAYOUT_KEYS, *(name for schema in SCHEMAS.values() for name in schema.names)}
    keys = [name for name in records.columns if name not in fixed]
    within = [name for name in ("label", "method", "case") if name in records.columns]
    counts = records.groupby(within, dropna=False)[keys].nunique(dropna=False)
    varying = [name for name in keys if (counts[name] > 1).any()]
    return [*(["case"] if _named_cases(records) else []), *varying]


def _named_cases(records: pd.DataFrame) -> bool:
    return "case" in records.columns and bool((records["case"].fillna("") != "").any())


def final_rounds(rounds: pd.DataFrame) -> pd.DataFrame:
    """Return the last measured round of each completed run, one row per run, in run order.

    `merge_seconds` becomes the run's mean per round, `bytes_sent` its mean per active client and
    round.

    Raises:
        ValueError: a completed run none of whose rounds was measured.
    """
    done = rounds[rounds["status"] == "completed"]
    measured = done[done["accuracy_mean"].notna()]
    if missing := set(done["run_id"]) - set(measured["run_id"]):
        raise ValueError(f"completed but never measured: {', '.join(sorted(missing))}")
    last = measured.groupby("run_id", sort=False).tail(1)
    sent = done["bytes_sent"] / done["active_clients"].where(done["active_clients"] > 0)
    means = done.assign(bytes_sent=sent).groupby("run_id")[["merge_seconds", "bytes_sent"]].mean()
    return last.drop(columns=means.columns).join(means, on="run_id").reset_index(drop=True)


def sweep_table(
    rounds: pd.DataFrame,
    key: str | Sequence[str] = "merge.epsilon",
    *,
    runs: pd.DataFrame | None = None,
    order: Sequence[Any] = (),
) -> pd.DataFrame:
    """Set the swept values beside each other: one row per value, then one per reference.

    Runs that differ in a key that was not asked for (two sweeps in one folder) are not averaged:
    that key becomes a column too.

    Args:
        rounds: `fedscale.load(folder)`.
        key: the swept configuration key, or several (a grid).
        runs: `fedscale.load(folder, "runs")`; with it, runs that ended before their first record
            are counted too.
        order: values of the first key in the order of the rows; () = sorted.

    Returns:
        Columns: name (the method or the reference's label), reference (bool), the keys (null for
        a reference that does not vary in it), runs (completed, over seeds), accuracy and
        consensus_error at the last measured round with their standard deviations over seeds (n − 1
        in the denominator; null for one run), merge_seconds (per round, summed over workers),
        bytes_sent (per client and round), and the number of runs not completed: running,
        diverged, failed.

    Raises:
        ValueError: a key that the records do not have; a completed run without measurements.
    """
    every = (rounds if runs is None else runs).drop_duplicates("run_id")
    keys = list(dict.fromkeys([*_keys(every, key), *varying_keys(every)]))
    values = final_rounds(rounds).set_index("run_id")
    values = values.rename(columns={"accuracy_mean": "accuracy"})
    measures = ["accuracy", "consensus_error", "merge_seconds", "bytes_sent"]
    every = every[["run_id", "label", "method", "status", *keys]].join(
        values[measures], on="run_id"
    )
    every["reference"] = every["label"] != ""
    every["name"] = every["label"].where(every["reference"], every["method"])
    for name, group in every[every["reference"]].groupby("name"):
        for column in keys:
            if group[column].nunique(dropna=False) == 1:
                every[column] = every[column].where(every["name"] != name)
    for status in STATUSES:
        every[status] = every["status"] == status
    grouped = every.groupby(["reference", "name", *keys], dropna=False)
    table = grouped[measures].mean()
    spread = grouped[measures].std(ddof=1)
    table["accuracy_std"] = spread["accuracy"]
    table["consensus_error_std"] = spread["consensus_error"]
    table = table.join(grouped[list(STATUSES)].sum()).rename(columns={"completed": "runs"})
    place = {value: index for index, value in enumerate(order)}

    def rank(column: pd.Series) -> pd.Series:
        first = bool(keys) and column.name == keys[0] and bool(place)
        return column.map(lambda value: place.get(value, len(place))) if first else column

    table = table.reset_index()
    table = table.sort_values(["reference", "name", *keys], kind="stable", key=rank)
    return table[["name", "reference", *keys, *COLUMNS]].reset_index(drop=True)


def describe(records: pd.DataFrame) -> str:
    """Say what the swept runs have in common: method · data · clients · rounds · seeds."""
    swept = records[records["label"] == ""]
    swept = swept if len(swept) else records

    def values(name: str) -> str:
        found = [text(value) for value in swept.get(name, pd.Series(dtype=object)).unique()]
        return ", ".join(found) if len(found) <= 3 else "several"

    partition = values("data.partition")
    detail = {"dirichlet": "data.alpha", "labels_per_client": "data.labels_per_client"}
    partition = f"{partition} {values(detail.get(partition, ''))}".strip()
    seeds = swept["seed"].nunique()
    parts = [
        values("method")
        if swept["method"].nunique() < 4
        else f"{swept['method'].nunique()} methods",
        f"{values('data.name')} ({partition})" if partition else values("data.name"),
        f"{values('data.clients')} clients",
        f"{values('rounds')} rounds",
        f"{seeds} seed{'s' if seeds != 1 else ''}",
    ]
    return " · ".join(part for part in parts if part and not part.startswith(" "))


def render(table: pd.DataFrame, title: str = "") -> Table:
    """Lay a `sweep_table` out for the terminal; the best mean accuracy is bold."""
    keys = [name for name in table.columns if name not in ("name", "reference", *COLUMNS)]
    ended = [name for name in STATUSES if name in table.columns and table[name].any()]
    shown = Table(
        title=title or None,
        caption="mean ± standard deviation over runs (seeds), last measured round",
        title_justify="left",
        caption_justify="left",
    )
    shown.add_column("method", no_wrap=True)
    for heading in (*keys, "runs", "accuracy %", "consensus error", "merge s/round"):
        shown.add_column(heading, justify="right")
    shown.add_column("sent/client-round", justify="right")
    if ended:
        shown.add_column("not completed")
    best = table["accuracy"].max()
    last_swept = int((~table["reference"]).sum()) - 1
    for index, row in enumerate(table.to_dict("records")):
        accuracy = _spread(100 * row["accuracy"], 100 * row["accuracy_std"], 1)
        cells = [
            str(row["name"]),
            *(text(row[name]) for name in keys),
            str(row["runs"]),
            f"[bold]{accuracy}[/bold]" if row["accuracy"] == best else accuracy,
            _spread(row["consensus_error"], row["consensus_error_std"]),
            _number(row["merge_seconds"]),
            _bytes(row["bytes_sent"]),
        ]
        if ended:
            cells.append(", ".join(f"{row[name]} {name}" for name in ended if row[name]))
        shown.add_row(*cells, end_section=index == last_swept)
    return shown


def _keys(records: pd.DataFrame, key: str | Sequence[str]) -> list[str]:
    keys = [key] if isinstance(key, str) else list(key)
    for name in keys:
        if name not in records.columns:
            near = [c for c in records.columns if c.split(".")[-1] == name.split(".")[-1]]
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(f"key={name!r}: no such column in the records{hint}")
    return keys


def text(value: Any) -> str:
    """Write a key's value for people: short numbers, nothing for null."""
    if value is None or value != value:
        return ""
    return f"{value:.4g}" if isinstance(value, float | np.floating) else str(value)


def _number(value: float) -> str:
    """Three significant digits, without an exponent where that is readable."""
    if not np.isfinite(value):
        return "–" if value != value else str(value)
    if value == 0:
        return "0"
    if not 1e-4 <= abs(value) < 1e6:
        return f"{value:.2e}"
    return f"{value:.{max(0, 2 - int(np.floor(np.log10(abs(value)))))}f}"


def _spread(mean: float, std: float, decimals: int | None = None) -> str:
    """Mean ± standard deviation with the same decimals (None: three digits of the mean)."""
    shown = _number(mean) if decimals is None or not np.isfinite(mean) else f"{mean:.{decimals}f}"
    if not np.isfinite(std) or not np.isfinite(mean):
        return shown
    if "e" in shown:
        return f"{shown} ± {std:.0e}"
    return f"{shown} ± {std:.{len(shown.partition('.')[2])}f}"


def _bytes(count: float) -> str:
    if not np.isfinite(count):
        return "–"
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} B"
