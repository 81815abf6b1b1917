"""Prompts per client under decentralised PFPT (paper: figure 5)."""

from analysis.costs import prompts_curve
from analysis.report import compare_report
from fedscale.sweep import Sweep

SWEEP = Sweep(
    name="pfpt_growth",
    about="Count the prompts that decentralised PFPT keeps.",
    methods=("pfpt_dec", "dfrost"),
    overrides={"rounds": 5, "eval_every": 1},
    report=compare_report(figure=prompts_curve),
    seeds=(0, 1),
    advice="python -m analysis.report results",
)

if __name__ == "__main__":
    SWEEP.main()
