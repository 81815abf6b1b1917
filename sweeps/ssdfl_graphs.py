"""SSD-FL over graph families (paper: figures 6, 7 and 12)."""

from analysis.cycles import cycles_report
from fedscale.sweep import Axis, Sweep

SWEEP = Sweep(
    name="ssdfl_graphs",
    about="Compare families of graphs.",
    methods=("ssdfl", "sdfl", "pdfl", "stc", "cstc"),
    cases={
        "mild": {"data.labels_per_client": 3},
        "extreme": {"data.labels_per_client": 1},
    },
    space={
        "graph.name": Axis(
            grid=(
                "barabasi_albert",
                "random_geometric",
                "watts_strogatz",
                "erdos_renyi",
                "complete",
            )
        )
    },
    report=cycles_report("graph.name"),
    seeds=(0, 1),
    advice="python -m analysis.report results",
)

if __name__ == "__main__":
    SWEEP.main()
