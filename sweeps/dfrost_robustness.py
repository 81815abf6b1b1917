"""D-FROST under failing links, more clients and fewer participants (paper: figure 4)."""

from analysis.report import compare_report
from fedscale.sweep import Sweep

SWEEP = Sweep(
    name="dfrost_robustness",
    about="Stress the network: failing links, more clients, fewer participants.",
    methods=("dfrost", "davg_adam_pt", "dfedavgm_pt"),
    cases={
        "undisturbed": {},
        "links drop 0.4": {"graph.link_drop": 0.4},
        "twice the clients": {"data.clients": 24},
        "half take part": {"graph.participation": 0.5},
    },
    paper_cases={
        "undisturbed": {},
        "links drop 0.4": {"graph.link_drop": 0.4},
        "twice the clients": {"data.clients": 100},
        "10 of 50 take part": {"graph.participation": 0.2},
    },
    report=compare_report("case"),
    seeds=(0, 1),
    advice="python -m analysis.report results",
)

if __name__ == "__main__":
    SWEEP.main()
