"""FedOPAL and one-shot baselines over data sets (paper: tables I and II)."""

from analysis.costs import one_shot_curve
from analysis.report import compare_report
from fedscale.sweep import Sweep

SWEEP = Sweep(
    name="fedopal_tables",
    about="Compare one-shot methods over data sets.",
    methods=("fedopal", "afl", "fedcgs", "fedpft", "fedavg", "local"),
    cases={
        "fashion": {"data.name": "fashion", "data.train_size": 2000, "data.test_size": 0},
        "four domains": {"data.name": "offline", "data.train_size": 480, "data.test_size": 0},
    },
    paper_cases={
        name: {"data.name": name} for name in ("cifar10", "cifar100", "svhn", "dtd", "fmnist")
    },
    report=compare_report("case", one_shot_curve),
    seeds=(0, 1, 2),
    advice="python -m analysis.report results",
)

if __name__ == "__main__":
    SWEEP.main()
