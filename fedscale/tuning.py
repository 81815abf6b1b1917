"""What a sweep's request means (Plan), and its execution by Ray Tune and Optuna."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rich.console import Console

from fedscale import checkpoint, claim, cluster, files, room, store
from fedscale.config import ConfigError, RunConfig, gpu_share
from fedscale.interrupt import Stop

if TYPE_CHECKING:
    from fedscale.search import Study
    from fedscale.sweep import Request, Sweep


@dataclass
class Plan:
    """The runs of a sweep, checked; nothing has started yet."""

    sweep: Sweep
    request: Request
    base: RunConfig
    address: str
    grid: list[tuple[RunConfig, str]]
    """(configuration, label) of every run that is known beforehand."""
    run_ids: set[str] = field(default_factory=set)
    known: int = 0
    """Runs that are known beforehand, reused ones included."""
    reasons: dict[str, str] = field(default_factory=dict)
    """Run or trial → why it did not come to its end, where the records may not say it."""
    done: frozenset[str] = frozenset()
    """Runs that the records hold completely and that are not repeated."""

    @staticmethod
    def make(sweep: Sweep, request: Request) -> Plan:
        """Resolve and check a request.

        Raises:
            ConfigError: a configuration that is not allowed or does not fit this machine.
        """
        base = sweep.config(request)
        points = sweep.reference_points()
        if request.search == "grid":
            points += sweep.points(request.scale)
        elif not sweep.space:
            raise ConfigError("search=optuna: this sweep has no axis to search; allowed: grid")
        grid = [
            (sweep.config(request, point).replace({"seed": seed}), point.label)
            for point in points
            for seed in request.seeds
        ]
        address = cluster.resolve(request.address)
        for config in [base, *(config for config, _ in grid)]:
            cluster.preflight(config, address)
        plan = Plan(sweep, request, base, address, grid)
        plan.run_ids = {config.run_id for config, _ in grid}
        plan.known = len(plan.run_ids)
        return plan

    @property
    def folder(self) -> str:
        """Where the sweep's tables lie."""
        return store.join(self.request.results, self.sweep.name)

    @property
    def searched(self) -> int:
        """Runs that a search will add to the grid."""
        if self.request.search == "grid":
            return 0
        return self.request.num_samples * len(self.request.seeds)

    @property
    def count(self) -> int:
        """Runs in all, reused ones included."""
        return self.known + self.searched

    def describe(self, console: Console) -> None:
        """Print the resolved configuration, the runs and what they will ask for."""
        console.print(f"sweep {self.sweep.name} at scale {self.request.scale}")
        for key, value in self.base.flat().items():
            if key == "method" and len(self.sweep.methods) > 1:
                continue
            swept = self.sweep.space.get(key)
            note = ""
            if swept is not None and self.request.search == "grid":
                value, note = ", ".join(str(v) for v in swept.grid), "  (swept)"
            elif swept is not None:
                value, note = f"{swept.low} … {swept.high}", "  (searched)"
            elif key == "seed":
                value, note = ", ".join(str(s) for s in self.request.seeds), "  (each run once)"
            console.print(f"  {key} = {value}{note}", highlight=False)
        if len(self.sweep.methods) > 1:
            console.print(f"  methods: {', '.join(self.sweep.methods)}", highlight=False)
        for name, overrides in self.sweep.cases_at(self.request.scale).items():
            changed = ", ".join(f"{k}={v}" for k, v in overrides.items())
            console.print(f"  case {name!r}: {changed}", highlight=False)
        for label, method in self.sweep.references.items():
            console.print(f"  reference {label!r}: {method}", highlight=False)
        share = gpu_share(self.base.gpus_per_worker)
        gpus = "1 or a share of 1 GPU where there are GPUs" if share < 0 else f"{share:g} GPU"
        workers = len(self.base.blocks()) if self.base.uses_ray else 1
        console.print(
            f"runs: {self.count} ({len(self.grid)} of the grid and references, "
            f"{self.searched} searched), {self.base.total_steps} rounds each",
            highlight=False,
        )
        console.print(
            f"each run asks for {workers} worker(s) × {self.base.cpus_per_worker} CPU and {gpus}; "
            f"Ray at {self.address}; this machine has {cluster.cpu_count()} CPUs",
            highlight=False,
        )
        console.print(f"records would go to {store.shown(self.folder)}", highlight=False)

    def check_storage(self) -> None:
        """Check that records can be written.

        Raises:
            ConfigError: they cannot; says where and why.
        """
        try:
            store.check_writable(self.request.results)
        except store.StoreError as error:
            raise ConfigError(f"results={store.shown(self.request.results)}: {error}") from None

    @contextmanager
    def only_writer(self) -> Iterator[None]:
        """Hold the sweep's lock, in an object store its mark.

        Raises:
            ConfigError, Claimed: another sweep has it.
        """
        if "://" in self.request.results:
            with claim.claimed(self.folder):
                yield
            return
        from filelock import FileLock, Timeout

        os.makedirs(self.folder, exist_ok=True)
        lock = FileLock(f"{self.folder}/_lock", timeout=0)
        try:
            lock.acquire()
        except Timeout:
            raise ConfigError(
                f"results={self.request.results}: another sweep is writing to {self.folder}; wait "
                "for it or choose another folder"
            ) from None
        try:
            yield
        finally:
            lock.release()

    def skip_completed(self, console: Console) -> None:
        """Leave out runs that the records hold completely; the rest starts over unless resumed."""
        if not self.request.fresh:
            self.done = store.completed(self.request.results, self.sweep.name)
        reused = len(self.done & self.run_ids)
        if reused:
            console.print(
                f"{reused} of {len(self.run_ids)} runs are complete in "
                f"{store.shown(self.folder)} and are "
                "reused (--fresh repeats them)"
            )
        self.grid = [(c, label) for c, label in self.grid if c.run_id not in self.done]
        for config, _ in self.grid:
            self._make_ready(config)

    def prepare(self, point: Mapping[str, Any]) -> None:
        """Make the runs of a search's point ready to start, as those of the grid were.

        A point may come again, even while the first of its trials goes on.
        """
        for seed in self.request.seeds:
            config = self.base.replace({**point, "seed": seed})
            if config.run_id not in self.run_ids | self.done:
                self._make_ready(config)
            self.run_ids.add(config.run_id)

    def _make_ready(self, config: RunConfig) -> None:
        """Remove what an unfinished run left, unless it is to be resumed and can be."""
        where = (self.request.results, self.sweep.name, config.run_id)
        if not self.request.resume or checkpoint.resumable(*where) is None:
            checkpoint.remove(*where)
            store.discard(*where)

    def study(self) -> Study:
        """Begin the search, or go on with it.

        Raises:
            OtherSearch: the records are those of a search with other settings.
        """
        from fedscale.search import Study

        study = Study(
            self.folder,
            {key: axis.distribution() for key, axis in self.sweep.space.items()},
            self.sweep.mode,
            self.request.seeds[0],
            {
                "metric": self.sweep.metric,
                "seeds": list(self.request.seeds),
                "configuration": self.base.flat(),
            },
            self.request.resume,
        )
        for number in study.told:
            self.run_ids |= {
                self.base.replace({**study.points[number], "seed": seed}).run_id
                for seed in self.request.seeds
            }
        return study


