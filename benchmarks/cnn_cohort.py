"""One SGD step of many clients' CNNs: grouped convolutions, torch.func vmap, and plain loops.

Command: python benchmarks/cnn_cohort.py

Plain loop: one torch.nn.Module per client, autograd, torch.optim.SGD; once as written first and
once with images and maps in channels-last layout, which is the same layout as the cohort's.
vmap: torch.func.vmap over the gradient of the same module, called with a slice of the stacked
parameters. Cohort: `Cnn.gradients`. Both stacked ways end with the cohort's SGD and are measured
at several numbers of clients per pass. All start from the same images and parameters, run in one
process with the same allocator settings and threads, and take turns step by step.
The gradients' error is the largest over clients and tensors: about 1e-6, and 1e-3 to 1e-2 in a
client where rounding flips one ReLU or one choice of a maximum.
"""

from __future__ import annotations

import os
import statistics
from functools import partial

import click
import numpy as np
import torch
import torch.nn.functional as F
from local_update import Step, describe_machine, flops, gemm_peak, interleaved, relative_error
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from fedscale.local import optimizers
from fedscale.local.memory import keep_freed_memory
from fedscale.models.cnn import Cnn, Payload

RATE = 0.01
CHANNELS_LAST = torch.channels_last


class Plain(nn.Module):
    """The network of one client."""

    def __init__(self, cnn: Cnn, layout: torch.memory_format = torch.contiguous_format) -> None:
        super().__init__()
        self.layout = layout
        self.convs = nn.ModuleList()
        self.pools = []
        before, side = cnn.channels, cnn.image_size
        for width, after in zip(cnn.widths, cnn.sides, strict=True):
            self.convs.append(nn.Conv2d(before, width, 3, padding=1))
            self.pools.append(after < side)
            before, side = width, after
        self.head = nn.Linear(before * side**2, cnn.num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits (B, K) of images (B, c, S, S)."""
        for conv, pool in zip(self.convs, self.pools, strict=True):
            x = conv(x.contiguous(memory_format=self.layout)).contiguous(memory_format=self.layout)
            x = F.relu(F.max_pool2d(x, 2) if pool else x)
        return self.head(x.flatten(1))


class Loop:
    """One client at a time."""

    def __init__(
        self,
        cnn: Cnn,
        payload: Payload,
        images: Tensor,
        labels: Tensor,
        layout: torch.memory_format,
    ) -> None:
        clients = len(payload["head.bias"])
        self.names = list(payload)
        self.models = [Plain(cnn, layout).to(memory_format=layout) for _ in range(clients)]
        with torch.no_grad():
            for client, model in enumerate(self.models):
                for parameter, value in zip(model.parameters(), payload.values(), strict=True):
                    parameter.copy_(value[client])
        self.optimizers = [torch.optim.SGD(m.parameters(), lr=RATE) for m in self.models]
        self.images, self.labels = images.chunk(clients), labels.chunk(clients)

    def loss(self, client: int) -> Tensor:
        """Mean cross-entropy of a client's batch."""
        return F.cross_entropy(self.models[client](self.images[client]), self.labels[client])

    def gradients(self) -> Payload:
        """Gradients of all clients, stacked like the payload."""
        found = [
            torch.autograd.grad(self.loss(c), list(m.parameters()))
            for c, m in enumerate(self.models)
        ]
        stacked = (torch.stack(each) for each in zip(*found, strict=True))
        return dict(zip(self.names, stacked, strict=True))

    def step(self) -> None:
        """One SGD step of every client."""
        for client, optimizer in enumerate(self.optimizers):
            optimizer.zero_grad()
            self.loss(client).backward()
            optimizer.step()


class Stacked:
    """Several clients per pass, by vmap or by the cohort's grouped convolutions."""

    def __init__(
        self,
        cnn: Cnn,
        payload: Payload,
        images: Tensor,
        labels: Tensor,
        together: int | None,
        vmap: bool = False,
    ) -> None:
        self.cnn, self.images, self.labels = cnn, images, labels
        self.payload = {name: value.clone() for name, value in payload.items()}
        self.clients = len(payload["head.bias"])
        self.batch = len(labels) // self.clients
        self.together = together
        self.rule, self.rates = optimizers.sgd(), dict.fromkeys(payload, RATE)
        self.model, self.vmap = Plain(cnn), vmap
        self.inside = [name for name, _ in self.model.named_parameters()]

    def loss(self, own: Payload, images: Tensor, labels: Tensor) -> Tensor:
        """Mean cross-entropy of one client, for vmap."""
        named = dict(zip(self.inside, own.values(), strict=True))
        return F.cross_entropy(torch.func.functional_call(self.model, named, (images,)), labels)

    def gradients(self) -> Payload:
        """Gradients of all clients."""
        if not self.vmap:
            chunk = None if self.together is None else self.together * self.batch
            counts = [self.batch] * self.clients
            found = self.cnn.gradients(self.payload, self.images, self.labels, counts, chunk=chunk)
            return found[0]
        together = self.together or self.clients
        images = self.images.unflatten(0, (self.clients, -1)).split(together)
        labels = self.labels.view(self.clients, -1).split(together)
        by_client = torch.func.vmap(torch.func.grad(self.loss))
        parts = []
        for number, (x, y) in enumerate(zip(images, labels, strict=True)):
            mine = slice(number * together, number * together + len(x))
            parts.append(by_client({k: v[mine] for k, v in self.payload.items()}, x, y))
        return {name: torch.cat([part[name] for part in parts]) for name in self.payload}

    def step(self) -> None:
        """One SGD step of every client."""
        moments: optimizers.Moments = dict.fromkeys(self.payload, ())
        self.rule.update(self.payload, self.gradients(), moments, self.rates, 1)

    def evaluate(self) -> object:
        """Score every client on all images."""
        return self.cnn.evaluate(self.payload, self.images, self.labels)


@click.command(help=__doc__)
@click.option("--threads", type=click.IntRange(1), default=1, show_default=True)
@click.option("--clients", type=click.IntRange(1), default=20, show_default=True)
@click.option("--batch", type=click.IntRange(1), default=20, show_default=True)
@click.option("--size", type=click.IntRange(1), default=28, show_default=True)
@click.option("--channels", type=click.Choice(["1", "3"]), default="1", show_default=True)
@click.option("--widths", default="32-64-128-128-256", show_default=True)
@click.option("--together", default="2-5-10", show_default=True, help="clients per pass")
@click.option("--repeats", type=click.IntRange(1), default=7, show_default=True)
def main(
    threads: int,
    clients: int,
    batch: int,
    size: int,
    channels: str,
    widths: str,
    together: str,
    repeats: int,
) -> None:
    """Measure and print one table."""
    console = Console(width=132)
    kept = keep_freed_memory()
    torch.set_num_threads(threads)
    describe_machine(console, threads, kept)
    cnn = Cnn(10, size, int(channels), tuple(int(word) for word in widths.split("-")))
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (clients * batch, size, size, 3), dtype=np.uint8)
    labels = torch.from_numpy(rng.integers(0, 10, len(images)))
    setting = (
        cnn,
        cnn.initial(range(clients), seed=0, init="per_client"),
        cnn.inputs(images),
        labels,
    )
    loop = Loop(*setting, torch.contiguous_format)
    sides: dict[str, Loop | Stacked] = {
        "plain loop": loop,
        "loop, channels last": Loop(*setting, CHANNELS_LAST),
    }
    for count in map(int, together.split("-")):
        sides[f"vmap, {count} clients"] = Stacked(*setting, count, vmap=True)
        sides[f"grouped, {count} clients"] = Stacked(*setting, count)
    default = sides["grouped, the package's"] = Stacked(*setting, None)
    right = loop.gradients()
    errors = {name: relative_error(side.gradients(), right) for name, side in sides.items()}
    work = flops(loop.gradients)
    ways: dict[str, Step] = {name: side.step for name, side in sides.items()}
    seconds = interleaved(ways, repeats)
    peak = gemm_peak(torch.float32)
    base = statistics.median(seconds["plain loop"])
    table = Table(
        title=f"one step of {clients} clients × {batch} images {size}×{size}×{channels}, {widths}; "
        f"median of {repeats} turns (fastest)"
    )
    for column in ("", "gradients' error", "seconds", "faster", "images/s", "of GEMM peak"):
        table.add_column(column, justify="right" if column else "left")
    for name, times in seconds.items():
        median = statistics.median(times)
        table.add_row(
            name,
            f"{errors[name]:.0e}",
            f"{median:.3f} ({min(times):.3f})",
            f"{base / median:.2f}×",
            f"{len(labels) / median:.0f}",
            f"{work / median / peak:.0%}",
        )
    console.print(table)
    (scores,) = interleaved({"": partial(default.evaluate)}, max(1, repeats // 3)).values()
    rate = len(labels) * clients / statistics.median(scores)
    console.print(
        f"{work / 1e9:.1f} GFLOP a step, GEMM peak {peak / 1e9:.0f} GFLOP/s; evaluate: "
        f"{rate:.0f} images/s; load {os.getloadavg()[0]:.1f}"
    )


if __name__ == "__main__":
    main()
