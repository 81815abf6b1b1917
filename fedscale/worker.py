"""ClientWorker: hosts a contiguous block of clients.

Every method that touches the state of clients takes it as an argument and returns it: a block is
a payload as NumPy arrays. A worker that was lost is made anew and asked again with the same
arguments; every random draw is keyed, so the answer is the same.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from fedscale import metrics
from fedscale.config import ConfigError, RunConfig
from fedscale.data import catalogue
from fedscale.data.catalogue import Dataset, Split
from fedscale.local import cohort, memory
from fedscale.merge import mean, ot
from fedscale.metrics import payload_bytes
from fedscale.models import backbone
from fedscale.models.prompted import Prompted, native_bfloat16
from fedscale.regimes.gossip import Step

Block = dict[str, np.ndarray]
"""The payload of a block of C clients, each array with a leading axis of length C."""


class Diverged(RuntimeError):
    """A client's loss or payload is no longer finite; names round and client."""


class ClientFailed(RuntimeError):
    """Work on a block of clients raised; names round, clients and cause."""


@dataclass(frozen=True)
class Problem:
    """What all runs on the same data and backbone share (read-only)."""

    dataset: Dataset
    backbone: dict[str, np.ndarray]


def load_problem(config: RunConfig) -> Problem:
    """Load a configuration's data and backbone weights.

    Raises:
        ConfigError: one line that says what is missing and how to get it.
    """
    try:
        dataset = catalogue.load(config.data.name, config.data.train_size, config.data.test_size)
        module = backbone.build(config.backbone.name, config.backbone.weights)
    except (catalogue.DataUnavailable, backbone.WeightsUnavailable) as error:
        raise ConfigError(str(error)) from None
    return Problem(dataset, backbone.to_arrays(module))


def problem_key(config: RunConfig) -> tuple[Any, ...]:
    """Return what two configurations must have in common to share a Problem."""
    data = config.data
    name = config.backbone.name
    return data.name, data.train_size, data.test_size, name, config.backbone.weights


def resolve_precision(precision: str, device: str) -> str:
    """Return "float32" or "bfloat16" for a device; `auto` takes bfloat16 where it is native."""
    if precision != "auto":
        return precision
    if device.startswith("cuda"):
        return "bfloat16" if torch.cuda.is_bf16_supported() else "float32"
    return "bfloat16" if native_bfloat16() else "float32"


def _device_name(device: str) -> str:
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else device


