"""FedOPAL over the proximal weight of its prompts (paper: table III)."""

from analysis.costs import one_shot_curve
from analysis.report import compare_report
from fedscale.sweep import Axis, Sweep

SWEEP = Sweep(
    name="fedopal_mu",
    about="Sweep μ, which holds prompts to their common start.",
    methods=("fedopal",),
    space={"local.mu": Axis(grid=(0.0, 0.01, 0.1, 0.5, 1.0, 10.0), low=1e-3, high=10.0, log=True)},
    overrides={"data.name": "fashion", "data.train_size": 2000, "data.test_size": 0},
    report=compare_report("local.mu", one_shot_curve),
    seeds=(0, 1, 2),
    advice="python -m analysis.report results",
)

if __name__ == "__main__":
    SWEEP.main()
