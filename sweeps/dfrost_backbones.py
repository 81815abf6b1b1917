"""D-FROST over frozen backbones (paper: figure 11)."""

from analysis.report import compare_report
from fedscale.sweep import Sweep

SWEEP = Sweep(
    name="dfrost_backbones",
    about="Compare frozen backbones.",
    methods=("dfrost", "davg_adam_pt"),
    cases={"nano": {}, "nano, untrained": {"backbone.weights": "random"}},
    paper_cases={
        "ViT-B/32": {"backbone.name": "vit_b32"},
        "DeiT-B/16": {"backbone.name": "deit_b16"},
        "ConViT-Base": {"backbone.name": "convit_base"},
        "CLIP ViT-B/16": {"backbone.name": "clip_b16"},
    },
    report=compare_report("case"),
    seeds=(0, 1),
    advice="python -m analysis.report results",
)

if __name__ == "__main__":
    SWEEP.main()
