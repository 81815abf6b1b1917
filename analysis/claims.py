"""The papers' claims beside what was measured.

`claims.csv` holds what the papers state. `QUERIES` says which of them a sweep's records answer,
and how; the others need a scale or data that the offline sweeps do not have.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
from rich.table import Table

from analysis.tables import final_rounds

FILE = Path(__file__).with_name("claims.csv")


@dataclass(frozen=True)
class Query:
    """Which runs of a sweep answer a claim: a method, where columns have these values.

    `against` is another method, or "best": the best of the sweep's other methods, of which
    `davg_adam_pt` is none, since the papers do not have it; `against_where` says where, if not in
    the same place.
    """

    sweep: str
    method: str
    where: Mapping[str, Any] = field(default_factory=dict)
    against: str = ""
    against_where: Mapping[str, Any] | None = None


QUERIES: dict[str, Query] = {
    "F1": Query("dfrost_baselines", "dfrost", {"case": "alpha 0.5"}, "best"),
    "F2": Query("dfrost_baselines", "dfrost", {"case": "alpha 0.1"}, "best"),
    "F3": Query("dfrost_baselines", "dfrost", {"case": "extreme"}, "best"),
    "F7": Query("dfrost_baselines", "dfedsam_pt", {"case": "alpha 0.1"}),
    "F8": Query(
        "dfrost_robustness",
        "dfrost",
        {"case": "links drop 0.4"},
        "dfrost",
        {"case": "undisturbed"},
    ),
    "F9": Query("dfrost_robustness", "dfrost", {"case": "twice the clients"}, "best"),
    "F10": Query("dfrost_robustness", "dfrost", {"case": "half take part"}, "dfedavgm_pt"),
    "F11": Query("dfrost_budget", "dfrost", {"prompts.count": 2}, "dfrost", {"prompts.count": 4}),
    "F12": Query("dfrost_selection", "dfrost_pp", {}, "dfedavgm_pp"),
    "F13": Query("dfrost_selection", "dfedsam_pp", {}, "dpsgd_pp"),
    "S1": Query("ssdfl_taua", "ssdfl", {"case": "extreme", "regime.tau_a": 5}, "stc"),
    "S17": Query("ssdfl_graphs", "ssdfl", {"case": "mild", "graph.name": "complete"}, "sdfl"),
    "S18": Query("ssdfl_graphs", "ssdfl", {"case": "extreme", "graph.name": "complete"}, "sdfl"),
    "O2": Query("fedopal_alpha", "fedopal", {"case": "alpha 0.01"}, "fedcgs"),
}


def load() -> pd.DataFrame:
    """Return the claims: id, paper, where, setting, method, claimed, unit, against, …"""
    return pd.read_csv(FILE, dtype=str, keep_default_na=False)


def compare(rounds: pd.DataFrame, sweep: str) -> pd.DataFrame:
    """Set claims beside a sweep's records.

    Args:
        rounds: `fedscale.load(folder)`.
        sweep: its name.

    Returns:
        One row per claim that the sweep answers: id, where, setting, claimed and against_claimed
        as the paper has them, measured and against_measured in percent (mean over seeds), against
        (the method that was found best, where the claim is against the best).
    """
    finals = final_rounds(rounds)
    rows = []
    for claim in load().to_dict("records"):
        query = QUERIES.get(claim["id"])
        if query is None or query.sweep != sweep:
            continue
        measured = _accuracy(finals, query.method, query.where)
        where = query.where if query.against_where is None else query.against_where
        name, other = query.against, _accuracy(finals, query.against, where)
        if query.against == "best":
            name, other = _best(finals, query)
        if measured is None:
            continue
        rows.append(
            {
                "id": claim["id"],
                "where": claim["where"],
                "setting": claim["setting"],
                "method": query.method,
                "claimed": claim["claimed"],
                "measured": measured,
                "against": name,
                "against_claimed": claim["against_claimed"],
                "against_measured": other,
            }
        )
    return pd.DataFrame(rows)


def render(table: pd.DataFrame, scale: str) -> Table:
    """Lay `compare`'s rows out for the terminal; names the scale of what was measured."""
    shown = Table(
        title=f"The paper's claims, and accuracy % measured at scale {scale}",
        caption="other data and networks than the paper's unless the scale is paper: compare "
        "differences and orders, not values",
        title_justify="left",
        caption_justify="left",
    )
    for name in ("claim", "setting", "method", "paper", "here", "against", "paper", "here"):
        shown.add_column(name, overflow="fold")
    for row in table.to_dict("records"):
        shown.add_row(
            f"{row['id']} ({row['where']})",
            row["setting"],
            row["method"],
            row["claimed"],
            f"{row['measured']:.1f}",
            row["against"],
            row["against_claimed"],
            "" if pd.isna(row["against_measured"]) else f"{row['against_measured']:.1f}",
        )
    return shown


def _accuracy(finals: pd.DataFrame, method: str, where: Mapping[str, Any]) -> float | None:
    found = finals[finals["method"] == method]
    for key, value in where.items():
        if key not in found.columns:
            return None
        found = found[found[key] == value]
    return None if found.empty else float(100 * found["accuracy_mean"].mean())


def _best(finals: pd.DataFrame, query: Query) -> tuple[str, float | None]:
    others = set(finals["method"]) - {query.method, "davg_adam_pt"}
    scores = {name: _accuracy(finals, name, query.where) for name in sorted(others)}
    known = {name: score for name, score in scores.items() if score is not None}
    if not known:
        return "", None
    best = max(known, key=lambda name: known[name])
    return best, known[best]