def execute(plan: Plan, console: Console, stop: Stop) -> None:
    """Run what is left of a plan, or as much as there is before it is stopped.

    Raises:
        ConfigError: data or weights are missing; the cluster cannot hold a run.
    """
    study = plan.study() if plan.request.search == "optuna" else None
    left = 0 if study is None else plan.request.num_samples - len(study.told)
    if not plan.grid and left <= 0:
        return
    from fedscale.problems import Problem, load_problem, problem_key

    problems: dict[tuple[Any, ...], Problem] = {}
    for config in [plan.base, *(config for config, _ in plan.grid)]:
        if problem_key(config) not in problems:
            problems[problem_key(config)] = load_problem(config)
    if note := cluster.elsewhere(plan.address):
        console.print(note, markup=False, highlight=False)
    with cluster.session(plan.address):
        _run_on_ray(plan, console, stop, study if left > 0 else None, problems)


def _run_on_ray(
    plan: Plan,
    console: Console,
    stop: Stop,
    study: Study | None,
    problems: dict[Any, Any],
) -> None:
    import ray

    from fedscale.progress import Display
    from fedscale.trial import Shared

    _quiet()
    _check_shared(plan, room.most_machines(plan.address))
    gpus = room.admit(plan.base, plan.address, console.print)
    asked = gpu_share(plan.base.gpus_per_worker)
    if asked >= 0 and asked != float(plan.base.gpus_per_worker):
        console.print(
            f"gpus_per_worker={plan.base.gpus_per_worker}: taken as {asked:g} (1/k packs)"
        )
    shared = Shared(
        root=plan.request.results
        if "://" in plan.request.results
        else os.path.abspath(plan.request.results),
        sweep=plan.sweep.name,
        metric=plan.sweep.metric,
        penalty=plan.sweep.penalty,
        gpus=gpus,
        seeds=plan.request.seeds,
        base=plan.base.json_text(),
        problems={key: ray.put(problem) for key, problem in problems.items()},
    )
    searched = plan.searched - (len(study.told) * len(plan.request.seeds) if study else 0)
    runs = len(plan.grid) + searched
    rounds = sum(config.total_steps for config, _ in plan.grid)
    rounds += searched * plan.base.total_steps
    with Display(console, rounds, runs, plan.sweep.metric, plan.sweep.mode) as progress:
        if plan.grid:
            with stop.in_order():
                _grid(plan, shared)
        if study is not None and not stop.asked:
            with stop.in_order():
                _search(plan, shared, study)
    plan.reasons = progress.reasons


