"""A search's journal: whenever its process ends, the next one goes on as if it had not."""

import json

import optuna
import pytest
from rich.console import Console
from tiny_run import KEYS, config, finish, orchestrator

from fedscale import store, tuning
from fedscale.search import OtherSearch, Study, Suggestions
from fedscale.sweep import Axis, Request, Sweep

SPACE = {
    "merge.epsilon": optuna.distributions.FloatDistribution(1e-3, 10, log=True),
    "merge.steps": optuna.distributions.CategoricalDistribution([5, 50]),
}
ABOUT = {"configuration": {"rounds": 2}}


def study(place, resume=True, mode="max", seed=0, about=ABOUT, space=SPACE):
    return Study(place, space, mode, seed, about, resume)


def value(point):
    return -((point["merge.epsilon"] - 0.3) ** 2)


def walk(search, until):
    """As Tune does it: the next point is asked for while one is under way."""
    working = [search.next(), search.next()]
    while len(search.told) < until:
        number = working.pop(0)
        search.tell(number, value(search.points[number]))
        working.append(search.next())
    return search


def journal(place):
    return json.loads((place / "_search.json").read_text())


def test_a_search_that_ends_anywhere_goes_on_as_if_it_had_not(tmp_path):
    whole = walk(study(tmp_path / "whole"), 25)  # TPE's model begins after 10
    events = journal(tmp_path / "whole")["events"]
    assert len(events) == 25 + 27
    for cut in (1, 2, 3, 20, 29, 30, 41, 51):
        place = tmp_path / str(cut)
        place.mkdir()
        text = json.dumps({**journal(tmp_path / "whole"), "events": events[:cut]})
        (place / "_search.json").write_text(text)
        again = walk(study(place), 25)
        assert again.points == whole.points and again.told == whole.told
        assert journal(place) == journal(tmp_path / "whole")


def test_what_was_asked_and_not_told_is_handed_out_again_once(tmp_path):
    first = study(tmp_path)
    numbers = [first.next() for _ in range(4)]
    first.tell(2, 0.5)
    again = study(tmp_path)
    assert again.points == first.points and again.told == {2: 0.5}
    assert [again.next() for _ in range(4)] == [0, 1, 3, 4]
    assert numbers == [0, 1, 2, 3] and again.points[4] not in first.points
    again.tell(2, 0.9)
    assert study(tmp_path).told == {2: 0.5}


def test_without_resume_a_search_starts_anew(tmp_path):
    first = walk(study(tmp_path), 3)
    again = study(tmp_path, resume=False)
    assert not again.points
    again.next()
    assert again.points == first.points[:1] and len(journal(tmp_path)["events"]) == 1


@pytest.mark.parametrize(
    ("other", "key"),
    [
        ({"seed": 1}, "seed"),
        ({"mode": "min"}, "mode"),
        ({"space": {"merge.epsilon": SPACE["merge.epsilon"]}}, "space"),
        ({"about": {"configuration": {"rounds": 3}}}, "configuration"),
    ],
)
def test_a_search_of_other_settings_is_refused(tmp_path, other, key):
    study(tmp_path).next()
    with pytest.raises(OtherSearch, match=f"another {key}; .*without --resume"):
        study(tmp_path, **other)


def test_suggestions_of_another_optuna_are_refused(tmp_path):
    study(tmp_path).next()
    text = (tmp_path / "_search.json").read_text()
    point = journal(tmp_path)["events"][0][2]["merge.epsilon"]
    (tmp_path / "_search.json").write_text(text.replace(str(point), str(point * (1 + 1e-12))))
    assert study(tmp_path).points[0]["merge.epsilon"] == point * (1 + 1e-12)
    (tmp_path / "_search.json").write_text(text.replace(str(point), "0.5"))
    with pytest.raises(OtherSearch, match="another version of Optuna"):
        study(tmp_path)


@pytest.mark.parametrize("flags", [{}, {"resume": True}, {"fresh": True}])
def test_a_point_that_comes_again_keeps_the_records_of_its_run(tmp_path, flags):
    sweep = Sweep("small", ("dfrost",), lambda results, name: [], {"merge.epsilon": Axis((0.1, 1))})
    asked = {"search": "optuna", "num_samples": 2, "seeds": (0,), "workers": 0}
    request = Request(results=str(tmp_path), overrides=KEYS, **asked, **flags)
    run = config(workers=0, **{"merge.epsilon": 0.1})
    finish(orchestrator(run, str(tmp_path)))
    (tmp_path / "tiny").rename(tmp_path / "small")
    plan = tuning.Plan.make(sweep, request)
    plan.skip_completed(Console(quiet=True))
    plan.prepare({"merge.epsilon": 0.1})
    kept = store.completed(tmp_path, "small")
    assert kept == (frozenset() if "fresh" in flags else {run.run_id})
    assert plan.run_ids == {run.run_id}
    (tmp_path / "small").rename(tmp_path / "tiny")
    finish(orchestrator(run, str(tmp_path)))  # the trial that has the point now
    (tmp_path / "tiny").rename(tmp_path / "small")
    plan.prepare({"merge.epsilon": 0.1})
    assert store.completed(tmp_path, "small") == {run.run_id}


def test_only_trials_that_came_to_their_end_are_told(tmp_path):
    search, seen = study(tmp_path), []
    tune = Suggestions(search, "accuracy_mean", "max", seen.append)
    points = [tune.suggest(name) for name in "abcde"]
    assert points == seen == search.points
    result = {"accuracy_mean": 0.25, "done": True, "tells": True}
    tune.on_trial_complete("a", result)
    tune.on_trial_complete("b", error=True)
    tune.on_trial_complete("c", {**result, "done": False})
    tune.on_trial_complete("d", {**result, "tells": False})
    tune.on_trial_complete("e", {**result, "accuracy_mean": float("nan")})
    assert search.told == {0: 0.25}
    assert study(tmp_path).waiting == [1, 2, 3, 4]
