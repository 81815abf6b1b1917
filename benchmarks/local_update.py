"""One local step of a cohort against the plain loop: gradients, seconds, share of the GEMM peak.

Command: python benchmarks/local_update.py

Plain loop: one client at a time, timm's own forward with the prompts inserted, float32, autograd,
torch.optim.Adam. Cohort: all clients at once, `PromptLearner.gradients` and the cohort's Adam, on
cached tokens, in float32 and in bfloat16. Both start from the same images, prompts and heads,
run in one process with the same allocator settings and threads, and take turns step by step.
FLOPs are those of the matrix products and convolutions that were really executed, two per
multiply-add, counted as the operators ran; element-wise work counts as time, not as FLOPs.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np
import timm
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from fedscale.local import cohort, optimizers
from fedscale.local.memory import keep_freed_memory
from fedscale.local.prompting import PromptLearner
from fedscale.models import backbone
from fedscale.models.prompted import Prompted

Step = Callable[[], object]
RATE = 1e-3


@dataclass(frozen=True)
class Problem:
    """Clients' batches one after the other: images uint8 (C·b, H, W, 3), labels (C·b,)."""

    module: VisionTransformer
    spec: backbone.BackboneSpec
    images: np.ndarray
    labels: Tensor
    payload: cohort.Payload
    batch: int


def problem(name: str, clients: int, batch: int, prompts: int, classes: int) -> Problem:
    """Random images, labels and heads; prompts as a run starts them; a randomly drawn backbone."""
    rng = np.random.default_rng(0)
    spec = backbone.BACKBONES[name]
    side = spec.image_size
    images = rng.integers(0, 256, (clients * batch, side, side, 3), dtype=np.uint8)
    module = backbone.build(name, "random")
    payload = PromptLearner(Prompted(module, spec)).initial(
        range(clients),
        count=prompts,
        patch=spec.patch,
        num_classes=classes,
        init="per_client",
        seed=0,
    )
    # The heads of a run start at zero, where the prompts' gradients vanish.
    payload["head.weight"] = torch.from_numpy(
        rng.normal(0, 0.02, payload["head.weight"].shape).astype(np.float32)
    )
    labels = torch.from_numpy(rng.integers(0, classes, len(images)))
    return Problem(module, spec, images, labels, payload, batch)


class PlainLoop:
    """One client at a time, as one would write it first."""

    def __init__(self, setting: Problem) -> None:
        self.setting = setting
        spec = setting.spec
        self.mean, self.std = (torch.tensor(v).view(3, 1, 1) for v in (spec.mean, spec.std))
        self.images = torch.from_numpy(setting.images)
        self.clients = [
            {name: v[c].clone().requires_grad_() for name, v in setting.payload.items()}
            for c in range(len(setting.payload["prompts"]))
        ]
        self.optimizers = [torch.optim.Adam(c.values(), lr=RATE) for c in self.clients]

    def loss(self, client: int) -> Tensor:
        """Mean cross-entropy of a client's batch."""
        vit: Any = self.setting.module
        rows = slice(client * self.setting.batch, (client + 1) * self.setting.batch)
        own = self.clients[client]
        pixels = (self.images[rows].permute(0, 3, 1, 2).float() / 255 - self.mean) / self.std
        x = vit.norm_pre(vit.patch_drop(vit._pos_embed(vit.patch_embed(pixels))))
        prompts = own["prompts"].expand(len(x), -1, -1)
        x = vit.norm(vit.blocks(torch.cat([x[:, :1], prompts, x[:, 1:]], 1)))
        logits = F.linear(x[:, 0], own["head.weight"], own["head.bias"])
        return F.cross_entropy(logits, self.setting.labels[rows])

    def gradients(self) -> cohort.Payload:
        """Gradients of all clients, stacked like the payload."""
        found = [
            torch.autograd.grad(self.loss(c), list(own.values()))
            for c, own in enumerate(self.clients)
        ]
        stacked = (torch.stack(each) for each in zip(*found, strict=True))
        return dict(zip(self.setting.payload, stacked, strict=True))

    def step(self) -> None:
        """One Adam step of every client."""
        for client, optimizer in enumerate(self.optimizers):
            optimizer.zero_grad()
            self.loss(client).backward()
            optimizer.step()


