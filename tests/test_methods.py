"""The contract of every method: it runs, is measured, resumes and gives the same at any layout."""

import numpy as np
import pytest
from tiny_run import same

from fedscale import store
from fedscale.config import ConfigError
from fedscale.orchestrator import RoundOrchestrator, Sink
from fedscale.pools import InlinePool
from fedscale.presets import METHODS, preset
from fedscale.problems import load_problem, problem_key
from fedscale.regimes.step import Step
from fedscale.worker import ClientWorker

SMALL = {
    "precision": "float32",
    "backbone.weights": "random",
    "eval_every": 1,
    "local.epochs": 1,
}
FAMILY = {
    "dfrost": {
        "rounds": 2,
        "data.clients": 8,
        "data.train_size": 40,
        "data.test_size": 20,
        "graph.degree": 3,
        "merge.steps": 5,
    },
    "ssdfl": {
        "rounds": 2,
        "data.train_size": 60,
        "data.test_size": 20,
        "regime.tau_a": 2,
        "backbone.channels": "4-8",
    },
    "fedopal": {"data.clients": 4, "data.train_size": 80, "data.test_size": 20, "graph.degree": 2},
}
_DISTILLED = {
    "server.epochs": 1,
    "server.generator_steps": 2,
    "server.generator_width": 4,
    "backbone.channels": "4-8",
}
METHOD = {
    "dfrost": {},
    "davg_adam_pt": {},
    "dfedavgm_pt": {},
    "dfedsam_pt": {},
    "dpsgd_pt": {},
    "dfrost_pp": {"prompts.pool": 5, "prompts.count": 2},
    "davg_adam_pp": {"prompts.pool": 5, "prompts.count": 2},
    "dfedavgm_pp": {"prompts.pool": 5, "prompts.count": 2},
    "dfedsam_pp": {"prompts.pool": 5, "prompts.count": 2},
    "dpsgd_pp": {"prompts.pool": 5, "prompts.count": 2},
    "pfpt_dec": {},
    "ssdfl": {},
    "sdfl": {},
    "pdfl": {},
    "stc": {},
    "cstc": {},
    "fedopal": {},
    "fedopal_gossip": {"rounds": 3},
    "afl": {},
    "fedcgs": {},
    "fedpft": {"data.partition": "extreme", "data.train_size": 200},
    "fedavg": {"rounds": 2},
    "local": {"rounds": 2},
    "dense": _DISTILLED,
    "coboosting": _DISTILLED,
}
"""One line per method: what makes its run small."""

_PROBLEMS = {}


def config(method, **more):
    keys = {**SMALL, **FAMILY[METHODS[method].family], **METHOD[method], **more}
    return preset(method, "offline", keys)


def run(c, root="", resume=False):
    key = problem_key(c)
    if key not in _PROBLEMS:
        _PROBLEMS[key] = load_problem(c)
    problem = _PROBLEMS[key]
    sink = Sink(root, "tiny" if root else "")
    pool = InlinePool(1, "cpu")
    pool.workers = [ClientWorker(1, "cpu") for _ in c.blocks()]
    return RoundOrchestrator(c, problem, problem.dataset, pool, sink, resume)


def finish(found):
    while not found.done:
        found.advance()
    return found


def test_every_method_is_listed():
    assert set(METHOD) == set(METHODS)


@pytest.mark.parametrize("method", METHODS)
def test_a_method_runs_to_its_end_and_is_measured(method):
    c = config(method)
    found = finish(run(c))
    rounds = found.tables["rounds"]
    assert [row["round"] for row in rounds] == list(range(1, c.total_steps + 1))
    last = rounds[-1]
    assert 0 <= last["accuracy_min"] <= last["accuracy_mean"] <= last["accuracy_max"] <= 1
    assert last["bytes_sent"] >= 0 and (last["bytes_sent"] > 0 or method == "local")
    payload = found.payload()
    assert all(np.isfinite(value).all() for value in payload.values())
    assert {len(value) for value in payload.values()} == {c.data.clients}
    again = finish(run(c))
    assert same(again.payload(), payload)


@pytest.mark.parametrize("method", ["pfpt_dec", "dfrost_pp", "ssdfl", "cstc", "fedopal_gossip"])
def test_a_resumed_run_is_the_undisturbed_one(method, tmp_path):
    c = config(method)
    whole = finish(run(c))
    first = run(c, str(tmp_path))
    first.advance()
    del first
    second = run(c, str(tmp_path), resume=True)
    assert 0 < second.committed < c.total_steps
    assert same(finish(second).payload(), whole.payload())


