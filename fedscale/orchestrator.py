"""RoundOrchestrator: walks a regime's Steps over the workers and commits what they measured.

It holds references to blocks, not tensors: `train` answers with a reference that `mix` passes
on, so Ray runs the graph as blocks become ready. A commit follows each measured round: records
first, then the state from which a new process would go on.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedscale import blocks, checkpoint, formation, metrics, provenance, schedule, store
from fedscale.blocks import Block
from fedscale.config import RunConfig
from fedscale.data import partition
from fedscale.graphs import mixing
from fedscale.pools import Pool
from fedscale.regimes.step import Step
from fedscale.worker import Diverged

WINDOW = 4
"""Rounds in flight before the orchestrator waits for the oldest."""

MEASURED = (
    "accuracy_mean",
    "accuracy_min",
    "accuracy_max",
    "accuracy_std",
    "accuracy_averaged",
    "consensus_error",
    "disagreement",
    "prompt_norm",
    "prompts_mean",
    "measure_seconds",
)
"""Columns of `rounds` that only measured rounds have."""


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
        """
        self.config, self.pool, self.sink = config, pool, sink
        self.layout = config.blocks()
        self.parts = schedule.parts(config, dataset.train)
        homes = partition.home_domains(self.parts, dataset.train.domains)
        self.homes = [dataset.domains[home] if home >= 0 else "" for home in homes]
        self.facts = self._all(
            "setup",
            [
                (config, problem, clients, [self.parts[c] for c in clients])
                for clients in self.layout
            ],
        )[0]
        self.started, self.seconds = provenance.now(), 0.0
        self.tables: dict[str, list[dict[str, Any]]] = {"rounds": [], "clients": []}
        self.committed = 0
        found = checkpoint.read(sink.root, sink.sweep, config.run_id) if resume else None
        if found is None:
            self.blocks = self._ask("initial", [() for _ in self.layout])
        else:
            self.committed, state = found
            self.blocks = [
                {key: value[c.start : c.stop] for key, value in state.items()} for c in self.layout
            ]
        self.clusters = self._clusters(dataset) if self.config.regime.name == "ssdfl" else []
        samples = [len(part) for part in self.parts]
        self.steps = schedule.steps(config, samples, self.clusters, self.committed + 1)
        self._record("completed" if self.done else "running")

    def _clusters(self, dataset: Any) -> list[list[int]]:
        """Form SSD-FL's clusters from the graph, the data and the clients' first gradients."""
        first = self._ask("initial", [() for _ in self.layout])
        found = self._all("slopes", [(block,) for block in first])
        slopes = {key: np.concatenate([f[key] for f in found]) for key in found[0]}
        return formation.form(self.config, dataset.train, self.parts, slopes).members

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
        try:
            record = self._advance()
        except Diverged as error:
            self._record("diverged", str(error))
            raise
        except Exception as error:
            self._record("failed", f"{type(error).__name__}: {error}")
            raise
        self.seconds += time.perf_counter() - started
        self._record("completed" if self.done else "running")
        return record

    def _advance(self) -> dict[str, Any]:
        in_flight: deque[tuple[Step, list[Any], list[Any]]] = deque()
        rows: list[dict[str, Any]] = []
        for step in self.steps:
            in_flight.append((step, *self._submit(step)))
            while len(in_flight) > (0 if step.measure else WINDOW):
                rows.append(self._collect(*in_flight.popleft()))
            if step.measure:
                return self._commit(step, rows)
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
        if step.serve:
            served = self.pool.call(0, "serve", *trained)
            self.blocks = self._ask("adopt", [(block, served) for block in self.blocks])
        return train_stats, [stats for _, stats in answers]

    def _collect(self, step: Step, train_stats: list[Any], mix_stats: list[Any]) -> dict[str, Any]:
        """Wait for a round and return its record, not yet measured."""
        trained = [self.pool.get(s) for s in train_stats if s is not None]
        mixed = [self.pool.get(s) for s in mix_stats]
        loss = np.concatenate([s["loss"] for s in trained]) if trained else np.array([np.nan])
        links = metrics.messages(step.weights)
        return {
            **dict.fromkeys(MEASURED),
            "round": step.round,
            "phase": step.phase,
            "cycle": step.cycle,
            "loss": float(np.nanmean(loss)) if np.isfinite(loss).any() else None,
            "rho": mixing.mixing_factor(step.weights),
            "bytes_sent": round(links * mixed[0]["bytes"]),
            "bytes_prompts": round(links * mixed[0]["bytes_prompts"]),
            "train_seconds": sum(s["seconds"] for s in trained),
            "merge_seconds": sum(s["seconds"] for s in mixed),
            "active_clients": int(step.active.sum()),
        }

    def _commit(self, step: Step, rows: list[dict[str, Any]]) -> dict[str, Any]:
        """Measure, write the records since the last commit, then the state."""
        everyone = [tuple(self.blocks) if i == 0 else () for i in range(len(self.layout))]
        found = self._all(
            "measure", [(b, *rest) for b, rest in zip(self.blocks, everyone, strict=True)]
        )
        accuracy = np.concatenate([f["accuracy"] for f in found])
        loss = np.concatenate([f["loss"] for f in found])
        prompts = np.concatenate([f["prompts"] for f in found])
        rows[-1] |= {
            "accuracy_mean": float(accuracy.mean()),
            "accuracy_min": float(accuracy.min()),
            "accuracy_max": float(accuracy.max()),
            "accuracy_std": float(accuracy.std()),
            "accuracy_averaged": found[0]["averaged"],
            "consensus_error": found[0]["consensus_error"],
            "disagreement": found[0]["disagreement"],
            "prompt_norm": found[0]["prompt_norm"],
            "prompts_mean": float(prompts.mean()),
            "measure_seconds": sum(f["seconds"] for f in found),
        }
        clients = [
            {
                "round": step.round,
                "client": client,
                "domain": home,
                "samples": len(part),
                "accuracy": float(accuracy[client]),
                "loss": float(loss[client]),
                "prompts": int(prompts[client]),
            }
            for client, (home, part) in enumerate(zip(self.homes, self.parts, strict=True))
        ]
        self.tables["rounds"] += rows
        self.tables["clients"] += clients
        if self.sink.root:
            where = (self.sink.root, self.sink.sweep, self.config.run_id)
            first = self.committed + 1
            store.write_rounds(*where, "rounds", first, step.round, rows)
            store.write_rounds(*where, "clients", step.round, step.round, clients)
            checkpoint.write(*where, step.round, self.payload())
        self.committed = step.round
        return rows[-1]

    def last(self) -> dict[str, Any]:
        """Return the `rounds` record of the last committed round (of an earlier process, maybe)."""
        if self.tables["rounds"]:
            return self.tables["rounds"][-1]
        folder = store.join(self.sink.root, self.sink.sweep)
        rows = store.load(folder, "rounds", {"run_id": self.config.run_id})
        return dict(rows.iloc[-1])

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
