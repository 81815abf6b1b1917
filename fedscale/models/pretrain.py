"""Pre-training of `nano` on images made by formula, and the probe that shows what it is worth.

    python -m fedscale.models.pretrain --images 1000000 --out nano.safetensors --seed 0
    python -m fedscale.models.pretrain --probe [PATH]

The network classifies the objects of `formula.py` (formula-driven supervised learning: contours
with harmonic outlines after Kataoka et al. 2022, arXiv:2206.09132); the classifier is then thrown
away. The run that made the shipped file is written in the file and printed by `--probe`.
"""

from __future__ import annotations

import math
import os
import platform
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import timm
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from safetensors.torch import save_file
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from fedscale.models import backbone, formula, probe
from fedscale.models.prompted import native_bfloat16

THUMBNAIL = 16
_EMBEDDINGS = ("pos_embed", "cls_token")


@dataclass(frozen=True)
class Recipe:
    """Settings of a pre-training run.

    Attributes:
        images: images seen, rounded up to whole batches; every image is new.
        batch: images per step.
        lr: peak learning rate of AdamW, reached after `warmup`, then a half cosine to 0.
        decay: weight decay of the matrices (not of norms, biases and embeddings).
        warmup: share of the steps with a linearly growing learning rate.
        easy: share of easy images at the end; it starts at 1 and falls over the first 40 % of the
            steps. Without easy images at first, CLS stays the same for all images.
        patches: weight of a second classifier's loss, on the mean of the patches; it teaches the
            blocks before CLS has learnt where to look, and is thrown away with the first.
        thumbnail: weight of a third head's loss: CLS → the image's grey levels at 16×16, squared
            error; without it CLS knows shapes only and forgets light and shade.
        seed: seed of the shapes, the images and the initial weights.
    """

    images: int = 1_000_000
    batch: int = 256
    lr: float = 1e-3
    decay: float = 0.05
    warmup: float = 0.04
    easy: float = 0.15
    patches: float = 0.5
    thumbnail: float = 1.0
    seed: int = 0

    @property
    def steps(self) -> int:
        """Number of optimizer steps."""
        return math.ceil(self.images / self.batch)

    def easy_share(self, step: int) -> float:
        """Return the share of easy images of a step in 1..steps."""
        passed = min(1.0, max(0.0, step / self.steps - 0.08) / 0.32)
        return 1 - (1 - self.easy) * passed

    def rate(self, step: int) -> float:
        """Return the learning rate of a step in 1..steps."""
        rise = max(1, round(self.warmup * self.steps))
        if step <= rise:
            return self.lr * step / rise
        return self.lr / 2 * (1 + math.cos(math.pi * (step - rise) / max(1, self.steps - rise)))


def train(
    recipe: Recipe, on_step: Callable[[int, float, float, VisionTransformer], None] | None = None
) -> VisionTransformer:
    """Train `nano` from its seeded random initialisation; return it frozen.

    Matrix products run in bfloat16 where the processor has it, the weights stay float32.

    Args:
        recipe: the run.
        on_step: called after every step with (step, loss, accuracy on the batch, the model).
    """
    model = backbone.build("nano", "random", seed=recipe.seed).requires_grad_(True).train()
    blocks: Iterable[Any] = model.blocks
    for block in blocks:
        block.attn.fused_attn = False  # the fused kernel is slower on CPUs at this size
    with torch.random.fork_rng(devices=[]):  # the layers draw weights before they are zeroed
        outputs = (formula.CLASSES, formula.CLASSES, THUMBNAIL**2)
        heads = nn.ModuleList(nn.Linear(model.num_features, count) for count in outputs)
    for values in heads.parameters():
        nn.init.zeros_(values)
    parameters = [*model.named_parameters(), *heads.named_parameters(prefix="classifiers")]
    matrices = [p for name, p in parameters if p.ndim > 1 and name not in _EMBEDDINGS]
    others = [p for name, p in parameters if p.ndim == 1 or name in _EMBEDDINGS]
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": recipe.decay},
        {"params": others},
    ]
    optimizer = torch.optim.AdamW(
        groups,
        lr=recipe.lr,
        weight_decay=0.0,
        betas=(0.9, 0.98),
        fused=True,
    )
    known = formula.shapes(recipe.seed)
    half = native_bfloat16()
    for step in range(1, recipe.steps + 1):
        easy = recipe.easy_share(step)
        images, labels = formula.batch(known, recipe.seed, step, recipe.batch, easy)
        for group in optimizer.param_groups:
            group["lr"] = recipe.rate(step)
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            tokens = model.forward_features(normalise(images))
            logits = heads[0](tokens[:, 0]).float()
            patches = heads[1](tokens[:, 1:].mean(1)).float()
            drawn = heads[2](tokens[:, 0]).float()
        loss = nn.functional.cross_entropy(logits, labels)
        loss = loss + recipe.patches * nn.functional.cross_entropy(patches, labels)
        loss = loss + recipe.thumbnail * nn.functional.mse_loss(drawn, thumbnails(images))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_([p for _, p in parameters], 1.0)
        optimizer.step()
        if on_step:
            hits = (logits.detach().argmax(1) == labels).float().mean()
            on_step(step, loss.item(), hits.item(), model)
    model.eval().requires_grad_(False)
    return model


