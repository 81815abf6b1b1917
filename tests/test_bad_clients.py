"""Clients that diverge or fail: their runs are recorded so, and the sweep and the search go on."""

import dataclasses
import json
import sys

import pytest
from tiny_run import KEYS

import fedscale
from analysis.report import compare_report
from fedscale import problems
from fedscale.sweep import Axis, Request, Sweep

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

SMALL = {**KEYS, "rounds": 2, "eval_every": 1}
WILD = {"local.optimizer": "sgd", "local.lr": 1e30}


def request(place, overrides=SMALL, **changes):
    return Request(
        address="local", results=str(place), workers=1, seeds=(0,), overrides=overrides, **changes
    )


def test_a_sweep_counts_bad_clients_and_goes_on(tmp_path, monkeypatch, capsys):
    load = problems.load_problem

    def spoilt(config):
        problem = load(config)
        if config.data.train_size != 44:
            return problem
        labels = problem.dataset.train.labels.copy()
        labels[0] = 10_000
        train = dataclasses.replace(problem.dataset.train, labels=labels)
        return dataclasses.replace(
            problem, dataset=dataclasses.replace(problem.dataset, train=train)
        )

    monkeypatch.setattr(problems, "load_problem", spoilt)
    sweep = Sweep(
        name="bad",
        methods=("dpsgd_pt",),
        cases={
            "label": {"data.train_size": 44},
            "wild": {"data.train_size": 40, **WILD},
            "good": {"data.train_size": 40},
        },
        report=compare_report("case"),
    )
    others = {key: value for key, value in SMALL.items() if key != "data.train_size"}
    assert sweep.run(request(tmp_path, others)) == 1
    runs = fedscale.load(tmp_path / "bad", "runs").set_index("case")
    assert runs["status"].to_dict() == {"label": "failed", "wild": "diverged", "good": "completed"}
    assert "round 1, client " in runs.loc["label", "reason"]
    assert "IndexError: Target 10000 is out of bounds" in runs.loc["label", "reason"]
    assert "round 1, client 0: loss" in runs.loc["wild", "reason"]
    said = capsys.readouterr().out
    assert "1 failed" in said and "1 diverged" in said
    for case in ("label", "wild"):
        assert runs.loc[case, "reason"] in said


@pytest.mark.parametrize("mode", ["max", "min"])
def test_a_search_is_told_a_finite_penalty(tmp_path, mode):
    penalty = {"max": 0.0, "min": 1e3}[mode]
    sweep = Sweep(
        name="penal",
        methods=("pfpt_dec",),
        space={"local.lr": Axis((1e-3, 1e30)), "prompts.limit": Axis((4, 500))},
        overrides={"local.optimizer": "sgd"},
        report=lambda results, name: [],
        metric="accuracy_mean" if mode == "max" else "loss",
        mode=mode,
        penalty=penalty,
    )
    sweep.run(request(tmp_path, search="optuna", num_samples=8))
    runs = fedscale.load(tmp_path / "penal", "runs").set_index(["local.lr", "prompts.limit"])
    events = json.loads((tmp_path / "penal" / "_search.json").read_text())["events"]
    points = {n: tuple(value.values()) for kind, n, value in events if kind == "ask"}
    told = {n: value for kind, n, value in events if kind == "tell"}
    assert len(told) == 8 and set(runs["status"]) == {"completed", "diverged", "failed"}
    for number, value in told.items():
        done = runs.loc[points[number], "status"] == "completed"
        assert (value != penalty) if done else (value == penalty)
        assert abs(value) < sys.float_info.max
