"""The two ways to call a run's workers: in this process, or as Ray actors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fedscale.config import RunConfig
from fedscale.worker import ClientFailed, ClientWorker, Diverged


class WorkerLost(RuntimeError):
    """A worker's process, or a block that it held, is gone; the same call may be made again."""


class InlinePool:
    """The workers of a run in this process, one after the other (`workers=0`)."""

    def __init__(self, threads: int, device: str) -> None:
        self.workers = [ClientWorker(threads, device)]

    def call(self, index: int, method: str, *args: Any, returns: int = 1) -> Any:
        """Call a method of worker `index` and return its answer (a tuple if `returns` > 1)."""
        return getattr(self.workers[index], method)(*args)

    def get(self, answer: Any) -> Any:
        """Return the value of an answer."""
        return answer

    def replace(self) -> list[int]:
        """Return the numbers of the workers that were lost and made anew: none."""
        return []

    def close(self) -> None:
        """Let the workers go."""
        self.workers = []


class RayPool:
    """The workers of a run as Ray actors; answers are object references until `get`."""

    def __init__(self, count: int, cpus: int, gpus: float, timeout_s: float = 180.0) -> None:
        import ray

        self.cpus, self.gpus, self.timeout_s = cpus, gpus, timeout_s
        self.actor = ray.remote(ClientWorker).options(num_cpus=cpus, num_gpus=gpus)
        self.workers: list[Any] = [self._worker() for _ in range(count)]
        self._wait_for(range(count))

    def _worker(self) -> Any:
        return self.actor.remote(self.cpus, "cuda" if self.gpus > 0 else "cpu")

    def _wait_for(self, indices: Iterable[int]) -> None:
        """Wait until these workers run; one that dies meanwhile is lost to whoever calls it.

        Raises:
            RuntimeError: they do not start in time; says what they ask for and what there is.
        """
        import ray

        ready = [self.workers[index].__ray_ready__.remote() for index in indices]
        _, waiting = ray.wait(ready, num_returns=len(ready), timeout=self.timeout_s)
        if waiting:
            count = len(self.workers)
            self.close()
            raise RuntimeError(
                f"{len(waiting)} of {count} workers (each {self.cpus} CPUs, {self.gpus:g} GPUs) "
                f"did not start within {self.timeout_s:.0f} s; the cluster has "
                f"{ray.cluster_resources()}"
            )

    def call(self, index: int, method: str, *args: Any, returns: int = 1) -> Any:
        """Call a method of worker `index`; return a reference (a list if `returns` > 1)."""
        return getattr(self.workers[index], method).options(num_returns=returns).remote(*args)

    def get(self, answer: Any) -> Any:
        """Wait for the value of a reference; an error of the worker is raised as itself.

        Raises:
            WorkerLost: the worker, or one that it waited for, died.
            ClientFailed: anything else that the worker raised.
        """
        import ray

        try:
            return ray.get(answer)
        except ray.exceptions.RayTaskError as error:
            cause = error.cause
            if isinstance(cause, Diverged | ClientFailed):
                raise cause from None
            if isinstance(cause, _losses()):
                raise WorkerLost(_first_line(cause)) from None
            raise ClientFailed(f"{error.function_name}: {_first_line(cause)}") from None
        except _losses() as error:
            raise WorkerLost(_first_line(error)) from None

    def replace(self) -> list[int]:
        """Make lost workers anew; return their numbers.

        A worker that lives still works through calls that nobody waits for any more; they change
        nothing, because blocks are arguments and answers.
        """
        import ray

        lost: list[int] = []
        gone: tuple[type[BaseException], ...] = (*_losses(), ray.exceptions.GetTimeoutError)
        for index, worker in enumerate(self.workers):
            try:
                ray.get(worker.__ray_ready__.remote(), timeout=self.timeout_s)
            except gone:
                ray.kill(worker)
                self.workers[index] = self._worker()
                lost.append(index)
        self._wait_for(lost)
        return lost

    def close(self) -> None:
        """End the workers' processes."""
        import ray

        for worker in self.workers:
            ray.kill(worker)
        self.workers = []


Pool = InlinePool | RayPool


def _losses() -> tuple[type[BaseException], ...]:
    """Errors of Ray that mean lost processes, nodes or objects, not faults of a client's work."""
    from ray import exceptions as ray_errors

    return (
        ray_errors.RayActorError,
        ray_errors.ObjectLostError,
        ray_errors.WorkerCrashedError,
        ray_errors.NodeDiedError,
        ray_errors.OutOfMemoryError,
    )


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"


def make(config: RunConfig, gpus: float) -> Pool:
    """Return the workers of a run's layout, each with `gpus` of a GPU."""
    if config.uses_ray:
        return RayPool(len(config.blocks()), config.cpus_per_worker, gpus)
    return InlinePool(config.cpus_per_worker, "cuda" if gpus else "cpu")
