"""SSD-FL over the probability of a link (paper: figures 8 and 9)."""

from analysis.cycles import cycles_report
from fedscale.sweep import Axis, Sweep

SWEEP = Sweep(
    name="ssdfl_links",
    about="Sweep the link probability of Erdős–Rényi graphs.",
    methods=("ssdfl", "sdfl", "pdfl", "stc", "cstc"),
    cases={
        "mild": {"data.labels_per_client": 3},
        "extreme": {"data.labels_per_client": 1},
    },
    space={"graph.probability": Axis(grid=(0.1, 0.2, 0.3, 0.5), low=0.05, high=0.9)},
    report=cycles_report("graph.probability"),
    seeds=(0, 1),
    advice="python -m analysis.report results",
)

if __name__ == "__main__":
    SWEEP.main()
