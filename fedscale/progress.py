"""A live line for a sweep: runs and rounds done, time left, best so far."""

from __future__ import annotations

from typing import Any, ClassVar

from ray import tune
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


class Display:
    """Shows a sweep's progress: on a terminal as a live line, elsewhere as a line per run."""

    active: ClassVar[Display | None] = None
    """The display of the sweep that this process drives."""

    def __init__(self, console: Console, rounds: int, runs: int, metric: str, mode: str) -> None:
        self.console, self.metric, self.mode = console, metric, mode
        self.total_runs, self.runs = runs, 0
        self.best: float | None = None
        self.reasons: dict[str, str] = {}
        """run_id or trial → why it did not come to its end."""
        self.bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TaskProgressColumn(),
            TextColumn("{task.completed:.0f}/{task.total:.0f} rounds"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[best]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self.task = self.bar.add_task(self._title(), total=rounds, best="starting workers")
        if not console.is_terminal:
            console.print(f"{runs} runs of {rounds // max(runs, 1)} rounds ...")

    def _title(self) -> str:
        return f"run {self.runs}/{self.total_runs}"

    def __enter__(self) -> Display:
        Display.active = self
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()
        Display.active = None

    def measured(self, result: dict[str, Any]) -> None:
        """Take what a trial reported of a measured round."""
        value, status = float(result["latest"]), result["status"]
        if status != "running":
            self.runs += 1
        if status == "failed":
            self.reasons[result["run_id"]] = result["reason"]
        if status == "completed" and (
            self.best is None or (value > self.best if self.mode == "max" else value < self.best)
        ):
            self.best = value
        best = "" if self.best is None else f"best {self.metric} {self.best:.4f}"
        self.bar.update(
            self.task, advance=result["rounds_done"], description=self._title(), best=best
        )
        if status != "running" and not self.console.is_terminal:
            self.console.print(
                f"{self._title()}: {result['run_id']} {status}, {self.metric} {value:.4f}; {best}"
            )

    def failed(self, trial: Any) -> None:
        """Count a run whose trial ended with an error, or was lost too often."""
        self.runs += 1
        lines = str(trial.get_error() or "lost").strip().splitlines()
        self.reasons[str(trial)] = lines[-1][:300]
        self.console.print(f"{self._title()}: failed; its reason follows at the end")


class ShowProgress(tune.Callback):
    """Hands Tune's results to the active Display; holds no state, so that Tune can store it."""

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        """Hand on a measured round."""
        if Display.active is not None:
            Display.active.measured(result)

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Hand on a failure that Tune does not retry."""
        if Display.active is not None:
            Display.active.failed(trial)
