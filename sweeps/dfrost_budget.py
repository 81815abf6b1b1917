"""D-FROST over the number of prompts (paper: figure 10)."""

from analysis.report import compare_report
from fedscale.sweep import Axis, Sweep

SWEEP = Sweep(
    name="dfrost_budget",
    about="Sweep the number of prompts per client.",
    methods=("dfrost", "davg_adam_pt"),
    space={"prompts.count": Axis(grid=(2, 4, 8))},
    report=compare_report("prompts.count"),
    seeds=(0, 1),
    advice="python -m analysis.report results",
)

if __name__ == "__main__":
    SWEEP.main()
