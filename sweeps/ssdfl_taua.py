"""SSD-FL over the training instances per cycle (paper: figures 2, 3 and 10)."""

from analysis.cycles import cycles_report
from fedscale.sweep import Axis, Sweep

SWEEP = Sweep(
    name="ssdfl_taua",
    about="Sweep τ_a, the training instances per cycle.",
    methods=("ssdfl", "sdfl", "pdfl", "stc", "cstc"),
    cases={
        "mild": {"data.labels_per_client": 3},
        "extreme": {"data.labels_per_client": 1},
        "mild, same SGD": {"data.labels_per_client": 3, "local.devices": "same"},
        "extreme, same SGD": {"data.labels_per_client": 1, "local.devices": "same"},
    },
    space={"regime.tau_a": Axis(grid=(1, 5))},
    report=cycles_report("regime.tau_a"),
    seeds=(0, 1, 2),
    advice="python -m analysis.report results",
)

if __name__ == "__main__":
    SWEEP.main()
