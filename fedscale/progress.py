"""A live line for a sweep: runs and rounds done, time left, best so far."""

from __future__ import annotations

from typing import Any

from ray import tune
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


class SweepProgress(tune.Callback):
    """Shows a sweep's progress; on a terminal as a live line, elsewhere as a line per run."""

    def __init__(self, console: Console, rounds: int, runs: int, metric: str, mode: str) -> None:
        self.console, self.metric, self.mode = console, metric, mode
        self.total_runs, self.runs = runs, 0
        self.best: float | None = None
        self.run_ids: set[str] = set()
        self.bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TaskProgressColumn(),
            MofNCompleteColumn(),
            TextColumn("rounds"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[best]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self.task = self.bar.add_task(self._title(), total=rounds, best="starting")

    def _title(self) -> str:
        return f"run {self.runs}/{self.total_runs}"

    def __enter__(self) -> SweepProgress:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        """Take a measured round."""
        value = float(result["latest"])
        self.run_ids.add(str(result["run_id"]))
        over = result["status"] != "running"
        if over:
            self.runs += 1
            better = self.best is None or (value > self.best) == (self.mode == "max")
            if better and result["status"] == "completed":
                self.best = value
        best = "" if self.best is None else f"best {self.metric} {self.best:.4f}"
        self.bar.update(
            self.task, advance=result["rounds_done"], description=self._title(), best=best
        )
        if over and not self.console.is_terminal:
            self.console.print(
                f"{self._title()}: {result['run_id']} {result['status']}, "
                f"{self.metric} {value:.4f}; {best}",
                soft_wrap=True,
            )

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Say that a run failed; its reason is in the `runs` record."""
        self.runs += 1
        self.console.print(f"{self._title()}: failed (the reason is in the runs table)")
