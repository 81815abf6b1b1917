"""SSD-FL over the number of devices (paper: figures 4, 5 and 11)."""

from analysis.cycles import cycles_report
from fedscale.sweep import Axis, Sweep

SWEEP = Sweep(
    name="ssdfl_size",
    about="Sweep the number of devices.",
    methods=("ssdfl", "sdfl", "pdfl", "stc", "cstc"),
    cases={
        "mild": {"data.labels_per_client": 3},
        "extreme": {"data.labels_per_client": 1},
    },
    space={"data.clients": Axis(grid=(10, 20, 40))},
    report=cycles_report("data.clients"),
    seeds=(0, 1),
    advice="python -m analysis.report results",
)

if __name__ == "__main__":
    SWEEP.main()
