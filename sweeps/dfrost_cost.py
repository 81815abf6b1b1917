"""Seconds and bytes per client and round (paper: table 4, figure 9)."""

from analysis.costs import cost_bars
from analysis.report import compare_report
from fedscale.sweep import Sweep

SWEEP = Sweep(
    name="dfrost_cost",
    about="Measure what a round costs each method.",
    methods=("dfrost", "davg_adam_pt", "dfedavgm_pt", "dfedsam_pt", "dpsgd_pt"),
    overrides={"rounds": 4, "eval_every": 4},
    report=compare_report(figure=cost_bars),
    seeds=(0, 1),
    advice="python -m analysis.report results",
)

if __name__ == "__main__":
    SWEEP.main()
