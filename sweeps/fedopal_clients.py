"""FedOPAL over the number of clients."""

from analysis.costs import one_shot_curve
from analysis.report import compare_report
from fedscale.sweep import Axis, Sweep

SWEEP = Sweep(
    name="fedopal_clients",
    about="Sweep the number of clients.",
    methods=("fedopal", "afl", "fedavg"),
    space={"data.clients": Axis(grid=(5, 10, 20, 50))},
    overrides={"data.name": "fashion", "data.train_size": 2000, "data.test_size": 0},
    report=compare_report("data.clients", one_shot_curve),
    seeds=(0, 1, 2),
    advice="python -m analysis.report results",
)

if __name__ == "__main__":
    SWEEP.main()