class ClientWorker:
    """A block of clients on one device; a plain class, made a Ray actor by `RayPool`."""

    def __init__(self, threads: int = 1, device: str = "cpu") -> None:
        torch.set_num_threads(threads)
        memory.keep_freed_memory()
        self.device = device
        self.key: tuple[Any, ...] | None = None

    def setup(
        self, config: RunConfig, problem: Problem, clients: range, rows: list[np.ndarray]
    ) -> dict[str, Any]:
        """Take a run's block of clients; caches the tokens of their images.

        Args:
            config: the run.
            problem: data and backbone.
            clients: global numbers of the block's C clients.
            rows: per client of the block, its rows in the training split.

        Returns:
            Facts for the `runs` record: device, threads, precision.
        """
        precision = resolve_precision(config.precision, self.device)
        key = (problem_key(config), precision)
        if key != self.key:
            spec = backbone.BACKBONES[config.backbone.name]
            module = backbone.from_arrays(config.backbone.name, problem.backbone)
            self.model = Prompted(module, spec, precision=precision, device=self.device)
            everything = np.arange(len(problem.dataset.test))
            self.test_tokens = self._tokens(problem.dataset.test, everything)
            self.test_labels = torch.as_tensor(problem.dataset.test.labels.copy())
            self.key = key
        self.config, self.clients, self.problem = config, clients, problem
        mine = np.concatenate(rows)
        bounds = np.cumsum([0, *(len(r) for r in rows)])
        self.data = cohort.CohortData(
            tokens=self._tokens(problem.dataset.train, mine),
            labels=torch.as_tensor(problem.dataset.train.labels[mine]).to(self.device),
            rows=[np.arange(a, b) for a, b in pairwise(bounds)],
        )
        return {
            "device": _device_name(self.device),
            "threads": torch.get_num_threads(),
            "precision": precision,
        }

    def _tokens(self, split: Split, rows: np.ndarray) -> torch.Tensor:
        """Return what prompts cannot reach, (len(rows), T, d), computed once per image."""
        tokens: torch.Tensor | None = None
        for positions, images in split.groups(rows):
            found = self.model.tokens(images)
            if tokens is None:
                tokens = found.new_empty((len(rows), *found.shape[1:]))
            tokens[torch.as_tensor(positions)] = found
        assert tokens is not None, "a block holds at least one client with data"
        return tokens

    def initial(self) -> Block:
        """Return the block's payload before the first round."""
        c = self.config
        spec = backbone.BACKBONES[c.backbone.name]
        return _arrays(
            cohort.initial_payload(
                list(self.clients),
                count=c.prompts.count,
                width=spec.width,
                patch=spec.patch,
                num_classes=self.problem.dataset.num_classes,
                init=c.prompts.init,
                seed=c.seed,
            )
        )

    def train(self, step: Step, block: Block) -> tuple[Block, dict[str, Any]]:
        """Train the active clients of the block on their own data.

        Returns:
            The trained block, and {"loss": (C,) mean loss of the round (NaN when idle),
            "seconds": float}.

        Raises:
            Diverged: a client's loss or payload is not finite.
            ClientFailed: anything else that training raised.
        """
        started = time.perf_counter()
        try:
            payload, stats = cohort.train(
                self.model,
                _tensors(block, self.device),
                self.data,
                self.config.local,
                seed=self.config.seed,
                round=step.round,
                clients=list(self.clients),
                active=step.active[self.clients.start : self.clients.stop],
            )
        except Exception as error:
            where = f"round {step.round}, clients {self.clients.start}–{self.clients.stop - 1}"
            raise ClientFailed(f"{where}: {type(error).__name__}: {error}") from error
        trained = _arrays(payload)
        loss, finite = stats.loss.numpy(), ~stats.diverged.numpy()
        for array in trained.values():
            finite &= np.isfinite(array.reshape(len(array), -1)).all(axis=1)
        if not finite.all():
            first = int(np.argmin(finite))
            raise Diverged(
                f"round {step.round}, client {self.clients[first]}: loss {loss[first]:.4g}, "
                f"payload {'not finite' if np.isfinite(loss[first]) else 'unknown'}"
            )
        return trained, {"loss": loss, "seconds": time.perf_counter() - started}

    def mix(
        self, step: Step, previous: Block, own: Block, *blocks: Block | None
    ) -> tuple[Block, dict[str, Any]]:
        """Merge every client of the block with its neighbours.

        Args:
            step: gives the mixing matrix; OT merging reads its support.
            previous: the block before this round's training (the OT merge's start).
            own: the block after training.
            blocks: the trained block of each worker, in order; None where no neighbour lives.

        Returns:
            The merged block, and {"bytes": (size of a client's payload, of its prompts),
            "seconds": float}.
        """
        started = time.perf_counter()
        m = self.config.merge
        here = np.arange(self.clients.start, self.clients.stop)
        received = _join(self.config.blocks(), blocks)
        weights = torch.as_tensor(step.weights[here])
        merged: dict[str, torch.Tensor] = {}
        for key, value in received.items():
            if key == "prompts" and m.name == "ot":
                merged[key] = self._transport(step, weights != 0, here, previous, value)
            elif key.startswith("head.") and m.head == "local":
                merged[key] = torch.as_tensor(own[key].copy())
            else:
                merged[key] = mean.mean_merge(weights, torch.as_tensor(value))
        result = _arrays(merged)
        idle = ~step.active[here]
        for key in result:
            result[key][idle] = own[key][idle]
        sizes = payload_bytes(merged), payload_bytes(merged, "prompts")
        return {key: result[key] for key in own}, {
            "bytes": sizes,
            "seconds": time.perf_counter() - started,
        }

    def _transport(
        self,
        step: Step,
        support: torch.Tensor,
        own: np.ndarray,
        previous: Block,
        received: np.ndarray,
    ) -> torch.Tensor:
        """Merge neighbourhoods' prompts by optimal transport (eq. 6–9); `own` are own rows."""
        m = self.config.merge
        updated = torch.as_tensor(received)
        if m.start == "previous":
            start = torch.as_tensor(previous["prompts"].copy())
        elif m.start == "updated":
            start = updated[torch.as_tensor(own)]
        else:
            start = ot.sample_starts(support, updated, own, seed=self.config.seed, round=step.round)
        merged = ot.merge_neighbourhoods(
            support,
            updated,
            start,
            own,
            epsilon=m.epsilon,
            lam=m.lam,
            sigma2=m.sigma2,
            steps=m.steps,
            schedule=m.schedule,
            epsilon_init=m.epsilon_init,
            tolerance=m.tolerance,
        )
        return merged[0]

    def measure(self, own: Block, *blocks: Block) -> dict[str, Any]:
        """Measure every client of the block on the whole test set.

        Args:
            own: the worker's block.
            blocks: all blocks in order, given to one worker, which also measures the network.

        Returns:
            accuracy (C,), loss (C,), seconds; and where `blocks` are given: averaged (accuracy of
            the index-wise mean of all payloads), consensus_error (eq. 3), prompt_norm.
        """
        started = time.perf_counter()
        found = self._evaluate(own)
        if blocks:
            everyone = _join(self.config.blocks(), blocks)
            mean_state = {key: value.mean(axis=0, keepdims=True) for key, value in everyone.items()}
            prompts = torch.as_tensor(everyone["prompts"])
            found["averaged"] = float(self._evaluate(mean_state)["accuracy"][0])
            found["consensus_error"] = float(metrics.consensus_error(prompts))
            found["prompt_norm"] = float(prompts.norm(dim=-1).mean())
        found["seconds"] = time.perf_counter() - started
        return found

    def _evaluate(self, block: Block) -> dict[str, Any]:
        labels = self.test_labels
        payload = _tensors(block, self.device)
        correct, loss = cohort.evaluate(self.model, payload, self.test_tokens, labels)
        accuracy = correct.double().cpu().numpy() / len(labels)
        return {"accuracy": accuracy, "loss": loss.double().cpu().numpy()}


def _tensors(block: Block, device: str) -> dict[str, torch.Tensor]:
    """Copy a block onto a device (what comes from the object store is read-only)."""
    return {key: torch.tensor(value, device=device) for key, value in block.items()}


def _arrays(payload: dict[str, torch.Tensor]) -> Block:
    return {key: value.detach().cpu().numpy() for key, value in payload.items()}


def _join(layout: Sequence[range], blocks: Sequence[Block | None]) -> Block:
    """Join blocks to arrays with a leading axis of all M clients; zeros where a block is None."""
    shapes = next(block for block in blocks if block is not None)
    whole = {
        key: np.zeros((layout[-1].stop, *value.shape[1:]), value.dtype)
        for key, value in shapes.items()
    }
    for clients, block in zip(layout, blocks, strict=True):
        for key, value in (block or {}).items():
            whole[key][clients.start : clients.stop] = value
    return whole
