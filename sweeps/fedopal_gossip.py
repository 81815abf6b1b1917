"""FedOPAL without a server: statistics spread by gossip (in no paper)."""

from analysis.costs import head_error_curve
from analysis.report import compare_report
from fedscale.sweep import Axis, Sweep

SWEEP = Sweep(
    name="fedopal_gossip",
    about="Spread FedOPAL's statistics by gossip over graphs.",
    methods=("fedopal_gossip",),
    space={"graph.name": Axis(grid=("ring", "grid", "erdos_renyi", "regular", "complete"))},
    references={"server": "fedopal"},
    overrides={
        "data.name": "fashion",
        "data.train_size": 1000,
        "data.test_size": 0,
        "graph.resample": False,
    },
    report=compare_report("graph.name", figure=head_error_curve),
    seeds=(0, 1),
    advice="python -m analysis.report results",
)

if __name__ == "__main__":
    SWEEP.main()
