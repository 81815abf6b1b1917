"""Trial: Ray Tune's view of an orchestrator, which lives inside the trial's own actor.

One Tune step is one measured round. The workers are actors in the trial's placement group and
die with it; they are kept when Tune reuses the trial's actor for the next configuration. State
lies in the sweep's own store, so a restarted trial goes on from the last committed round.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ray import tune

from fedscale import pools
from fedscale.config import RunConfig, from_json
from fedscale.files import StoreError
from fedscale.orchestrator import RoundOrchestrator, Sink
from fedscale.pools import WorkerLost
from fedscale.problems import Problem, load_problem, problem_key
from fedscale.worker import ClientFailed, Diverged


@dataclass(frozen=True)
class Shared:
    """What all trials of a sweep have in common; put into the object store once."""

    root: str
    sweep: str
    metric: str
    penalty: float
    """What a diverged or failed run reports as its metric, so that a search goes on."""
    gpus: float
    seeds: tuple[int, ...]
    base: str
    """Canonical JSON of the sweep's base configuration."""
    problems: Mapping[tuple[Any, ...], Any]
    """problem_key → reference to a Problem."""


def resources(config: RunConfig, gpus: float) -> tune.PlacementGroupFactory:
    """Return a trial's placement group: an orchestrator that costs nothing, and its workers."""
    worker = {"CPU": config.cpus_per_worker} | ({"GPU": gpus} if gpus else {})
    if not config.uses_ray:
        return tune.PlacementGroupFactory([worker])
    return tune.PlacementGroupFactory([{}] + [worker] * len(config.blocks()), strategy="PACK")


class Trial(tune.Trainable):
    """Runs one point of a sweep: its configuration once per seed, one after the other."""

    def setup(self, config: dict[str, Any], shared: Shared | None = None) -> None:
        """Take a point (see `_configs`); Tune calls this in the trial's actor."""
        assert shared is not None
        self.shared = shared
        self.pool: pools.Pool | None = None
        self.pool_key: tuple[Any, ...] = ()
        self._begin(config)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Take the next point in the same actor, with the same workers if the layout is equal."""
        self._begin(new_config)
        return True

    def _begin(self, config: dict[str, Any]) -> None:
        point = config.get("point", config)
        self.label = point.get("label", "")
        self.waiting = self._configs(point)
        self.scores: list[float] = []
        self.tells = True
        self.current: RoundOrchestrator | None = None

    def _configs(self, point: Mapping[str, Any]) -> list[RunConfig]:
        """Return a point's configurations, one per seed.

        A grid's point is {"runs": [JSON, …], "label": text}; a search's point has one entry per
        swept key.
        """
        if "runs" in point:
            return [from_json(text) for text in point["runs"]]
        base = from_json(self.shared.base)
        return [base.replace({**point, "seed": seed}) for seed in self.shared.seeds]

    def _orchestrator(self, config: RunConfig) -> RoundOrchestrator:
        import ray

        key = (config.uses_ray, len(config.blocks()), config.cpus_per_worker)
        if self.pool is None or key != self.pool_key:
            if self.pool is not None:
                self.pool.close()
            self.pool = pools.make(config, self.shared.gpus)
            self.pool_key = key
        reference = self.shared.problems.get(problem_key(config))
        problem: Problem = load_problem(config) if reference is None else ray.get(reference)
        handed = problem if reference is None or not config.uses_ray else reference
        sink = Sink(self.shared.root, self.shared.sweep, self.label)
        return RoundOrchestrator(config, handed, problem.dataset, self.pool, sink, resume=True)

    def step(self) -> dict[str, Any]:
        """Run up to the next measured round.

        Returns:
            The metric (mean over the seeds so far), the round, the run, how it ended, whether the
            point is over, and whether its metric is worth telling a search: not after losses of
            processes or full disks, which say nothing of the point.
        """
        config = self.waiting[0]
        before, reached, status, reason = 0, config.total_steps, "running", ""
        try:
            if self.current is None:
                self.current = self._orchestrator(config)
            run = self.current
            before = run.committed
            record = run.advance() if not run.done else run.last()
            value, over = float(record[self.shared.metric]), run.done
            reached = run.committed
        except (Diverged, ClientFailed, WorkerLost, StoreError) as error:
            value, over, reason = self.shared.penalty, True, str(error)
            status = "diverged" if isinstance(error, Diverged) else "failed"
            self.tells &= isinstance(error, Diverged | ClientFailed)
        seen = [*self.scores, value]
        if over:
            self.scores.append(value)
            self.current = None
            self.waiting.pop(0)
        return {
            self.shared.metric: sum(seen) / len(seen),
            "latest": value,
            "run_id": config.run_id,
            "status": "completed" if over and status == "running" else status,
            "reason": reason,
            "tells": self.tells,
            "rounds_done": reached - before,
            "done": over and not self.waiting,
        }

    def save_checkpoint(self, checkpoint_dir: str) -> dict[str, Any]:
        """Give Tune nothing to keep: each commit already wrote the state to the store."""
        return {}

    def load_checkpoint(self, checkpoint: Any) -> None:
        """Take nothing from Tune: `_orchestrator` resumes from the store."""

    def cleanup(self) -> None:
        """End the workers."""
        if self.pool is not None:
            self.pool.close()
