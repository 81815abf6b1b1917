"""What rounding to bfloat16 costs: final accuracy against float32, over seeds."""

from analysis.report import compare_report
from fedscale.sweep import Axis, Sweep

SWEEP = Sweep(
    name="precision",
    about="Compare bfloat16 with float32.",
    methods=("davg_adam_pt",),
    space={"precision": Axis(grid=("float32", "bfloat16"))},
    report=compare_report("precision", order=("float32", "bfloat16")),
    seeds=(0, 1, 2),
    advice="python -m analysis.report results",
)

if __name__ == "__main__":
    SWEEP.main()
