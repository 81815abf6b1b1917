"""FedOPAL over the ridge of its head (paper: table III)."""

from analysis.costs import one_shot_curve
from analysis.report import compare_report
from fedscale.sweep import Axis, Sweep

SWEEP = Sweep(
    name="fedopal_lambda",
    about="Sweep λ, the ridge of the closed-form head.",
    methods=("fedopal", "afl"),
    space={"head.lam": Axis(grid=(0.0, 1e-6, 1e-3, 1.0, 10.0), low=1e-6, high=10.0, log=True)},
    overrides={"data.name": "fashion", "data.train_size": 2000, "data.test_size": 0},
    report=compare_report("head.lam", one_shot_curve),
    seeds=(0, 1, 2),
    advice="python -m analysis.report results",
)

if __name__ == "__main__":
    SWEEP.main()
