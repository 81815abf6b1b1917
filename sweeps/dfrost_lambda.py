"""D-FROST's regularization weight λ: how much a merge shrinks the prompts (paper, equation 9)."""

from analysis.report import compare_report
from fedscale.sweep import Axis, Sweep

SWEEP = Sweep(
    name="dfrost_lambda",
    about="Sweep the regularization weight λ of D-FROST's optimal-transport merge.",
    methods=("dfrost",),
    space={"merge.lam": Axis(grid=(1e-4, 1e-3, 1e-2, 0.1, 1.0), low=1e-4, high=1.0, log=True)},
    overrides={"local.prompt_lr": 0.03},  # prompts that drift: with small steps all λ agree
    references={"index-wise mean": "davg_adam_pt"},
    report=compare_report("merge.lam"),
    advice="python -m analysis.report results",
)

if __name__ == "__main__":
    SWEEP.main()
