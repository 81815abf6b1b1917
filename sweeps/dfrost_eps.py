"""D-FROST's entropy weight ε: what it does to accuracy and to consensus (paper, section 4.3)."""

from analysis.report import compare_report
from fedscale.sweep import Axis, Sweep

SWEEP = Sweep(
    name="dfrost_eps",
    about="Sweep the entropy weight ε of D-FROST's optimal-transport merge.",
    methods=("dfrost",),
    space={"merge.epsilon": Axis(grid=(0.001, 0.01, 0.1, 1.0), low=1e-3, high=10, log=True)},
    overrides={"local.prompt_lr": 0.03},  # prompts that drift: with small steps all ε agree
    references={"index-wise mean": "davg_adam_pt"},
    report=compare_report("merge.epsilon"),
    advice="python sweeps/dfrost_lambda.py, or python sweeps/dfrost_eps.py --search optuna",
)

if __name__ == "__main__":
    SWEEP.main()
