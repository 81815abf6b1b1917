"""A run small enough for tests, on real images and the real code path."""

from functools import lru_cache

import numpy as np
import pandas as pd

from fedscale.config import RunConfig
from fedscale.orchestrator import RoundOrchestrator, Sink
from fedscale.pools import InlinePool
from fedscale.presets import preset
from fedscale.problems import Problem, load_problem

KEYS = {
    "rounds": 3,
    "eval_every": 2,
    "precision": "float32",
    "backbone.weights": "random",
    "data.clients": 8,
    "data.train_size": 40,
    "data.test_size": 20,
    "graph.degree": 3,
    "merge.steps": 5,
    "prompts.count": 3,
    "local.epochs": 1,
}
TIMES = ["train_seconds", "merge_seconds", "measure_seconds", "start", "seconds"]


def config(method: str = "dfrost", **overrides) -> RunConfig:
    return preset(method, "offline", {**KEYS, **overrides})


def words(**overrides) -> list[str]:
    """The same run as key=value words of a command line."""
    return [f"{key}={value}" for key, value in {**KEYS, **overrides}.items()]


@lru_cache(maxsize=2)
def _problem(key) -> Problem:
    return load_problem(config())


def problem() -> Problem:
    return _problem(0)


def orchestrator(c: RunConfig, root: str = "", resume: bool = False) -> RoundOrchestrator:
    pool = InlinePool(1, "cpu")
    sink = Sink(root, "tiny" if root else "")
    return RoundOrchestrator(c, problem(), problem().dataset, pool, sink, resume)


def finish(run: RoundOrchestrator) -> RoundOrchestrator:
    while not run.done:
        run.advance()
    return run


def untimed(frame: pd.DataFrame) -> pd.DataFrame:
    return frame.drop(columns=[name for name in TIMES if name in frame.columns])


def same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[key], b[key]) for key in a)
