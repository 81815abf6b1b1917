"""OT merge of all clients in one call against one client at a time, and its share of a round.

Command: python benchmarks/ot_merge.py
"""

from __future__ import annotations

import math
import platform
import statistics
import time
from collections.abc import Callable

import click
import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from fedscale.config import RunConfig
from fedscale.data.catalogue import CATALOGUE
from fedscale.graphs import mixing, topology
from fedscale.local import cohort
from fedscale.local.memory import keep_freed_memory
from fedscale.local.prompting import PromptLearner
from fedscale.merge.mean import mean_merge
from fedscale.merge.ot import merge_neighbourhoods, ot_merge
from fedscale.models import backbone
from fedscale.models.prompted import Prompted
from fedscale.presets import preset

Merge = Callable[[], Tensor]


def plain(
    omega: Tensor, phi: Tensor, steps: int, epsilon: float = 0.01, lam: float = 1e-3
) -> Tensor:
    """Eq. (6), (8), (9) for one client as one would write them first, in the input's dtype."""
    for _ in range(steps):
        cost = (
            omega.square().sum(1, keepdim=True) + phi.square().sum(1) - 2 * omega @ phi.T
        ).clamp(min=0) / 2
        plan = torch.softmax(-cost / epsilon, dim=1) / len(omega)
        phi = plan.T @ omega / (plan.sum(0) + lam).unsqueeze(1)
    return phi


