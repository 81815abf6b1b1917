"""How much of a gap is the merge, how much the optimizer (the ablation that the paper lacks)."""

from analysis.report import compare_report
from fedscale.sweep import Axis, Sweep

SWEEP = Sweep(
    name="dfrost_why",
    about="Cross merge, optimizer and initial prompts.",
    methods=("dfrost",),
    cases={
        "Adam": {"local.optimizer": "adam"},
        "Adam, prompts 30 times faster": {"local.optimizer": "adam", "local.prompt_lr": 0.03},
        "SGD, momentum 0.99": {"local.optimizer": "sgd", "local.momentum": 0.99},
    },
    space={
        "merge.name": Axis(grid=("ot", "mean")),
        "prompts.init": Axis(grid=("shared", "per_client")),
    },
    report=compare_report("case"),
    seeds=(0, 1),
    advice="python -m analysis.report results",
)

if __name__ == "__main__":
    SWEEP.main()
