"""Consensus error over rounds and graphs (paper: figures 2 and 8)."""

from analysis.report import compare_report
from fedscale.sweep import Sweep

SWEEP = Sweep(
    name="dfrost_consensus",
    about="Follow the consensus error over rounds on sparse graphs.",
    methods=("dfrost", "davg_adam_pt"),
    cases={
        "ring, links drop 0.2": {"graph.name": "ring", "graph.link_drop": 0.2},
        "ring": {"graph.name": "ring"},
        "ring, 24 clients": {"graph.name": "ring", "data.clients": 24},
        "grid": {"graph.name": "grid"},
    },
    paper_cases={
        "ring, links drop 0.2": {"graph.name": "ring", "graph.link_drop": 0.2},
        "ring, 30 clients": {"graph.name": "ring", "data.clients": 30},
        "ring": {"graph.name": "ring"},
        "grid": {"graph.name": "grid"},
    },
    overrides={"eval_every": 2},
    report=compare_report("case"),
    seeds=(0, 1),
    advice="python -m analysis.report results",
)

if __name__ == "__main__":
    SWEEP.main()