def merges(clients: int, degree: int, prompts: int, width: int, steps: int) -> dict[str, Merge]:
    """Return the ways to merge one round of a regular graph, all on the same prompts."""
    rng = np.random.default_rng(0)
    graph = topology.build("regular", clients, seed=rng, degree=degree)
    weights = mixing.metropolis(graph)
    support = torch.from_numpy(weights > 0)
    base = rng.uniform(-0.05, 0.05, (prompts, width))
    drift = rng.normal(0, 0.02, (2, clients, prompts, width))
    start, updated = torch.from_numpy((base + drift).astype(np.float32))
    own = torch.arange(clients)

    def each(merge: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        return torch.stack(
            [merge(updated[support[u]].flatten(0, 1), start[u]) for u in range(clients)]
        )

    return {
        "batched": lambda: merge_neighbourhoods(support, updated, start, own, steps=steps)[0],
        "ot_merge per client": lambda: each(lambda z, f: ot_merge(z, f, steps=steps).phi),
        "plain loop float64": lambda: each(lambda z, f: plain(z.double(), f.double(), steps)),
        "plain loop float32": lambda: each(lambda z, f: plain(z, f, steps)),
        "index-wise mean": lambda: mean_merge(weights, updated),
    }


def interleaved(ways: dict[str, Merge], repeats: int) -> dict[str, list[float]]:
    """Return seconds per call, every way once per repeat, after one call each to warm up."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(repeats + 1):
        for name, merge in ways.items():
            begun = time.perf_counter()
            merge()
            if repeat:
                seconds[name].append(time.perf_counter() - begun)
    return seconds


def train_seconds_per_client_round(config: RunConfig, precision: str, most: int) -> float:
    """Measure local training of one client in one round: its images × epochs.

    A cohort of all clients trains on images of noise with untrained weights, which cost the same
    as any others; at most `most` images in all, the rest is proportional.
    """
    sizes = (d.train_size for d in CATALOGUE[config.data.name])
    cap = config.data.train_size
    images = sum(min(size, cap) if cap else size for size in sizes) / config.data.clients
    clients = min(config.data.clients, max(1, most // config.local.batch_size))
    used = max(1, min(math.ceil(images), most // clients))
    spec = backbone.BACKBONES[config.backbone.name]
    model = Prompted(
        backbone.build(config.backbone.name, weights="random"),
        spec,
        precision="bfloat16" if precision == "bfloat16" else "float32",
    )
    rng = np.random.default_rng(0)
    shape = (clients * used, spec.image_size, spec.image_size, 3)
    tokens = model.tokens(rng.integers(0, 256, shape, dtype=np.uint8))
    data = cohort.CohortData(
        inputs=tokens,
        labels=torch.from_numpy(rng.integers(0, 10, len(tokens))),
        rows=np.split(np.arange(len(tokens)), clients),
    )
    learner = PromptLearner(model)
    payload = learner.initial(
        range(clients),
        count=config.prompts.count,
        patch=spec.patch,
        num_classes=10,
        seed=0,
    )
    settings = config.local.model_copy(update={"epochs": 1})
    seconds = []
    for round in range(3):
        begun = time.perf_counter()
        cohort.train(
            learner,
            payload,
            data,
            settings,
            seed=0,
            round=round,
            clients=range(clients),
            active=np.ones(clients, dtype=bool),
        )
        seconds.append(time.perf_counter() - begun)
    return min(seconds) / (clients * used) * images * config.local.epochs


@click.command()
@click.option("--clients", default=50, show_default=True)
@click.option("--degree", default=5, show_default=True, help="Neighbours per client.")
@click.option("--prompts", default=10, show_default=True)
@click.option("--width", default=768, show_default=True)
@click.option("--steps", default=50, show_default=True)
@click.option("--repeats", default=7, show_default=True)
@click.option("--threads", default="1,2", show_default=True, help="Thread counts to try.")
@click.option(
    "--scale", type=click.Choice(["offline", "paper"]), default="offline", show_default=True
)
@click.option("--precision", type=click.Choice(["float32", "bfloat16"]), default="float32")
@click.option("--images", default=2000, show_default=True, help="Images that training is timed on.")
def main(
    clients: int,
    degree: int,
    prompts: int,
    width: int,
    steps: int,
    repeats: int,
    threads: str,
    scale: str,
    precision: str,
    images: int,
) -> None:
    """Time the merge of all clients of a round, and set it beside their training at a scale."""
    keep_freed_memory()
    console = Console()
    console.print(
        f"{clients} clients × ({(degree + 1) * prompts} prompts → {prompts}, width {width}), "
        f"S = {steps}; torch {torch.__version__}, {platform.machine()}; interleaved, "
        f"median of {repeats}"
    )
    config = preset("dfrost", scale)
    spec = backbone.BACKBONES[config.backbone.name]
    shape = (config.data.clients, config.graph.degree, config.prompts.count, spec.width)
    for count in (int(word) for word in threads.split(",")):
        torch.set_num_threads(count)
        ways = merges(clients, degree, prompts, width, steps)
        exact = ways["plain loop float64"]()
        table = Table("merge", "seconds", "per client", "÷ batched", "difference")
        seconds = interleaved(ways, repeats)
        for name, each in seconds.items():
            ratio = statistics.median(a / b for a, b in zip(each, seconds["batched"], strict=True))
            off = float((ways[name]() - exact).abs().max() / exact.abs().max())
            middle = statistics.median(each)
            table.add_row(
                name,
                f"{middle:.4f}",
                f"{1e3 * middle / clients:.2f} ms",
                f"{ratio:.2f}",
                "" if "mean" in name else f"{off:.0e}",
            )
        console.print(f"\n{count} thread{'s' if count > 1 else ''}")
        console.print(table)
        batched = {"batched": merges(*shape, config.merge.steps)["batched"]}
        merge = statistics.median(interleaved(batched, repeats)["batched"]) / config.data.clients
        train = train_seconds_per_client_round(config, precision, images)
        console.print(
            f"round of one client at --scale {scale} ({config.backbone.name}, {precision}): train "
            f"{train:.3f} s (fastest of 3, timed on at most {images} images, the rest in "
            f"proportion), merge {1e3 * merge:.2f} ms, merge share "
            f"{100 * merge / (merge + train):.2g} % (the paper: 0.63 of 42.93 s, 1.5 %)"
        )


if __name__ == "__main__":
    main()
