"""FedOPAL over the epochs of prompt training."""

from analysis.costs import one_shot_curve
from analysis.report import compare_report
from fedscale.sweep import Axis, Sweep

SWEEP = Sweep(
    name="fedopal_epochs",
    about="Sweep the epochs of prompt training.",
    methods=("fedopal",),
    space={"local.epochs": Axis(grid=(1, 2, 5, 10))},
    overrides={"data.name": "fashion", "data.train_size": 2000, "data.test_size": 0},
    report=compare_report("local.epochs", one_shot_curve),
    seeds=(0, 1, 2),
    advice="python -m analysis.report results",
)

if __name__ == "__main__":
    SWEEP.main()