class Cohort:
    """All clients as one batch."""

    def __init__(self, setting: Problem, precision: str, chunk: int | None) -> None:
        self.learner = PromptLearner(Prompted(setting.module, setting.spec, precision=precision))
        self.tokens = self.learner.model.tokens(setting.images, projected=True)
        self.labels, self.chunk = setting.labels, chunk
        self.payload = {name: v.clone() for name, v in setting.payload.items()}
        self.counts = [setting.batch] * len(self.payload["prompts"])
        self.rows = torch.arange(len(self.labels))
        self.rule = optimizers.adam()
        self.moments, self.taken = self.rule.init(self.payload), 0
        self.rates = dict.fromkeys(self.payload, RATE)

    def gradients(self) -> cohort.Payload:
        """Gradients of all clients."""
        return self.learner.gradients(
            self.payload,
            self.tokens[self.rows],
            self.labels[self.rows],
            self.counts,
            chunk=self.chunk,
        )[0]

    def step(self) -> None:
        """One Adam step of every client."""
        self.taken += 1
        grads = self.gradients()
        self.rule.update(self.payload, grads, self.moments, self.rates, self.taken)

    def evaluate(self) -> object:
        """Score every client on all images."""
        return self.learner.evaluate(self.payload, self.tokens, self.labels, chunk=self.chunk)


def relative_error(found: cohort.Payload, right: cohort.Payload) -> float:
    """Largest relative error, in norm, over clients and tensors."""
    errors = [
        ((found[k] - right[k]).flatten(1).norm(dim=1) / right[k].flatten(1).norm(dim=1)).max()
        for k in right
    ]
    return float(torch.stack(errors).max())


