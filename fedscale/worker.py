"""ClientWorker: hosts a contiguous block of clients.

Every method that touches the state of clients takes it as an argument and returns it: a block is
a payload as NumPy arrays. A worker that was lost is made anew and asked again with the same
arguments; every random draw is keyed, so the answer is the same.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from fedscale import blocks, diagnostics, exchange, files, metrics, schedule
from fedscale.blocks import Block
from fedscale.config import RunConfig
from fedscale.data.catalogue import Split
from fedscale.heads import deploy, describe_data, head_error, learn
from fedscale.local import cohort, memory
from fedscale.local.cohort import COUNT
from fedscale.problems import (
    Problem,
    build_learner,
    initial_payload,
    learner_key,
    resolve_precision,
)
from fedscale.regimes.step import Step

SLOPE_SAMPLES = 256
"""Samples per client from which gradients at the initial point are estimated."""


class Diverged(RuntimeError):
    """A client's loss or payload is no longer finite; names round and client."""


class ClientFailed(RuntimeError):
    """Work on a block of clients raised; names round, clients and cause."""


def _names(clients: range) -> str:
    return f"clients {clients.start}–{clients.stop - 1}"


def _cause(error: BaseException) -> str:
    return f"{type(error).__name__}: {files.one_line(error)}"


@contextmanager
def _named(doing: str, clients: range) -> Iterator[None]:
    """Say of an error what was done and whose block it was.

    Raises:
        ClientFailed: something raised inside.
    """
    try:
        yield
    except (Diverged, ClientFailed):
        raise
    except Exception as error:
        raise ClientFailed(f"{doing}, {_names(clients)}: {_cause(error)}") from error


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

        Raises:
            ClientFailed: the data cannot be used, or do not fit into memory.
        """
        with _named("before round 1", clients):
            return self._setup(config, problem, clients, rows)

    def _setup(
        self, config: RunConfig, problem: Problem, clients: range, rows: list[np.ndarray]
    ) -> dict[str, Any]:
        precision = resolve_precision(config.precision, self.device)
        key = learner_key(config, precision)
        if key != self.key:
            self.key = None  # until all of it is there
            self.learner = build_learner(config, problem, precision, self.device)
            everything = np.arange(len(problem.dataset.test))
            self.test_inputs = self._inputs(problem.dataset.test, everything)
            self.test_labels = torch.as_tensor(problem.dataset.test.labels.copy())
            self.key = key
        self.devices = schedule.devices(config, clients)
        self.config, self.clients, self.problem = config, clients, problem
        mine = np.concatenate(rows)
        bounds = np.cumsum([0, *(len(r) for r in rows)])
        self.data = cohort.CohortData(
            inputs=self._inputs(problem.dataset.train, mine),
            labels=torch.as_tensor(problem.dataset.train.labels[mine]).to(self.device),
            rows=[np.arange(a, b) for a, b in pairwise(bounds)],
        )
        return {
            "device": _device_name(self.device),
            "threads": torch.get_num_threads(),
            "precision": precision,
        }

    def _inputs(self, split: Split, rows: np.ndarray) -> torch.Tensor:
        """Return what training cannot change, computed once per image: (len(rows), …)."""
        inputs: torch.Tensor | None = None
        for positions, images in split.groups(rows):
            found = self.learner.inputs(images)
            if inputs is None:
                inputs = found.new_empty((len(rows), *found.shape[1:]))
            inputs[torch.as_tensor(positions)] = found
        if inputs is None:
            raise ClientFailed(f"{_names(self.clients)}: none has any data")
        return inputs

    def initial(self) -> Block:
        """Return the block's payload before the first round."""
        classes = self.problem.dataset.num_classes
        return blocks.arrays(initial_payload(self.config, self.learner, classes, self.clients))

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
        active = step.active[self.clients.start : self.clients.stop]
        try:
            trained, loss = self._train(step, block, active)
            if step.statistics:
                data = describe_data(
                    self.config,
                    self.learner,
                    trained,
                    self.data,
                    self.problem.dataset.num_classes,
                    self.clients,
                )
                trained |= data
        except Diverged:
            raise
        except Exception as error:
            who = self._culprit(step, block, active)
            raise ClientFailed(f"round {step.round}, {who}: {_cause(error)}") from error
        return trained, {"loss": loss, "seconds": time.perf_counter() - started}

    def _culprit(self, step: Step, block: Block, active: np.ndarray) -> str:
        """Return whose training raises on its own, or the whole block's clients."""
        for index in np.flatnonzero(active):
            try:
                self._train(step, block, np.arange(len(active)) == index)
            except Diverged:
                continue
            except Exception:
                return f"client {self.clients[index]}"
        return _names(self.clients)

    def _train(self, step: Step, block: Block, active: np.ndarray) -> tuple[Block, np.ndarray]:
        if not step.train:
            return dict(block), np.full(len(self.clients), np.nan, dtype=np.float32)
        payload = blocks.tensors(blocks.owned(block), self.device)
        config = self.config
        payload, stats, remembered = cohort.train(
            self.learner,
            payload,
            self.data,
            config.local,
            seed=config.seed,
            round=step.round,
            clients=list(self.clients),
            active=active,
            limit=config.regime.steps_per_instance,
            devices=self.devices,
            memory=blocks.recall(block, payload, step.restart, config.local.carry, self.device),
        )
        trained = blocks.arrays(payload)
        loss, finite = stats.loss.numpy(), ~stats.diverged.numpy()
        for array in trained.values():
            finite &= np.isfinite(array.reshape(len(array), -1)).all(axis=1)
        if not finite.all():
            first = int(np.argmin(finite))
            raise Diverged(
                f"round {step.round}, client {self.clients[first]}: loss {loss[first]:.4g}, "
                f"payload {'not finite' if np.isfinite(loss[first]) else 'unknown'}"
            )
        if config.remembers:
            trained |= blocks.remember(remembered)
        return trained | blocks.statistics(block), loss

    def mix(
        self, step: Step, previous: Block, own: Block, *others: Block | None
    ) -> tuple[Block, dict[str, Any]]:
        """Merge every client of the block with its neighbours.

        Args:
            step: gives the mixing matrix; OT merging reads its support.
            previous: the block before this round's training (the OT merge's start).
            own: the block after training.
            others: each worker's block in order, None where no neighbour lives: after training,
                or before it when step.order is "combine".

        Returns:
            The merged block, and {"bytes": what one client sends to one neighbour, the mean over
            the block, "bytes_prompts": its prompts' part, "theorem_1": see `ot.theorem_1`, empty
            without diagnostics, "seconds": float}.

        Raises:
            ClientFailed: the merge raised; for one, a client's prompts exceed prompts.limit.
        """
        started = time.perf_counter()
        with _named(f"round {step.round}, mixing", self.clients):
            merged, facts = exchange.mix(self.config, self.clients, step, previous, own, others)
        return merged, facts | {"seconds": time.perf_counter() - started}

    def slopes(self, block: Block) -> Block:
        """Describe every client's loss where it stands, on at most 256 of its samples.

        Returns:
            loss (C,), gradient (C, P), and smoothness (C,): ‖∇L(θ − η g) − ∇L(θ)‖ / ‖η g‖, which
            is γ_i along the own gradient g. Zeros for clients without data.

        Raises:
            Diverged: one of them is not finite; names the client.
        """
        payload = blocks.tensors(blocks.owned(block), self.device)
        rows = [part[:SLOPE_SAMPLES] for part in self.data.rows]
        here = [c for c, part in enumerate(rows) if len(part)]
        index = torch.from_numpy(np.concatenate([rows[c] for c in here]))
        inputs = self.data.inputs[index].to(self.device)
        labels = self.data.labels[index].to(self.device)
        counts = [len(rows[c]) for c in here]
        at = {name: value[here] for name, value in payload.items()}
        grads, losses = self.learner.gradients(at, inputs, labels, counts)
        eta = self.config.local.lr
        moved = {name: value - eta * grads[name] for name, value in at.items()}
        there, _ = self.learner.gradients(moved, inputs, labels, counts)
        flat, other = (torch.cat([v.flatten(1) for v in g.values()], 1) for g in (grads, there))
        bent = (other - flat).norm(dim=1) / (eta * flat.norm(dim=1)).clamp(min=1e-30)
        count = len(self.clients)
        found: Block = {
            "loss": np.zeros(count),
            "gradient": np.zeros((count, flat.shape[1]), dtype=np.float32),
            "smoothness": np.zeros(count),
        }
        for key, value in zip(found, (losses, flat, bent), strict=True):
            found[key][here] = value.cpu().numpy()
        for client, finite in zip(self.clients, np.isfinite(found["smoothness"]), strict=True):
            if not finite:
                raise Diverged(
                    f"first gradients, client {client}: not finite within a step of "
                    f"local.lr={eta:g}"
                )
        return found

    def watch(
        self, step: Step, clusters: Sequence[Sequence[int]], *everyone: Block
    ) -> dict[str, Any]:
        """Measure a step for `diagnostics`.

        Args:
            step: the step.
            clusters: groups of devices.
            everyone: each worker's block in order before the step, then each one after it.
        """
        layout = self.config.blocks()
        before, after = (
            blocks.join(layout, half) for half in (everyone[: len(layout)], everyone[len(layout) :])
        )
        return diagnostics.watch(step, clusters, self.config.local.lr, before, after)

    def serve(self, samples: Sequence[int], *everyone: Block) -> Block:
        """Act as the server: return one model (leading axis 1) learnt from what all sent.

        Args:
            samples: training samples of each of the M clients.
            everyone: each worker's block in order, after training.
        """
        joined = blocks.join(self.config.blocks(), everyone)
        return learn(self.config, self.learner, joined, samples)

    def adopt(self, own: Block, served: Block) -> Block:
        """Give the server's model to every client of the block."""
        count = len(self.clients)
        return own | {key: np.repeat(value, count, axis=0) for key, value in served.items()}

    def measure(self, round: int, own: Block, *everyone: Block) -> dict[str, Any]:
        """Measure every client of the block on the whole test set.

        Args:
            round: its number, for errors.
            own: the worker's block.
            everyone: all blocks in order, given to one worker, which also measures the network.

        Returns:
            accuracy (C,), loss (C,), prompts (C,), seconds; and where `everyone` is given:
            averaged (accuracy of the index-wise mean of all payloads), consensus_error (eq. 3),
            prompt_norm, disagreement (mean over clients of ‖θ − mean θ‖²), head_error (see
            `heads.head_error`); None where undefined.
        """
        started = time.perf_counter()
        with _named(f"round {round}, measuring", self.clients):
            found = self._measure(own, everyone)
        found["seconds"] = time.perf_counter() - started
        return found

    def _measure(self, own: Block, everyone: Sequence[Block]) -> dict[str, Any]:
        config, clients = self.config, self.config.data.clients
        joined = blocks.join(config.blocks(), everyone) if everyone else own
        whole = deploy(config, joined, clients)
        here = slice(self.clients.start, self.clients.stop) if everyone else slice(None)
        heads = {key: value[here] for key, value in whole.items() if key.startswith("head.")}
        found = self._evaluate(own | heads)
        found["prompts"] = blocks.prompt_counts(own, config.prompts.count)
        if everyone:
            found |= metrics.network(blocks.owned(joined))
            found |= {"head_error": None, "averaged": None}
            if COUNT not in joined:
                average = deploy(config, blocks.average(joined), clients)
                found["head_error"] = head_error(whole, average)
                found["averaged"] = float(self._evaluate(average)["accuracy"][0])
        return found

    def _evaluate(self, block: Block) -> dict[str, Any]:
        """Score every client; clients that hold the same model are scored once."""
        first, where = blocks.distinct(blocks.owned(block))
        payload = blocks.tensors({k: v[first] for k, v in blocks.owned(block).items()}, self.device)
        correct, loss = self.learner.evaluate(payload, self.test_inputs, self.test_labels)
        accuracy = correct.double().cpu().numpy() / len(self.test_labels)
        return {"accuracy": accuracy[where], "loss": loss.double().cpu().numpy()[where]}
