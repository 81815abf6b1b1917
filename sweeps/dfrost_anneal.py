"""Annealing the entropy weight within a merge (paper: figure 13)."""

from analysis.report import compare_report
from fedscale.sweep import Axis, Sweep

SWEEP = Sweep(
    name="dfrost_anneal",
    about="Compare a fixed entropy weight with an annealed one.",
    methods=("dfrost",),
    space={
        "merge.schedule": Axis(grid=("fixed", "anneal")),
        "merge.epsilon": Axis(grid=(0.01, 0.1), low=1e-3, high=1.0, log=True),
    },
    overrides={"local.prompt_lr": 0.03},
    report=compare_report("merge.schedule"),
    seeds=(0, 1),
    advice="python -m analysis.report results",
)

if __name__ == "__main__":
    SWEEP.main()
