"""One run: what a round does to the state, what is recorded, and that it repeats bit for bit."""

import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
import torch
from tiny_run import config, finish, orchestrator, problem, same, untimed, words

from fedscale import api, checkpoint, exchange, store
from fedscale.local import cohort
from fedscale.worker import ClientFailed, Diverged


def frames(run):
    return {name: pd.DataFrame(rows) for name, rows in run.tables.items()}


def test_records_have_every_round_and_every_client_once():
    run = finish(orchestrator(config()))
    rounds, clients = frames(run)["rounds"], frames(run)["clients"]
    assert rounds["round"].tolist() == [1, 2, 3]
    assert rounds["accuracy_mean"].notna().tolist() == [False, True, True]
    assert clients.groupby("round").size().to_dict() == {2: 8, 3: 8}
    last = clients[clients["round"] == 3]["accuracy"]
    assert rounds["accuracy_mean"].iloc[-1] == pytest.approx(last.mean())
    assert rounds["accuracy_std"].iloc[-1] == pytest.approx(last.std(ddof=0))
    assert rounds["rho"].between(0, 1 + 1e-12).all()
    assert clients["samples"][:8].sum() == 160


def test_bytes_are_what_neighbours_exchange():
    run = finish(orchestrator(config()))
    width, classes, prompts, degree, clients = 192, 40, 3, 3, 8
    head = 4 * (classes * width + classes)
    row = run.tables["rounds"][0]
    assert row["bytes_prompts"] == clients * degree * 4 * prompts * width
    assert row["bytes_sent"] == row["bytes_prompts"] + clients * degree * head


def test_training_improves_on_the_untrained_state():
    few = {"rounds": 6, "eval_every": 6, "data.partition": "iid", "local.epochs": 4}
    run = finish(orchestrator(config(**few)))
    losses = frames(run)["rounds"]["loss"]
    assert losses.iloc[-1] < losses.iloc[0] - 0.05


@pytest.mark.parametrize("method", ["dfrost", "davg_adam_pt", "dfedavgm_pt", "dpsgd_pt"])
def test_mixing_is_what_the_method_says(method):
    run = orchestrator(config(method, rounds=1, eval_every=1))
    before = run.payload()
    step = next(run.steps)
    run._submit(step)
    after = run.payload()
    trained = run.pool.workers[0].train(step, before)[0]
    heads = np.einsum("uv,vkd->ukd", step.weights, trained["head.weight"].astype(float))
    np.testing.assert_allclose(after["head.weight"], heads, atol=1e-6)
    mean = np.einsum("uv,vnd->und", step.weights, trained["prompts"].astype(float))
    close = np.allclose(after["prompts"], mean, atol=1e-6)
    assert close == (method != "dfrost")


def test_idle_and_isolated_clients_keep_their_state():
    c = config(rounds=1, eval_every=1, **{"graph.participation": 0.5})
    run = orchestrator(c)
    before, step = run.payload(), next(run.steps)
    run._submit(step)
    after = run.payload()
    assert step.active.sum() == 4
    for key, value in before.items():
        assert np.array_equal(value[~step.active], after[key][~step.active])
        assert not np.array_equal(value[step.active], after[key][step.active])
    alone = orchestrator(
        config(rounds=1, eval_every=1, **{"graph.name": "erdos_renyi", "graph.probability": 1e-12})
    )
    before, step = alone.payload(), next(alone.steps)
    trained = alone.pool.workers[0].train(step, before)[0]
    alone._submit(step)
    assert same(alone.payload(), trained)


