"""A search by Optuna that any kill leaves whole: its journal lies beside the sweep's records.

The journal says in order what was asked and what was answered. It is written whole, before a
suggestion is handed out and when a result is told. A later process repeats it on a new study of the
same seed, after which the sampler stands where it stood: nothing is asked or told twice, and
suggestions without a result are handed out again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import optuna
from ray.tune.search import Searcher

from fedscale import files

Point = dict[str, Any]


class OtherSearch(files.StoreError):
    """A journal that does not belong to the search that is to go on."""


class Study:
    """Optuna's study of a sweep and its journal `<root>/<sweep>/_search.json`."""

    def __init__(
        self,
        place: files.Place,
        space: Mapping[str, optuna.distributions.BaseDistribution],
        mode: str,
        seed: int,
        about: Mapping[str, Any],
        resume: bool,
    ) -> None:
        """Begin a search, or go on with one.

        Args:
            place: folder of the sweep.
            space: key → distribution.
            mode: "max" or "min".
            seed: of the sampler.
            about: what else decides the results; kept in the journal and compared.
            resume: repeat the journal that is there, if there is one.

        Raises:
            OtherSearch: the journal is that of other settings, or of another Optuna.
            StoreError: it cannot be read.
        """
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self.place, self.space = place, dict(space)
        self.about = {
            **about,
            "mode": mode,
            "seed": seed,
            "space": {
                key: json.loads(optuna.distributions.distribution_to_json(axis))
                for key, axis in space.items()
            },
        }
        self.study = optuna.create_study(
            sampler=optuna.samplers.TPESampler(seed=seed),
            direction="maximize" if mode == "max" else "minimize",
        )
        self.events: list[list[Any]] = []
        self.trials: list[optuna.Trial] = []
        self.points: list[Point] = []
        """What was asked, in order."""
        self.told: dict[int, float] = {}
        """Number of a point → its result."""
        found = files.read_bytes(place, "_search.json") if resume else None
        if found is not None:
            self._repeat(json.loads(found))
        self.waiting = [n for n in range(len(self.points)) if n not in self.told]
        """Numbers of points that were asked for and have no result; nobody works on them."""

    def _repeat(self, journal: Mapping[str, Any]) -> None:
        mine = json.loads(json.dumps(self.about))
        for key in mine.keys() | journal["about"].keys():
            if mine.get(key) != journal["about"].get(key):
                raise OtherSearch(
                    f"{files.shown(self.place)}: its search had another {key}; give the same "
                    "settings, or start it anew without --resume"
                )
        for kind, number, value in journal["events"]:
            if kind == "tell":
                self.study.tell(self.trials[number], value)
                self.told[number] = value
                continue
            point = self._ask()
            if not all(_same(point[key], value[key]) for key in value):
                raise OtherSearch(
                    f"{files.shown(self.place)}: another version of Optuna suggested "
                    f"{value} where this one ({optuna.__version__}) suggests {point}; start the "
                    "search anew without --resume"
                )
            self.points[number] = value
        self.events = list(journal["events"])

    def _ask(self) -> Point:
        self.trials.append(self.study.ask(self.space))
        self.points.append(dict(self.trials[-1].params))
        return self.points[-1]

    def next(self) -> int:
        """Return the number of the next point: one that waits, or a new one, which is recorded.

        Raises:
            StoreError: the journal cannot be written.
        """
        if self.waiting:
            return self.waiting.pop(0)
        point, number = self._ask(), len(self.points) - 1
        self._write("ask", number, point)
        return number

    def tell(self, number: int, value: float) -> None:
        """Take the result of a point; a second one is left out.

        Raises:
            StoreError: the journal cannot be written.
        """
        if number in self.told or not math.isfinite(value):
            return
        self.study.tell(self.trials[number], value)
        self.told[number] = value
        self._write("tell", number, value)

    def _write(self, kind: str, number: int, value: Any) -> None:
        self.events.append([kind, number, value])
        text = json.dumps({"about": self.about, "events": self.events})
        files.write_bytes(self.place, "_search.json", text.encode())


class Suggestions(Searcher):
    """Tune's view of a Study: asks for a trial's point, tells what the finished trial reported."""

    def __init__(
        self, study: Study, metric: str, mode: str, prepare: Callable[[Point], None]
    ) -> None:
        """Take a study.

        Args:
            study: asked and told by this process alone.
            metric: name of the result that is told.
            mode: "max" or "min".
            prepare: called with each point before it is handed out.
        """
        super().__init__(metric=metric, mode=mode)
        self.study, self.prepare = study, prepare
        self.numbers: dict[str, int] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Give Tune's own state nothing of the study: the journal has it."""
        return {}

    def set_search_properties(self, *_: Any, **__: Any) -> bool:
        """Accept Tune's metric and mode, which are those of the study."""
        return True

    def suggest(self, trial_id: str) -> Point:
        """Return the point of a trial."""
        number = self.numbers[trial_id] = self.study.next()
        self.prepare(self.study.points[number])
        return dict(self.study.points[number])

    def on_trial_complete(
        self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False
    ) -> None:
        """Tell the result of a trial that came to its end; others are handed out on resume."""
        if result and result.get("done") and result["tells"] and not error:
            self.study.tell(self.numbers[trial_id], float(result[self.metric]))

    def save(self, checkpoint_path: str) -> None:
        """Write nothing: the journal is written as things happen."""

    def restore(self, checkpoint_path: str) -> None:
        """Read nothing: a Study reads its journal."""


def _same(a: Any, b: Any) -> bool:
    """Whether two suggestions are one, but for the last digits of another processor."""
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=1e-9)
    return bool(a == b)