def flops(run: Step) -> float:
    """FLOPs of the matrix products and convolutions that `run` executes."""

    def linear(x: Any, weight: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
        # The weight is packed: its shape says nothing, those of input and output do.
        rows = int(np.prod(out_shape[:-1]))
        return 2 * rows * int(x[-1]) * int(out_shape[-1])

    product = torch.ops.mkldnn._linear_pointwise
    with FlopCounterMode(display=False, custom_mapping={product: linear}) as counter:
        run()
    return counter.get_total_flops()


def gemm_peak(dtype: torch.dtype, seconds: float = 1.0) -> float:
    """FLOP/s of the fastest of several large products, oneDNN and default: best of repeats."""
    best = 0.0
    for m, k, n in ((2048, 2048, 2048), (8192, 768, 192), (4096, 1024, 1024)):
        x, w = torch.randn(m, k).to(dtype), torch.randn(n, k).to(dtype)
        ways: list[Step] = [partial(F.linear, x, w)]
        if torch.backends.mkldnn.is_available():
            packed = torch.ops.mkldnn._reorder_linear_weight(w, None)
            product = torch.ops.mkldnn._linear_pointwise
            ways.append(partial(product, x, packed, None, "none", [], ""))
        for way in ways:
            way()
            until = time.perf_counter() + seconds / 6
            while time.perf_counter() < until:
                begun = time.perf_counter()
                way()
                best = max(best, 2 * m * k * n / (time.perf_counter() - begun))
    return best


def interleaved(ways: dict[str, Step], repeats: int) -> dict[str, list[float]]:
    """Wall seconds of each call, the ways taking turns, after two turns to warm up."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(repeats + 2):
        for name, way in ways.items():
            begun = time.perf_counter()
            way()
            if turn > 1:
                seconds[name].append(time.perf_counter() - begun)
    return seconds


def describe_machine(console: Console, threads: int, kept: bool) -> None:
    """Print what the numbers depend on."""
    cpu = Path("/proc/cpuinfo")
    lines = cpu.read_text().splitlines() if cpu.exists() else []
    facts = {key.strip(): value.strip() for key, _, value in (x.partition(":") for x in lines)}
    known = {"avx2", "avx512f", "avx512_bf16", "amx_bf16"}
    flags = " ".join(f for f in facts.get("flags", "").split() if f in known)
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")
    console.print(
        f"{facts.get('model name', platform.machine())}, {os.cpu_count()} cores, {flags}; "
        f"torch {torch.__version__} ({torch.backends.cpu.get_cpu_capability()}), "
        f"timm {timm.__version__}; {threads} thread(s); freed memory "
        f"{'kept' if kept else 'returned'}; load {load:.1f}"
    )


def compare(
    console: Console, setting: Problem, threads: int, repeats: int, chunk: int | None
) -> None:
    """Measure at one number of threads and print the table."""
    torch.set_num_threads(threads)
    loop = PlainLoop(setting)
    cohorts = {name: Cohort(setting, name, chunk) for name in ("float32", "bfloat16")}
    right = loop.gradients()
    errors = {name: relative_error(c.gradients(), right) for name, c in cohorts.items()}
    work = {"plain loop": flops(loop.gradients)}
    work |= {name: flops(c.gradients) for name, c in cohorts.items()}
    ways: dict[str, Step] = {"plain loop": loop.step}
    ways |= {name: c.step for name, c in cohorts.items()}
    seconds = interleaved(ways, repeats)
    peaks = {
        "float32": gemm_peak(torch.float32),
        "bfloat16": gemm_peak(torch.bfloat16),
    }
    base = statistics.median(seconds["plain loop"])
    table = Table(title=f"one step, {threads} thread(s), median of {repeats} turns (fastest)")
    for column in (
        "",
        "gradients' relative error",
        "seconds",
        "faster",
        "images/s",
        "GFLOP",
        "GFLOP/s",
        "share of GEMM peak",
    ):
        table.add_column(column, justify="right" if column else "left")
    for name, times in seconds.items():
        median = statistics.median(times)
        peak = peaks["bfloat16" if name == "bfloat16" else "float32"]
        table.add_row(
            name,
            f"{errors[name]:.1e}" if name in errors else "–",
            f"{median:.3f} ({min(times):.3f})",
            f"{base / median:.2f}×",
            f"{len(setting.labels) / median:.0f}",
            f"{work[name] / 1e9:.1f}",
            f"{work[name] / median / 1e9:.0f}",
            f"{work[name] / median / peak:.0%} of {peak / 1e9:.0f} GFLOP/s",
        )
    console.print(table)
    scores = interleaved({name: c.evaluate for name, c in cohorts.items()}, max(1, repeats // 3))
    total = len(setting.labels) * len(setting.payload["prompts"])
    for name, times in scores.items():
        console.print(f"evaluate, {name}: {total / statistics.median(times):.0f} images/s")


def sweep_chunks(console: Console, setting: Problem, threads: int, repeats: int) -> None:
    """Print the seconds of a step by images per chunk."""
    torch.set_num_threads(threads)
    sizes = [s for s in (16, 32, 64, 96, 160, 320, 640) if s <= len(setting.labels)]
    ways: dict[str, Step] = {
        f"{name} {size}": Cohort(setting, name, size).step
        for name in ("float32", "bfloat16")
        for size in sizes
    }
    seconds = interleaved(ways, repeats)
    table = Table("images per chunk", *map(str, sizes), title=f"seconds, {threads} thread(s)")
    for name in ("float32", "bfloat16"):
        medians = (statistics.median(seconds[f"{name} {size}"]) for size in sizes)
        table.add_row(name, *(f"{m:.3f}" for m in medians))
    console.print(table)


NAMES = [name for name in backbone.BACKBONES if name != "convit_base"]
"""Backbones that the plain loop can walk: ConViT's CLS token comes late."""


@click.command(help=__doc__)
@click.option("--threads", type=click.IntRange(1), multiple=True, help="default: 1, then all cores")
@click.option("--backbone", "name", type=click.Choice(NAMES), default="nano")
@click.option("--clients", type=click.IntRange(1), default=20, show_default=True)
@click.option("--batch", type=click.IntRange(2), default=16, show_default=True)
@click.option("--prompts", type=click.IntRange(1), default=10, show_default=True)
@click.option("--classes", type=click.IntRange(2), default=40, show_default=True)
@click.option("--repeats", type=click.IntRange(1), default=11, show_default=True)
@click.option("--chunk", type=click.IntRange(1), help="images per chunk; default: the package's")
@click.option("--chunks", is_flag=True, help="measure chunk sizes instead")
def main(
    threads: tuple[int, ...],
    name: str,
    clients: int,
    batch: int,
    prompts: int,
    classes: int,
    repeats: int,
    chunk: int | None,
    chunks: bool,
) -> None:
    """Run what the options ask for."""
    console = Console(width=132)
    kept = keep_freed_memory()
    setting = problem(name, clients, batch, prompts, classes)
    console.print(f"{clients} clients × batch {batch} × {prompts} prompts on {name}")
    for count in dict.fromkeys(threads or (1, os.cpu_count() or 1)):
        describe_machine(console, count, kept)
        if chunks:
            sweep_chunks(console, setting, count, repeats)
        else:
            compare(console, setting, count, repeats, chunk)


if __name__ == "__main__":
    main()
