"""The two ways to call a run's workers: in this process, or as Ray actors."""

from __future__ import annotations

from typing import Any

from fedscale.config import RunConfig
from fedscale.worker import ClientFailed, ClientWorker, Diverged


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

    def close(self) -> None:
        """Let the workers go."""
        self.workers = []


class RayPool:
    """The workers of a run as Ray actors; answers are object references until `get`."""

    def __init__(self, count: int, cpus: int, gpus: float, timeout_s: float = 180.0) -> None:
        import ray

        actor = ray.remote(ClientWorker).options(num_cpus=cpus, num_gpus=gpus)
        device = "cuda" if gpus > 0 else "cpu"
        self.workers: list[Any] = [actor.remote(cpus, device) for _ in range(count)]
        ready = [worker.__ray_ready__.remote() for worker in self.workers]
        done, waiting = ray.wait(ready, num_returns=count, timeout=timeout_s)
        if waiting:
            self.close()
            raise RuntimeError(
                f"{len(waiting)} of {count} workers (each {cpus} CPUs, {gpus:g} GPUs) did not "
                f"start within {timeout_s:.0f} s; the cluster has {ray.cluster_resources()}"
            )
        ray.get(done)

    def call(self, index: int, method: str, *args: Any, returns: int = 1) -> Any:
        """Call a method of worker `index`; return a reference (a list if `returns` > 1)."""
        return getattr(self.workers[index], method).options(num_returns=returns).remote(*args)

    def get(self, answer: Any) -> Any:
        """Wait for the value of a reference; an error of the worker is raised as itself."""
        import ray

        try:
            return ray.get(answer)
        except ray.exceptions.RayTaskError as error:
            cause = error.cause
            if isinstance(cause, Diverged | ClientFailed):
                raise cause from None
            raise

    def close(self) -> None:
        """End the workers' processes."""
        import ray

        for worker in self.workers:
            ray.kill(worker)
        self.workers = []


Pool = InlinePool | RayPool


def make(config: RunConfig, gpus: float) -> Pool:
    """Return the workers of a run's layout, each with `gpus` of a GPU."""
    if config.uses_ray:
        return RayPool(len(config.blocks()), config.cpus_per_worker, gpus)
    return InlinePool(config.cpus_per_worker, "cuda" if gpus else "cpu")