@pytest.mark.parametrize("method", ["ssdfl", "fedopal", "fedpft", "dense", "dfrost_pp", "pfpt_dec"])
def test_blocks_of_clients_give_the_same_as_one(method):
    """Two blocks in one process, by hand: what two workers do."""
    whole, c = finish(run(config(method))), config(method, workers=2)
    parts = run(config(method, workers=2))
    assert len(parts.layout) == 2 and c.run_id == whole.config.run_id
    a, b = whole.payload(), finish(parts).payload()
    assert a.keys() == b.keys()
    for key in a:
        np.testing.assert_allclose(a[key], b[key], rtol=1e-4, atol=1e-4)


def test_heads_from_sums_do_not_depend_on_who_holds_the_data():
    """FedOPAL without prompts is AFL: the same head for every partition and number of clients."""
    heads = []
    for keys in ({}, {"data.partition": "iid"}, {"data.clients": 9, "graph.degree": 4}):
        found = run(config("afl", **keys))
        found.advance()
        heads.append(found.tables["rounds"][-1]["accuracy_mean"])
    assert len({round(head, 6) for head in heads}) == 1


def test_gossip_of_statistics_comes_to_the_servers_head():
    server = finish(run(config("fedopal")))
    long = finish(run(config("fedopal_gossip", rounds=40, eval_every=40)))
    assert long.tables["rounds"][-1]["accuracy_mean"] == pytest.approx(
        server.tables["rounds"][-1]["accuracy_mean"], abs=0.02
    )


def test_idle_clients_keep_their_state_and_their_memory():
    c = config("dfedavgm_pt", rounds=2, **{"graph.participation": 0.5, "local.carry": True})
    found = run(c)
    found.advance()
    before, step = found.payload(), next(found.steps)
    assert isinstance(step, Step) and any(key.startswith("kept.") for key in before)
    found._submit(step)
    after = found.payload()
    for key, value in before.items():
        assert np.array_equal(value[~step.active], after[key][~step.active])
    assert (before["kept.steps"][~step.active] == after["kept.steps"][~step.active]).all()


def test_idle_clients_keep_their_prompts_under_pfpt():
    found = run(config("pfpt_dec", **{"graph.participation": 0.5}))
    found.advance()
    before, step = found.payload(), next(found.steps)
    found._submit(step)
    after = found.payload()
    for client in np.flatnonzero(~step.active):
        held = int(before["prompts.count"][client])
        assert after["prompts.count"][client] == held
        assert np.array_equal(after["prompts"][client, :held], before["prompts"][client, :held])


def test_diagnostics_are_recorded_and_the_bounds_hold():
    found = finish(run(config("dfrost", diagnostics=True)))
    for row in found.tables["rounds"]:
        assert np.isfinite(row["merge_objective"])
        assert 0 <= row["merge_delta"] <= row["merge_bound"]
    plain = finish(run(config("dfrost")))
    assert same(plain.payload(), found.payload())
    assert plain.tables["rounds"][0]["merge_objective"] is None


@pytest.mark.parametrize("method, more", [("ssdfl", {}), ("afl", {"head.restat": True})])
def test_runs_whose_steps_are_not_rounds_are_complete(method, more, tmp_path):
    c = config(method, **more)
    assert c.total_steps != c.rounds
    finish(run(c, str(tmp_path)))
    assert store.completed(tmp_path, "tiny") == {c.run_id}


def test_no_rounds_form_clusters_and_end(tmp_path):
    c = config("ssdfl", rounds=0)
    found = run(c, str(tmp_path))
    assert found.done and found.last()["clusters"] == found.members
    assert store.completed(tmp_path, "tiny") == {c.run_id}
    table = store.load(tmp_path / "tiny", "clusters")
    assert table["chosen"].sum() == 1 and (table["thresholds"].map(len) == table["S"]).all()
    trained = run(config("ssdfl"))
    assert trained.members == found.members, "clusters do not depend on what follows"
    with pytest.raises(ConfigError, match=r"rounds=0: must be at least 1 when regime.name=sdfl"):
        config("sdfl", rounds=0)


@pytest.mark.parametrize("method", ["sdfl", "pdfl", "cstc"])
def test_clusters_of_baselines_are_recorded(method, tmp_path):
    c = config(method)
    run(c, str(tmp_path))
    row = store.load(tmp_path / "tiny", "clusters").iloc[0]
    members = [list(each) for each in row["clusters"]]
    assert sorted(d for each in members for d in each) == list(range(c.data.clients))
    assert {"sdfl": 1, "pdfl": c.data.clients}.get(method, row["S"]) == row["S"] == len(members)
    assert row["conductances"] is None and row["chosen"]
