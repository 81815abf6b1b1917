"""SSD-FL over the mixings per cycle: cycles to a threshold (paper: tables I to VI)."""

from analysis.cycles import cycles_report
from fedscale.sweep import Axis, Sweep

SWEEP = Sweep(
    name="ssdfl_taur",
    about="Sweep τ_r, the mixings per cycle.",
    methods=("ssdfl", "sdfl", "pdfl", "stc", "cstc"),
    cases={
        "mild": {"data.labels_per_client": 3},
        "extreme": {"data.labels_per_client": 1},
    },
    space={"regime.tau_r": Axis(grid=(1, 3, 5))},
    overrides={"regime.tau_a": 1},
    report=cycles_report("regime.tau_r"),
    seeds=(0, 1, 2),
    advice="python -m analysis.report results",
)

if __name__ == "__main__":
    SWEEP.main()
