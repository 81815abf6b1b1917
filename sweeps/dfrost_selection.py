"""Prompt pools with query-key selection in every method (paper: figure 12)."""

from analysis.report import compare_report
from fedscale.sweep import Sweep

SWEEP = Sweep(
    name="dfrost_selection",
    about="Give every method a pool of prompts that images select from.",
    methods=("dfrost_pp", "davg_adam_pp", "dfedavgm_pp", "dfedsam_pp", "dpsgd_pp"),
    overrides={"prompts.pool": 8, "prompts.count": 4},
    report=compare_report(),
    seeds=(0, 1),
    advice="python -m analysis.report results",
)

if __name__ == "__main__":
    SWEEP.main()
