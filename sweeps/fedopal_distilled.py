"""Methods that distil a generator's images, beside FedOPAL (paper: table I), at a smaller size."""

from analysis.costs import one_shot_curve
from analysis.report import compare_report
from fedscale.sweep import Sweep

SWEEP = Sweep(
    name="fedopal_distilled",
    about="Compare FedOPAL with DENSE and Co-Boosting.",
    methods=("fedopal", "afl", "dense", "coboosting"),
    cases={
        "alpha 0.1": {"data.alpha": 0.1},
        "IID": {"data.partition": "iid"},
    },
    overrides={
        "data.name": "fashion",
        "data.train_size": 600,
        "data.test_size": 0,
        "data.clients": 5,
    },
    report=compare_report("case", one_shot_curve, order=("alpha 0.1", "IID")),
    seeds=(0, 1),
    advice="python -m analysis.report results",
)

if __name__ == "__main__":
    SWEEP.main()
