"""D-FROST and its baselines over label skew (paper: tables 1 and 2, figures 1 and 7)."""

from analysis.report import compare_report
from fedscale.sweep import Sweep

SWEEP = Sweep(
    name="dfrost_baselines",
    about="Compare D-FROST with its baselines over label skew.",
    methods=("dfrost", "davg_adam_pt", "dfedavgm_pt", "dfedsam_pt", "dpsgd_pt"),
    cases={
        "alpha 0.5": {"data.partition": "dirichlet", "data.alpha": 0.5},
        "alpha 0.1": {"data.partition": "dirichlet", "data.alpha": 0.1},
        "extreme": {"data.partition": "extreme"},
    },
    report=compare_report("case", order=("alpha 0.5", "alpha 0.1", "extreme")),
    seeds=(0, 1),
    advice="python sweeps/dfrost_why.py",
)

if __name__ == "__main__":
    SWEEP.main()
