"""A sweep: base configuration + space + searcher → Tune → Parquet, then a table and a figure."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console

from fedscale import store
from fedscale.config import ConfigError, RunConfig, parse_overrides
from fedscale.interrupt import STOPPED, Stop, resume_command
from fedscale.options import run_command, sweep_options
from fedscale.presets import preset

Report = Callable[[str, str], Sequence[str]]
"""(results, sweep) → the files it wrote; prints the table."""


@dataclass(frozen=True)
class Axis:
    """How one key is swept: the values of a grid, and the interval or choices of a search."""

    grid: tuple[Any, ...]
    low: float = 0.0
    high: float = 0.0
    log: bool = False

    def distribution(self) -> Any:
        """Return Optuna's distribution: the interval, or the grid's values as choices."""
        from optuna.distributions import CategoricalDistribution, FloatDistribution

        if self.low == self.high:
            return CategoricalDistribution(list(self.grid))
        return FloatDistribution(self.low, self.high, log=self.log)


@dataclass(frozen=True)
class Point:
    """One configuration of a sweep, run once per seed; label "" for those that are swept."""

    method: str
    overrides: Mapping[str, Any]
    label: str = ""


@dataclass(frozen=True)
class Request:
    """What a user asks of a sweep: the shared flags of every sweep script."""

    scale: str = "offline"
    search: str = "grid"
    num_samples: int = 0
    seeds: tuple[int, ...] = (0, 1, 2)
    workers: int = 1
    address: str = "auto"
    results: str = "results"
    resume: bool = False
    fresh: bool = False
    dry_run: bool = False
    shared_path: bool = False
    overrides: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Sweep:
    """A sweep script's own part; `main()` is the rest."""

    name: str
    methods: tuple[str, ...]
    """Presets that are compared; a search takes the first."""
    report: Report
    space: Mapping[str, Axis] = field(default_factory=dict)
    cases: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Name → overrides that go together (`case` in the records)."""
    paper_cases: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """The cases at the paper's scale, where they are others."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds that are run where the command names none."""
    references: Mapping[str, str] = field(default_factory=dict)
    """label → method of runs that the swept ones are set beside."""
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """What this sweep changes from the scale's settings, at the offline scale."""
    metric: str = "accuracy_mean"
    mode: str = "max"
    penalty: float = 0.0
    """The metric of a diverged run, as a search sees it."""
    about: str = ""
    advice: str = ""
    """What to type next; printed at the end."""

    def config(self, request: Request, point: Point | None = None) -> RunConfig:
        """Return the configuration of a point, or the one that a search starts from."""
        changes: dict[str, Any] = {"workers": request.workers}
        if request.scale == "offline":
            changes |= self.overrides
        changes |= request.overrides
        if point is None:
            return preset(self.methods[0], request.scale, changes)
        return preset(point.method, request.scale, {**changes, **point.overrides})

    def cases_at(self, scale: str) -> Mapping[str, Mapping[str, Any]]:
        """Return the cases at a scale."""
        return self.paper_cases if scale == "paper" and self.paper_cases else self.cases

    def points(self, scale: str) -> list[Point]:
        """Return the grid: every method in every case at every combination of the axes' values."""
        combined: list[dict[str, Any]] = [
            {"case": name, **overrides} for name, overrides in self.cases_at(scale).items()
        ] or [{}]
        for key, axis in self.space.items():
            combined = [{**point, key: value} for point in combined for value in axis.grid]
        return [Point(method, point) for method in self.methods for point in combined]

    def reference_points(self) -> list[Point]:
        """Return the points that the swept ones are compared with."""
        return [Point(method, {}, label) for label, method in self.references.items()]

    def main(self) -> None:
        """Read the command line and run the sweep; ends the process (2 = bad input)."""
        swept = list(self.space) or ["methods and cases"]
        command = sweep_options(self.name, self.about, swept, self.seeds, self._from_flags)
        sys.exit(run_command(command))

    def _from_flags(self, overrides: Sequence[str], **flags: Any) -> int:
        swept = parse_overrides(overrides)
        cases = self.cases_at(flags["scale"])
        taken = {*self.space, *(key for case in cases.values() for key in case), "case"}
        for key in swept:
            if key in taken:
                raise ConfigError(f"{key}={swept[key]}: this sweep sets it; leave it out")
        if "seed" in swept:
            raise ConfigError(f"seed={swept['seed']}: a sweep takes --seeds {swept['seed']}")
        if flags["fresh"] and flags["resume"]:
            raise ConfigError("--fresh repeats runs, --resume goes on with them: give one of them")
        return self.run(Request(overrides=swept, **flags))

    def run(self, request: Request) -> int:
        """Run the sweep; return the process's exit status: 0, 130 if stopped, 1 when
        runs failed or did not come to their end.

        Raises:
            ConfigError: bad input, before anything starts.
        """
        from fedscale import tuning

        console = Console(soft_wrap=True)
        plan = tuning.Plan.make(self, request)
        if request.dry_run:
            plan.describe(console)
            return 0
        plan.check_storage()
        stop = Stop(console)
        try:
            with plan.only_writer():
                plan.skip_completed(console)
                tuning.execute(plan, console, stop)
        except KeyboardInterrupt:
            stop.asked = True
        if stop.asked:
            done = len(store.completed(request.results, self.name) & plan.run_ids)
            console.print(f"stopped; {done} of {plan.count} runs are complete")
            console.print(f"go on with: {resume_command()}", markup=False)
            return STOPPED
        return self.finish(plan, console)

    def finish(self, plan: Any, console: Console) -> int:
        """Print the table, draw the figure, say where things are and what to type next."""
        written = self.report(plan.request.results, self.name)
        runs = store.load(plan.folder, "runs")
        bad = runs[runs["status"].ne("completed") & runs["run_id"].isin(plan.run_ids)]
        for _, row in bad.iterrows():
            reason = plan.reasons.pop(row["run_id"], "") or row["reason"]
            status = row["status"].replace("running", "unfinished, --resume goes on")
            console.print(f"{row['run_id']}: {status}: {reason}", markup=False)
        missing = plan.run_ids - set(runs["run_id"])
        for name in sorted(missing):
            console.print(f"{name}: not started, --resume goes on")
        for name, reason in plan.reasons.items():
            console.print(f"{name}: {reason}", markup=False)
        mine = runs[runs["run_id"].isin(plan.run_ids) & runs["warnings"].fillna("").ne("")]
        for warning, group in mine.groupby("warnings"):
            console.print(f"warning: {len(group)} of {len(plan.run_ids)} runs: {warning}")
        console.print(f"records: {store.shown(plan.folder)} (runs, rounds, clients: Parquet)")
        for path in written:
            console.print(f"wrote:   {store.shown(path)}")
        if self.advice:
            console.print(f"next:    {self.advice}")
        return 1 if missing or bad["status"].ne("diverged").any() else 0