def test_local_head_is_not_mixed():
    run = orchestrator(config(rounds=1, eval_every=1, **{"merge.head": "local"}))
    before, step = run.payload(), next(run.steps)
    run._submit(step)
    trained = run.pool.workers[0].train(step, before)[0]
    assert np.array_equal(run.payload()["head.weight"], trained["head.weight"])
    row = run._collect(
        step, [], [{"bytes": 40.0, "bytes_prompts": 40.0, "seconds": 0.0, "theorem_1": {}}]
    )
    assert row["bytes_sent"] == row["bytes_prompts"] == 8 * 3 * 40


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"merge.start": "sample", "graph.link_drop": 0.3, "graph.participation": 0.7},
        {"prompts.init": "per_client", "local.optimizer": "sgd", "local.momentum": 0.9},
        {"merge.schedule": "anneal", "graph.resample": False},
        {"merge.tolerance": 1e-4, "merge.start": "updated", "graph.name": "ring"},
    ],
)
def test_resume_continues_bit_for_bit(tmp_path, keys):
    c = config(rounds=4, eval_every=2, **keys)
    whole = finish(orchestrator(c))
    root = str(tmp_path)
    first = orchestrator(c, root)
    first.advance()
    del first
    second = finish(orchestrator(c, root, resume=True))
    assert second.tables["rounds"][0]["round"] == 3
    assert same(second.payload(), whole.payload())
    for name in ("rounds", "clients"):
        stored = store.load(tmp_path / "tiny", name)
        plain = frames(whole)[name]
        columns = [column for column in untimed(plain).columns]
        plain = plain[columns].where(plain[columns].notna(), np.nan)
        pd.testing.assert_frame_equal(stored[columns], plain, check_dtype=False, check_exact=True)
    assert store.completed(root, "tiny") == {c.run_id}


def test_a_state_keeps_the_order_of_its_arrays(tmp_path):
    """Sums over a payload's arrays go in its order; another one after a resume is another bit."""
    state = {name: np.arange(3.0) for name in ("prompts", "head.weight", "kept.m", "head.bias")}
    checkpoint.write(str(tmp_path), "s", "run-1", 7, state)
    round, found = checkpoint.read(str(tmp_path), "s", "run-1")
    assert round == 7 and list(found) == list(state)


def test_a_damaged_state_starts_the_run_over(tmp_path):
    c = config(rounds=2, eval_every=1)
    orchestrator(c, str(tmp_path)).advance()
    path = tmp_path / "tiny" / "_state" / f"{c.run_id}.safetensors"
    path.write_bytes(path.read_bytes()[:100])
    assert checkpoint.read(str(tmp_path), "tiny", c.run_id) is None
    again = orchestrator(c, str(tmp_path), resume=True)
    assert again.committed == 0
    finish(again)
    assert len(store.load(tmp_path / "tiny")) == 2


def test_the_record_of_a_run_is_written_at_its_start_and_its_end(tmp_path):
    run = orchestrator(config(eval_every=1), str(tmp_path))
    record = tmp_path / "tiny" / "runs" / f"run_id={run.config.run_id}" / "run.parquet"
    begun = record.stat().st_mtime_ns
    run.advance()
    assert store.load(tmp_path / "tiny", "runs")["status"].tolist() == ["running"]
    assert record.stat().st_mtime_ns == begun
    finish(run)
    row = store.load(tmp_path / "tiny", "runs").iloc[0]
    assert row["status"] == "completed" and row["seconds"] > 0


@pytest.mark.parametrize("table", ["rounds", "clients"])
def test_a_state_whose_records_are_gone_starts_the_run_over(tmp_path, table):
    c, root = config(rounds=3, eval_every=1), str(tmp_path)
    whole = finish(orchestrator(c, root))
    gone = {"rounds": 1, "clients": 3}[table]
    folder = tmp_path / "tiny" / table / f"run_id={c.run_id}"
    (folder / f"{table}-{gone:05d}-{gone:05d}.parquet").unlink()
    again = orchestrator(c, root, resume=True)
    assert again.committed == 0
    assert same(finish(again).payload(), whole.payload())
    assert len(store.load(tmp_path / "tiny", "clients")) == 3 * 8
    assert store.completed(root, "tiny") == {c.run_id}


