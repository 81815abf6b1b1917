"""SSD-FL's clusters: the network they lie in, and scores over the number of clusters."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import networkx as nx
import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
from rich.table import Table

from analysis.figures import COLORS, canvas, finish, mean_line, save
from analysis.report import save_table, terminal
from analysis.tables import describe, text
from fedscale import store

_MARKERS = {"sgd": "o", "prox": "s", "momentum": "^"}
_KINDS = {"sgd": "SGD", "prox": "proximal SGD", "momentum": "SGD with momentum"}


def network_picture(place: store.Place, run_id: str = "") -> Figure:
    """Draw a run's network, and what its partition was chosen by.

    Left: devices coloured by cluster and shaped by optimizer, links between clusters dashed.
    Right: the conductance of the worst cluster beside its threshold, over the number of clusters.

    Args:
        place: folder or URI of the sweep.
        run_id: the run; "" takes the first completed one whose clusters were formed (`ssdfl`), or
            else the first in cycles.

    Raises:
        ValueError: no such run, or none in cycles.
    """
    table = store.load(place, "clusters")
    chosen = table[table["chosen"]]
    if not run_id:
        done = chosen[chosen["status"] == "completed"]
        formed = done[done["conductances"].notna()]
        if done.empty:
            raise ValueError("no completed run in cycles in the records: nothing to draw")
        run_id = (formed if len(formed) else done)["run_id"].iloc[0]
    if run_id not in set(chosen["run_id"]):
        raise ValueError(f"run_id={run_id!r}: no clusters in {place}")
    run = chosen[chosen["run_id"] == run_id].iloc[0]
    members = [list(each) for each in run["clusters"]]
    kinds = list(run["optimizers"])
    graph = nx.empty_graph(len(kinds))
    graph.add_edges_from(tuple(link) for link in run["links"])
    rows = table[table["run_id"] == run_id].sort_values("S")
    figure = Figure(figsize=(10, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    _draw(left, graph, members, kinds)
    figure.suptitle(
        f"{run['method']} · {len(kinds)} devices on {run['graph.name']} · "
        f"{len(members)} clusters · seed {run['seed']}",
        fontsize="large",
    )
    _conductances(right, rows)
    return figure


def _draw(
    axes: Axes, graph: nx.Graph, members: Sequence[Sequence[int]], kinds: Sequence[str]
) -> None:
    group = {device: index for index, cluster in enumerate(members) for device in cluster}
    # Links inside clusters pull harder, so that clusters lie together.
    pull = graph.copy()
    for u, v in pull.edges:
        pull.edges[u, v]["weight"] = 2.0 if group[u] == group[v] else 0.5
    where = nx.spring_layout(pull, seed=0, k=1.6 / np.sqrt(len(graph)), iterations=200)
    inside = [(u, v) for u, v in graph.edges if group[u] == group[v]]
    across = [(u, v) for u, v in graph.edges if group[u] != group[v]]
    nx.draw_networkx_edges(graph, where, inside, ax=axes, edge_color="#555555")
    nx.draw_networkx_edges(graph, where, across, ax=axes, edge_color="#bbbbbb", style="dashed")
    count = len(members)
    shades = COLORS if count <= len(COLORS) else colormaps["turbo"](np.linspace(0.05, 0.95, count))
    for kind, marker in _MARKERS.items():
        nodes = [device for device in graph if kinds[device] == kind]
        nx.draw_networkx_nodes(
            graph,
            where,
            nodes,
            ax=axes,
            node_color=[shades[group[device]] for device in nodes],
            node_shape=marker,
            node_size=260 if len(graph) <= 40 else 60,
            edgecolors="white",
        )
    if len(graph) <= 40:
        nx.draw_networkx_labels(graph, where, ax=axes, font_size=8, font_color="white")
    axes.set_axis_off()
    handles: list[Line2D] = [
        Line2D([], [], color="#777777", marker=marker, linestyle="", label=_KINDS[kind])
        for kind, marker in _MARKERS.items()
        if kind in kinds
    ]
    handles.append(Line2D([], [], color="#555555", label="link inside a cluster"))
    if across:
        handles.append(
            Line2D([], [], color="#bbbbbb", linestyle="--", label="link between clusters")
        )
    axes.legend(
        handles=handles,
        frameon=False,
        fontsize="small",
        loc="upper center",
        bbox_to_anchor=(0.5, 0.0),
        ncols=3,
        title="colour: cluster",
        title_fontsize="small",
    )


def _conductances(axes: Axes, rows: pd.DataFrame) -> None:
    if rows["conductances"].isna().all():
        axes.set_axis_off()
        axes.text(0.5, 0.5, "clusters as the method has them", ha="center")
        return
    worst = [int(np.argmin(np.subtract(p, t))) for p, t in _pairs(rows)]
    phi = [p[w] for (p, _), w in zip(_pairs(rows), worst, strict=True)]
    limit = [t[w] for (_, t), w in zip(_pairs(rows), worst, strict=True)]
    axes.plot(rows["S"], phi, color=COLORS[0], marker="o", label="conductance Φ, worst cluster")
    axes.plot(rows["S"], limit, color=COLORS[1], linestyle="--", label="its threshold (37)")
    picked = rows["chosen"].to_numpy()
    axes.plot(
        rows["S"][picked],
        np.array(phi)[picked],
        color="#000000",
        marker="o",
        markersize=12,
        markerfacecolor="none",
        linestyle="",
        label="chosen",
    )
    axes.set_xlabel("number of clusters S")
    axes.set_ylabel("conductance")
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(color="#e5e5e5", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize="small")


def _pairs(rows: pd.DataFrame) -> list[tuple[Sequence[float], Sequence[float]]]:
    return list(zip(rows["conductances"], rows["thresholds"], strict=True))


def score_table(clusters: pd.DataFrame, keys: Sequence[str]) -> pd.DataFrame:
    """Return which number of clusters was chosen, and which has the lowest score.

    Args:
        clusters: `fedscale.load(folder, "clusters")`.
        keys: configuration keys that make a setting.

    Returns:
        One row per setting: the keys, chosen (mean S of the chosen partition), lowest (mean S of
        the lowest finite score, feasible or not; null if no run has one), feasible (mean number of
        feasible partitions), runs, unbounded (runs in which every score is infinite).
    """
    known = clusters[clusters["score"].notna()]
    rows = []
    for values, part in known.groupby(list(keys), dropna=False):
        each = [own for _, own in part.groupby("run_id", observed=True)]
        scores = part[np.isfinite(part["score"])].sort_values("score", kind="stable")
        lowest = scores.groupby("run_id", observed=True)["S"].first()
        rows.append(
            {
                **dict(zip(keys, values, strict=True)),
                "chosen": np.mean([own.loc[own["chosen"], "S"].iloc[0] for own in each]),
                "lowest": lowest.mean(),
                "feasible": np.mean([own["feasible"].sum() for own in each]),
                "runs": len(each),
                "unbounded": len(each) - len(lowest),
            }
        )
    return pd.DataFrame(rows)


def score_curve(clusters: pd.DataFrame, key: str = "regime.tau_a") -> Figure:
    """Draw the score over the number of clusters, a line per value of the key.

    A panel per accepting rule; scores are divided by the run's lowest, lines are means over the
    runs of one case (mild, as in the paper's figure 13A) that have so many clusters; infinite
    scores are left out.

    Args:
        clusters: `fedscale.load(folder, "clusters")`.
        key: the swept key.

    Raises:
        ValueError: no score in the records.
    """
    known = clusters[np.isfinite(clusters["score"].astype(float))]
    if known.empty:
        raise ValueError("no finite score in the records: nothing to draw")
    case = "mild" if "mild" in set(known["case"]) else known["case"].iloc[0]
    known = known[known["case"] == case]
    least = known.groupby("run_id", observed=True)["score"].transform("min")
    known = known.assign(share=known["score"] / least)
    # `describe` names rounds, which these runs have not.
    said = " · ".join(part for part in describe(known).split(" · ") if "rounds" not in part)
    figure, panels = canvas(f"{said} · {case}" if case else said)
    titles = {"score": "bound (28), mean over clusters", "cycle": "bound (33) of a cycle"}
    for axes, rule in zip(panels, titles, strict=True):
        own = known[known["regime.accept"] == rule]
        for color, (value, part) in zip(COLORS, own.groupby(key), strict=False):
            mean_line(axes, part.groupby("S")["share"], color, f"{key} = {text(value)}")
        axes.set_title(titles[rule], fontsize="medium")
        axes.set_xlabel("number of clusters S")
        axes.set_ylabel("score ÷ the run's lowest")
        axes.set_yscale("log")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return finish(figure, panels[0], "mean ± standard deviation over seeds", "")


def score_report(key: str = "regime.tau_a") -> Callable[[str, str], list[str]]:
    """Return the report (results, sweep) of a sweep that forms clusters without training."""

    def made(results: str, sweep: str) -> list[str]:
        place = store.join(results, sweep)
        clusters = store.load(place, "clusters")
        clusters = clusters[clusters["status"] == "completed"]
        table = score_table(clusters, ["case", "regime.accept", key])
        shown = Table(
            title=f"{sweep}: number of clusters, mean over seeds",
            caption="chosen: the feasible partition that the rule takes; lowest score: among all "
            "candidates of the runs that have a finite one (unbounded: runs that have none). "
            "The paper (fig. 13): the best S goes from 4 to 2 as τ_a goes 1 → 5",
            title_justify="left",
            caption_justify="left",
        )
        columns = ("chosen S", "lowest score at S", "feasible", "runs", "unbounded")
        for name in ("case", "accept", key, *columns):
            shown.add_column(name, justify="right")
        for *setting, chosen, lowest, feasible, runs, unbounded in table.itertuples(index=False):
            cells = ["–" if number != number else f"{number:.2f}" for number in (chosen, lowest)]
            counts = (f"{feasible:.2f}", str(runs), str(unbounded))
            shown.add_row(*(text(value) for value in setting), *cells, *counts)
        terminal().print(shown)
        written = [save_table(results, sweep, table)]
        written += save(score_curve(clusters, key), store.join(results, "figures", sweep))
        stem = store.join(results, "figures", f"{sweep}_network")
        return [*written, *save(network_picture(place), stem)]

    return made
