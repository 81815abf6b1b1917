"""What scripts and notebooks call: one run from start to end, in this process or on Ray."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pandas as pd

from fedscale import cluster, pools, room
from fedscale.blocks import Block
from fedscale.config import RunConfig
from fedscale.data.catalogue import Dataset
from fedscale.files import StoreError
from fedscale.orchestrator import RoundOrchestrator, Sink
from fedscale.pools import WorkerLost
from fedscale.problems import load_problem
from fedscale.worker import ClientFailed, Diverged


@dataclass(frozen=True)
class Run:
    """What a run left: its tables, the payload of all clients after the last round, a summary."""

    rounds: pd.DataFrame
    clients: pd.DataFrame
    clusters: pd.DataFrame
    """Partitions that a run in cycles chose from; empty for the others."""
    payload: Block
    summary: dict[str, Any]


class _Session:
    """A RoundOrchestrator with the workers it made, in one object that can be a Ray actor."""

    def __init__(
        self, config: RunConfig, problem: tuple[Any], dataset: Dataset, gpus: float, sink: Sink
    ) -> None:
        self.given = (config, problem[0], dataset)
        self.gpus, self.sink = gpus, sink

    def start(self) -> bool:
        """Prepare the run; return whether it is over. (A constructor's error loses its type.)"""
        pool = pools.make(self.given[0], self.gpus)
        self.run = RoundOrchestrator(*self.given, pool, self.sink)
        return self.run.done

    def advance(self) -> tuple[dict[str, Any], bool]:
        return self.run.advance(), self.run.done

    def finish(self) -> Run:
        run, tables = self.run, self.run.tables
        record = {k: v for k, v in run.run_record.items() if k not in ("config", "reason")}
        frames = {
            name: pd.DataFrame([{"run_id": run.config.run_id, **row} for row in rows])
            for name, rows in tables.items()
        }
        found = Run(
            rounds=frames["rounds"],
            clients=frames["clients"],
            clusters=frames["clusters"],
            payload=run.safe or run.payload(),
            summary={**record, **run.last()},
        )
        run.pool.close()
        return found


def run(
    config: RunConfig,
    workers: int | None = None,
    address: str | None = None,
    results: str | None = None,
    on_measure: Callable[[dict[str, Any]], None] | None = None,
) -> Run:
    """Run one configuration to its end.

    Args:
        config: what to run.
        workers: number of ClientWorkers, in place of `config.workers`; 0 = no Ray.
        address: Ray cluster: "auto" (the default), "local" or "host:port".
        results: folder or URI of the records; None keeps them in memory.
        on_measure: called with the `rounds` record of each measured round.

    Returns:
        The tables, the final payload (arrays with a leading axis of M clients) and a summary.

    Raises:
        ConfigError: a layout that does not fit the machine; data or weights that are missing.
        Diverged, ClientFailed: with round, client and cause.
        WorkerLost: too many losses of workers in a row.
        StoreError: the records cannot be written.
    """
    if workers is not None:
        config = config.replace({"workers": workers})
    place = cluster.resolve(address or "auto") if config.uses_ray else "local"
    share = cluster.preflight(config, place)
    problem = load_problem(config)
    sink = Sink(results or "", "runs" if results else "")
    if not config.uses_ray:
        return _walk(_Session(config, (problem,), problem.dataset, share, sink), on_measure)
    with cluster.session(place):
        return _run_on_ray(config, problem, place, sink, on_measure)


def _run_on_ray(config: RunConfig, problem: Any, place: str, sink: Sink, on_measure: Any) -> Run:
    import ray

    share = room.admit(config, place)
    actor = ray.remote(_Session).options(num_cpus=0)
    # Inside a tuple a reference stays one: the workers, not the orchestrator, load the weights.
    session: Any = actor.remote(config, (ray.put(problem),), problem.dataset, share, sink)

    def get(answer: Any) -> Any:
        try:
            return ray.get(answer)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, Diverged | ClientFailed | StoreError | WorkerLost):
                raise error.cause from None
            raise

    class Remote:
        def start(self) -> Any:
            return get(session.start.remote())

        def advance(self) -> Any:
            return get(session.advance.remote())

        def finish(self) -> Any:
            return get(session.finish.remote())

    try:
        return _walk(Remote(), on_measure)
    finally:
        ray.kill(session)


def _walk(session: Any, on_measure: Callable[[dict[str, Any]], None] | None) -> Run:
    over = session.start()
    while not over:
        record, over = session.advance()
        if on_measure is not None:
            on_measure(record)
    return session.finish()
