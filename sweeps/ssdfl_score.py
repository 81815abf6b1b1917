"""SSD-FL's score over the number of clusters, without training (paper: figures 13 and 14)."""

from analysis.networks import score_report
from fedscale.sweep import Axis, Sweep

SWEEP = Sweep(
    name="ssdfl_score",
    about="Score partitions for several τ_a; forms clusters and trains nothing.",
    methods=("ssdfl",),
    cases={
        "mild": {"data.labels_per_client": 3},
        "extreme": {"data.labels_per_client": 1},
        "mild, same SGD": {"data.labels_per_client": 3, "local.devices": "same"},
        "extreme, same SGD": {"data.labels_per_client": 1, "local.devices": "same"},
    },
    space={
        "regime.tau_a": Axis(grid=(1, 3, 5)),
        "regime.accept": Axis(grid=("score", "cycle")),
    },
    overrides={"rounds": 0, "local.lr": 0.01, "graph.connect": "resample"},
    report=score_report(),
    seeds=(0, 1, 2),
    metric="score",
    mode="min",
    penalty=1e12,
    advice="python -m analysis.report results",
)

if __name__ == "__main__":
    SWEEP.main()