def test_divergence_names_round_and_client_and_is_recorded(tmp_path):
    c = config(**{"local.optimizer": "sgd", "local.lr": 1e30, "local.epochs": 3})
    run = orchestrator(c, str(tmp_path))
    with pytest.raises(Diverged, match=r"round \d+, client \d+: "):
        finish(run)
    row = store.load(tmp_path / "tiny", "runs").iloc[0]
    assert row["status"] == "diverged" and "client" in row["reason"]
    assert store.completed(str(tmp_path), "tiny") == frozenset()


def test_a_failing_client_names_round_client_and_cause(tmp_path):
    run = orchestrator(config(), str(tmp_path))
    data = run.pool.workers[0].data
    data.labels[data.rows[5][3]] = 10_000
    with pytest.raises(ClientFailed, match=r"^round 1, client 5: IndexError: Target 10000"):
        finish(run)
    row = store.load(tmp_path / "tiny", "runs").iloc[0]
    assert row["status"] == "failed" and "round 1, client 5" in row["reason"]


@pytest.mark.parametrize("error", [MemoryError(), torch.OutOfMemoryError("CUDA out of memory.")])
@pytest.mark.parametrize("limit", [1, 3])
def test_out_of_memory_names_round_and_clients(tmp_path, monkeypatch, error, limit):
    run, whole = orchestrator(config(), str(tmp_path)), cohort.train
    run.advance()

    def tight(*args, active, **kwargs):
        if active[2] and active.sum() >= limit:
            raise error
        return whole(*args, active=active, **kwargs)

    monkeypatch.setattr(cohort, "train", tight)
    who = "client 2" if limit == 1 else "clients 0–7"
    with pytest.raises(ClientFailed, match=rf"^round 3, {who}: (OutOf)?Memory"):
        finish(run)
    row = store.load(tmp_path / "tiny", "runs").iloc[0]
    assert row["status"] == "failed" and "\n" not in row["reason"]
    assert store.load(tmp_path / "tiny")["round"].tolist() == [1, 2]


@pytest.mark.parametrize("doing", ["mixing", "measuring"])
def test_errors_outside_of_training_name_round_and_clients(doing, monkeypatch, tmp_path):
    run = orchestrator(config(), str(tmp_path))

    def broken(*args):
        raise MemoryError

    what = (exchange, "mix") if doing == "mixing" else (run.pool.workers[0], "_evaluate")
    monkeypatch.setattr(*what, broken)
    number = 1 if doing == "mixing" else 2
    with pytest.raises(ClientFailed, match=rf"^round {number}, {doing}, clients 0–7: MemoryError"):
        finish(run)
    assert store.load(tmp_path / "tiny", "runs")["status"].tolist() == ["failed"]


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_images_that_are_not_finite_make_the_run_diverge_and_name_the_client(value, tmp_path):
    run = orchestrator(config(), str(tmp_path))
    data = run.pool.workers[0].data
    data.inputs[data.rows[5][0]] = value
    with pytest.raises(Diverged, match=r"^round 1, client 5: loss nan"):
        finish(run)
    row = store.load(tmp_path / "tiny", "runs").iloc[0]
    assert row["status"] == "diverged" and "client 5" in row["reason"]


def test_fresh_processes_give_the_same_tables(tmp_path):
    for name in ("a", "b"):
        command = [sys.executable, "-m", "fedscale.cli", "run", "dfrost", *words()]
        done = subprocess.run(
            [*command, "--results", str(tmp_path / name)], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
    for table in ("rounds", "clients"):
        a, b = (untimed(store.load(tmp_path / name / "runs", table)) for name in ("a", "b"))
        pd.testing.assert_frame_equal(a, b, check_exact=True)


def test_run_returns_tables_payload_and_summary(monkeypatch):
    monkeypatch.setattr(api, "load_problem", lambda c: problem())
    seen = []
    found = api.run(config(), on_measure=seen.append)
    assert found.rounds["round"].tolist() == [1, 2, 3]
    assert [record["round"] for record in seen] == [2, 3]
    assert found.payload["prompts"].shape == (8, 3, 192)
    assert found.summary["status"] == "completed"
    assert found.summary["accuracy_mean"] == found.rounds["accuracy_mean"].iloc[-1]
