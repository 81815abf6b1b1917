"""D-FROST over communication graphs (paper: table 3, figure 3)."""

from analysis.report import compare_report
from fedscale.sweep import Axis, Sweep

SWEEP = Sweep(
    name="dfrost_topology",
    about="Compare graphs, from a ring to everybody with everybody.",
    methods=("dfrost", "davg_adam_pt"),
    space={
        "graph.name": Axis(grid=("ring", "grid", "erdos_renyi", "regular", "complete")),
    },
    report=compare_report(
        "graph.name", order=("ring", "grid", "erdos_renyi", "regular", "complete")
    ),
    seeds=(0, 1),
    advice="python -m analysis.report results",
)

if __name__ == "__main__":
    SWEEP.main()
