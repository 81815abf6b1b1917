"""FedOPAL and one-shot baselines over label skew (paper: table I)."""

from analysis.costs import one_shot_curve
from analysis.report import compare_report
from fedscale.sweep import Sweep

SWEEP = Sweep(
    name="fedopal_alpha",
    about="Compare one-shot methods over label skew.",
    methods=("fedopal", "afl", "fedcgs", "fedpft", "fedavg", "local"),
    cases={
        "alpha 0.01": {"data.alpha": 0.01},
        "alpha 0.1": {"data.alpha": 0.1},
        "alpha 1": {"data.alpha": 1.0},
        "IID": {"data.partition": "iid"},
    },
    overrides={"data.name": "fashion", "data.train_size": 2000, "data.test_size": 0},
    report=compare_report(
        "case", one_shot_curve, order=("alpha 0.01", "alpha 0.1", "alpha 1", "IID")
    ),
    seeds=(0, 1, 2),
    advice="python -m analysis.report results",
)

if __name__ == "__main__":
    SWEEP.main()