def thumbnails(images: Tensor) -> Tensor:
    """Return grey levels (B, 256) at 16×16 of images (B, 3, S, S) in 0..1, scaled to −2..2.

    The scale gives the levels of training images a variance near 1.
    """
    grey = images.mean(1, keepdim=True)
    return 4 * nn.functional.adaptive_avg_pool2d(grey, THUMBNAIL).flatten(1) - 2


def normalise(images: Tensor) -> Tensor:
    """Normalise images (B, 3, S, S) in 0..1 as `nano` expects them."""
    spec = backbone.BACKBONES["nano"]
    mean, std = torch.tensor(spec.mean), torch.tensor(spec.std)
    return (images - mean[:, None, None]) / std[:, None, None]


def save(model: nn.Module, path: str | Path, notes: dict[str, str]) -> None:
    """Write the weights in float16 (half the size; read back as float32) with their provenance."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    state = {key: value.detach().half().contiguous() for key, value in model.state_dict().items()}
    beside = path.with_name(f".{path.name}.part")
    save_file(state, beside, metadata=notes)
    os.replace(beside, path)


def provenance(recipe: Recipe, step: int, seconds: float, accuracy: float) -> dict[str, str]:
    """Return the notes kept in the weights file."""
    return {
        "command": f"python -m fedscale.models.pretrain --images {recipe.images} "
        f"--seed {recipe.seed} --batch {recipe.batch} --lr {recipe.lr:g}",
        "seed": str(recipe.seed),
        "images": str(step * recipe.batch),
        "steps": f"{step} of {recipe.steps}",
        "seconds": f"{seconds:.0f}",
        "threads": str(torch.get_num_threads()),
        "precision": "bfloat16" if native_bfloat16() else "float32",
        "training accuracy": f"{accuracy:.3f} over {formula.CLASSES} classes",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "timm": timm.__version__,
        "numpy": np.__version__,
    }


def _run(recipe: Recipe, out: Path, every: int) -> None:
    began = time.perf_counter()
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn(), refresh_per_second=1) as progress:
        task = progress.add_task("nano", total=recipe.steps)
        recent = [0.0, 0.0]

        def on_step(step: int, loss: float, accuracy: float, model: VisionTransformer) -> None:
            keep = min(0.98, 1 - 1 / step)
            recent[:] = [
                keep * old + (1 - keep) * new
                for old, new in zip(recent, (loss, accuracy), strict=True)
            ]
            seconds = time.perf_counter() - began
            text = (
                f"step {step}/{recipe.steps} loss {recent[0]:.3f} accuracy {recent[1]:.3f} "
                f"{step * recipe.batch / seconds:.0f} images/s"
            )
            progress.update(task, completed=step, description=text)
            if step % every == 0 or step == recipe.steps:
                save(model, out, provenance(recipe, step, seconds, recent[1]))
                progress.console.print(text, highlight=False)

        train(recipe, on_step)


@click.command()
@click.option("--images", default=Recipe.images, show_default=True, type=click.IntRange(1))
@click.option("--batch", default=Recipe.batch, show_default=True, type=click.IntRange(2))
@click.option("--lr", default=Recipe.lr, show_default=True, type=click.FloatRange(0, min_open=True))
@click.option("--seed", default=Recipe.seed, show_default=True, type=click.IntRange(0))
@click.option(
    "--out", default="nano.safetensors", show_default=True, type=click.Path(path_type=Path)
)
@click.option("--every", default=250, show_default=True, help="Steps between checkpoints.")
@click.option("--threads", default=0, help="Threads of torch; 0 leaves its own choice.")
@click.option(
    "--probe",
    "probed",
    is_flag=False,
    flag_value="pretrained",
    help="Train nothing: print the probe table of PATH (default: the shipped weights).",
)
def main(
    images: int,
    batch: int,
    lr: float,
    seed: int,
    out: Path,
    every: int,
    threads: int,
    probed: str | None,
) -> None:
    """Pre-train `nano` on images made by formula, or probe what a training made."""
    if threads:
        torch.set_num_threads(threads)
    if probed is None:
        _run(Recipe(images=images, batch=batch, lr=lr, seed=seed), out, every)
        return
    console = Console()
    try:
        models = {name: backbone.build("nano", name) for name in ("random", probed)}
        notes = backbone.metadata(_file(probed))
    except backbone.WeightsUnavailable as error:
        raise click.ClickException(str(error)) from None
    for key, value in sorted(notes.items()):
        console.print(f"{key}: {value}", highlight=False)
    named = {"untrained": models["random"], "trained": models[probed]}
    console.print(probe.table(probe.probe("nano", named)))
    console.print(probe.PROTOCOL, highlight=False)


def _file(weights: str) -> Path:
    return backbone.ASSETS / "nano.safetensors" if weights == "pretrained" else Path(weights)


if __name__ == "__main__":
    main()
