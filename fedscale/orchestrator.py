"""RoundOrchestrator: walks a regime's Steps over the workers and commits what they measured.

It holds references to blocks, not tensors: `train` answers with a reference that `mix` passes
on, so Ray runs the graph as blocks become ready. A commit follows each measured round: records
first, then the state from which a new process would go on.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedscale import (
    blocks,
    checkpoint,
    diagnostics,
    formation,
    provenance,
    rows,
    schedule,
    store,
)
from fedscale.blocks import Block
from fedscale.config import RunConfig
from fedscale.data import partition
from fedscale.pools import Pool, WorkerLost
from fedscale.regimes.step import Step
from fedscale.worker import Diverged

log = logging.getLogger(__name__)

WINDOW = 4
"""Rounds in flight before the orchestrator waits for the oldest."""

LOSSES = 5
"""Losses of workers in a row, without a commit between them, after which a run fails."""


@dataclass(frozen=True)
class Sink:
    """Where a run's records go: `<root>/<sweep>/…`; root "" keeps them in memory only."""

    root: str = ""
    sweep: str = "runs"
    label: str = ""


class RoundOrchestrator:
    """One run, round by round; a plain class, made a Ray actor by `run` and by Tune's trial."""

    def __init__(
        self,
        config: RunConfig,
        problem: Any,
        dataset: Any,
        pool: Pool,
        sink: Sink = Sink(),
        resume: bool = False,
    ) -> None:
        """Prepare a run.

        Args:
            config: the run.
            problem: the Problem, or a reference to it, handed to the workers as it is.
            dataset: the Problem's dataset (its labels decide the partition).
            pool: the workers, one per block of `config.blocks()`.
            sink: where records go.
            resume: go on from the last committed round if there is one.

        Raises:
            Diverged, ClientFailed: as `advance`.
        """
        self.config, self.pool, self.sink = config, pool, sink
        self.layout = config.blocks()
        self.parts = schedule.parts(config, dataset.train)
        homes = partition.home_domains(self.parts, dataset.train.domains)
        self.homes = [dataset.domains[home] if home >= 0 else "" for home in homes]
        self.setups = [
            (config, problem, clients, [self.parts[c] for c in clients]) for clients in self.layout
        ]
        self.samples = [len(part) for part in self.parts]
        self.losses = 0
        self.facts: dict[str, Any] = dict.fromkeys(("device", "threads", "precision"))
        self.started, self.seconds = provenance.now(), 0.0
        self.tables: dict[str, list[dict[str, Any]]] = {"rounds": [], "clients": [], "clusters": []}
        self.committed = 0
        found = checkpoint.resumable(sink.root, sink.sweep, config.run_id) if resume else None
        self.safe: Block | None = None
        """All clients' payload at the last commit; None before the first."""
        if found is not None:
            self.committed, self.safe = found
        self.members: list[list[int]] = []
        """Clusters of a run in cycles."""
        self.warnings = ""
        with self._recorded():
            self.facts = self._guarded(lambda: self._all("setup", self.setups))[0]
            if config.cycles:
                self._guarded(lambda: self._form(dataset))
            self._rewind()
        self._record("running")
        if sink.root and config.cycles:
            store.write_clusters(sink.root, sink.sweep, config.run_id, self.tables["clusters"])
        if self.done:
            self._record("completed")

    def _rewind(self) -> None:
        """Go to the state after the last commit."""
        if self.safe is None:
            self.blocks = self._ask("initial", [() for _ in self.layout])
        else:
            self.blocks = [
                {key: value[c.start : c.stop] for key, value in self.safe.items()}
                for c in self.layout
            ]
        self.watched: dict[int, Any] = {}
        self.losses_before: dict[int, list[Any]] = {}
        self.steps = schedule.steps(self.config, self.samples, self.members, self.committed + 1)

    def _guarded(self, work: Callable[[], Any], again: Callable[[], Any] | None = None) -> Any:
        """Do work until no worker is lost in it; it starts over with new workers in their places.

        Every random draw is keyed, so what comes out does not depend on how often it started.

        Args:
            work: what is done.
            again: what is done instead after a loss; None = the same.

        Raises:
            WorkerLost: the last of too many losses in a row.
        """
        while True:
            try:
                return work()
            except WorkerLost as error:
                self.losses += 1
                if self.losses > LOSSES:
                    raise WorkerLost(f"{self.losses} losses in a row, the last: {error}") from None
                log.warning("round %d: %s; starting it again", self.committed + 1, error)
                self._replace()
                work = again or work

    def _replace(self) -> None:
        """Put new workers in the places of lost ones, ready for this run."""
        while True:
            try:
                answers = [
                    self.pool.call(index, "setup", *self.setups[index])
                    for index in self.pool.replace()
                ]
                for answer in answers:
                    self.pool.get(answer)
                return
            except WorkerLost:
                self.losses += 1
                if self.losses > LOSSES:
                    raise

    def _again(self) -> dict[str, Any]:
        """Advance from the last commit, whatever was in flight before."""
        self._rewind()
        return self._advance()

    def _form(self, dataset: Any) -> None:
        """Form the clusters from the graph, the data and the clients' first gradients."""
        config, numbers = self.config, None
        if config.regime.name == "ssdfl" or config.diagnostics:
            first = self._ask("initial", [() for _ in self.layout])
            found = self._all("slopes", [(block,) for block in first])
            slopes = {key: np.concatenate([f[key] for f in found]) for key in found[0]}
            numbers = formation.numbers(config, dataset.train, self.parts, slopes)
        formed = formation.form(config, numbers)
        self.members, self.warnings = formed.members, "; ".join(formed.warnings)
        self.tables["clusters"] = formation.records(config, formed)
        if config.diagnostics:
            assert numbers is not None
            self.bounds = diagnostics.Bounds(
                config, schedule.network(config), self.members, numbers, self.samples
            )

    def _ask(
        self, method: str, arguments: Sequence[tuple[Any, ...]], returns: int = 1
    ) -> list[Any]:
        return [
            self.pool.call(index, method, *args, returns=returns)
            for index, args in enumerate(arguments)
        ]

    def _all(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        return [self.pool.get(answer) for answer in self._ask(method, arguments)]

    @property
    def done(self) -> bool:
        """Whether the last round is committed."""
        return self.committed >= self.config.total_steps

    def advance(self) -> dict[str, Any]:
        """Run up to the next measured round, commit it and return its `rounds` record.

        Raises:
            Diverged: a client's loss or payload is no longer finite; recorded as `diverged`.
            ClientFailed: a client's work raised; recorded as `failed` with its reason.
        """
        started = time.perf_counter()
        with self._recorded():
            if self.done:
                raise RuntimeError(f"the run is over: round {self.committed}")
            record = self._guarded(self._advance, self._again)
        self.seconds += time.perf_counter() - started
        if self.done:
            self._record("completed")
        return record

    @contextmanager
    def _recorded(self) -> Iterator[None]:
        """Record what ends the run before it is raised."""
        try:
            yield
        except Diverged as error:
            self._record("diverged", str(error))
            raise
        except Exception as error:
            self._record("failed", f"{type(error).__name__}: {error}")
            raise

    def _advance(self) -> dict[str, Any]:
        in_flight: deque[tuple[Step, list[Any], list[Any]]] = deque()
        made: list[dict[str, Any]] = []
        for step in self.steps:
            in_flight.append((step, *self._submit(step)))
            while len(in_flight) > (0 if step.measure else WINDOW):
                made.append(self._collect(*in_flight.popleft()))
            if step.measure:
                return self._commit(step, made)
        raise RuntimeError(f"the run is over: round {self.committed} of {self.config.total_steps}")

    def _submit(self, step: Step) -> tuple[list[Any], list[Any]]:
        """Start a round's training and mixing; return the references of their statistics."""
        previous = self.blocks
        trained, train_stats = previous, [None for _ in self.layout]
        if step.train or step.statistics:
            answers = self._ask("train", [(step, b) for b in previous], returns=2)
            trained = [block for block, _ in answers]
            train_stats = [stats for _, stats in answers]
        needed = [
            [
                bool(step.weights[mine.start : mine.stop, c.start : c.stop].any())
                for c in self.layout
            ]
            for mine in self.layout
        ]
        given = previous if step.order == "combine" else trained
        answers = self._ask(
            "mix",
            [
                (
                    step,
                    previous[i],
                    trained[i],
                    *(block if use else None for block, use in zip(given, row, strict=True)),
                )
                for i, row in enumerate(needed)
            ],
            returns=2,
        )
        self.blocks = [block for block, _ in answers]
        if self.config.diagnostics and self.config.cycles:
            everyone = (*previous, *self.blocks)
            self.watched[step.round] = self.pool.call(0, "watch", step, self.members, *everyone)
            if step.train and step.restart:
                found = self._ask("slopes", [(block,) for block in previous])
                self.losses_before[step.round] = found
        if step.serve:
            served = self.pool.call(0, "serve", self.samples, *trained)
            self.blocks = self._ask("adopt", [(block, served) for block in self.blocks])
        return train_stats, [stats for _, stats in answers]

    def _collect(self, step: Step, train_stats: list[Any], mix_stats: list[Any]) -> dict[str, Any]:
        """Wait for a round and return its record, not yet measured."""
        trained = [self.pool.get(s) for s in train_stats if s is not None]
        row = rows.of_step(step, trained, [self.pool.get(s) for s in mix_stats])
        if step.round in self.watched:
            slopes = [self.pool.get(s) for s in self.losses_before.pop(step.round, [])]
            losses = np.concatenate([s["loss"] for s in slopes]) if slopes else None
            watched = self.pool.get(self.watched.pop(step.round))
            row |= self.bounds.row(step, watched, row["rho"], losses)
        return row

    def _commit(self, step: Step, made: list[dict[str, Any]]) -> dict[str, Any]:
        """Measure, write the records since the last commit, then the state."""
        everyone = [tuple(self.blocks) if i == 0 else () for i in range(len(self.layout))]
        found = self._all(
            "measure",
            [(step.round, b, *rest) for b, rest in zip(self.blocks, everyone, strict=True)],
        )
        made[-1] |= rows.measured(found)
        clients = rows.of_clients(step, found, self.homes, self.parts)
        safe = self.payload()
        self.tables["rounds"] += made
        self.tables["clients"] += clients
        if self.sink.root:
            where = (self.sink.root, self.sink.sweep, self.config.run_id)
            first = self.committed + 1
            store.write_rounds(*where, "rounds", first, step.round, made)
            store.write_rounds(*where, "clients", step.round, step.round, clients)
            checkpoint.write(*where, step.round, safe)
        self.committed, self.safe, self.losses = step.round, safe, 0
        return made[-1]

    def last(self) -> dict[str, Any]:
        """Return the `rounds` record of the last committed round (of an earlier process, maybe).

        A run of no rounds gives its chosen partition's `clusters` record.
        """
        if not self.config.total_steps:
            return next(row for row in self.tables["clusters"] if row["chosen"])
        if self.tables["rounds"]:
            return self.tables["rounds"][-1]
        folder = store.join(self.sink.root, self.sink.sweep)
        found = store.load(folder, "rounds", {"run_id": self.config.run_id})
        return dict(found.iloc[-1])

    def payload(self) -> Block:
        """Return the payload of all M clients, each array with a leading axis of length M."""
        return blocks.join(self.layout, [self.pool.get(block) for block in self.blocks])

    def _record(self, status: str, reason: str = "") -> None:
        self.run_record = {
            "run_id": self.config.run_id,
            "method": self.config.method,
            "label": self.sink.label,
            "seed": self.config.seed,
            "config": self.config.json_text(),
            "status": status,
            "reason": reason,
            "warnings": self.warnings,
            "steps": self.config.total_steps,
            "versions": provenance.versions(),
            "revision": provenance.revision(),
            "device": self.facts["device"],
            "threads": self.facts["threads"],
            "precision": self.facts["precision"],
            "start": self.started,
            "seconds": self.seconds,
        }
        if self.sink.root:
            store.write_run(self.sink.root, self.sink.sweep, self.run_record)