def _trainable(plan: Plan, shared: Any) -> Any:
    from ray import tune

    from fedscale.trial import Trial, resources

    return tune.with_resources(
        tune.with_parameters(Trial, shared=shared), resources(plan.base, shared.gpus)
    )


def _tune_run(plan: Plan, shared: Any, kind: str) -> Any:
    from ray import tune

    from fedscale.orchestrator import LOSSES
    from fedscale.progress import ShowProgress

    system, folder = files.locate(store.join(shared.root, plan.sweep.name))
    return tune.RunConfig(
        name=f"_tune-{kind}",
        storage_path=folder,
        storage_filesystem=system if "://" in shared.root else None,
        callbacks=[ShowProgress()],
        verbose=0,
        failure_config=tune.FailureConfig(max_failures=LOSSES),
    )


def _grid(plan: Plan, shared: Any) -> None:
    from ray import tune

    points = [{"runs": [config.json_text()], "label": label} for config, label in plan.grid]
    tuner = tune.Tuner(
        _trainable(plan, shared),
        param_space={"point": tune.grid_search(points)},
        tune_config=tune.TuneConfig(reuse_actors=True),
        run_config=_tune_run(plan, shared, "grid"),
    )
    tuner.fit()


def _search(plan: Plan, shared: Any, study: Study) -> None:
    """Search with Optuna until there are num_samples results."""
    from ray import tune

    from fedscale.search import Suggestions

    metric, mode = plan.sweep.metric, plan.sweep.mode
    tuner = tune.Tuner(
        _trainable(plan, shared),
        tune_config=tune.TuneConfig(
            search_alg=Suggestions(study, metric, mode, plan.prepare),
            metric=metric,
            mode=mode,
            num_samples=plan.request.num_samples - len(study.told),
            reuse_actors=True,
        ),
        run_config=_tune_run(plan, shared, "search"),
    )
    tuner.fit()


def _check_shared(plan: Plan, nodes: int) -> None:
    if nodes > 1 and "://" not in plan.request.results and not plan.request.shared_path:
        raise ConfigError(
            f"results={plan.request.results}: a folder of this machine, but the cluster may have "
            f"{nodes} nodes; allowed: a URI (s3://…, gs://…), or --shared-path if all nodes share "
            "the disk"
        )


def _quiet() -> None:
    """Keep from the terminal what a user cannot act on."""
    logging.getLogger("ray").setLevel(logging.ERROR)
    # Tracebacks of trials; their reasons are told at the end.
    for name in ("ray.tune", "ray.train"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    warnings.filterwarnings("ignore", module=r"ray\..*")
