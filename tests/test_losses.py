"""A worker that dies at any moment costs time only."""

import threading
import time

import numpy as np
import pandas as pd
import pytest
from tiny_run import config, problem, same, untimed

from fedscale import cluster, orchestrator, store
from fedscale.orchestrator import RoundOrchestrator, Sink
from fedscale.pools import RayPool, WorkerLost

KEYS = {"rounds": 4, "eval_every": 2, "workers": 2}


@pytest.fixture(scope="module", autouse=True)
def session():
    with cluster.session("local"):
        yield


def run(root="", **more):
    c = config(**{**KEYS, **more})
    import ray

    pool = RayPool(2, 1, 0.0)
    sink = Sink(root, "tiny" if root else "")
    shared = ray.put(problem())
    return RoundOrchestrator(c, shared, problem().dataset, pool, sink)


def finish(found):
    while not found.done:
        found.advance()
    found.pool.close()
    return found


@pytest.fixture(scope="module")
def undisturbed():
    return finish(run())


def tables(found):
    return {name: untimed(pd.DataFrame(rows)) for name, rows in found.tables.items()}


@pytest.mark.parametrize("delay", [0.0, 0.3, 0.8])
def test_killed_workers_change_nothing(undisturbed, delay, tmp_path):
    import ray

    found = run(str(tmp_path))

    def kill():
        time.sleep(delay)
        ray.kill(found.pool.workers[int(delay * 100) % 2])

    killer = threading.Thread(target=kill)
    killer.start()
    while not found.done:
        found.advance()
    killer.join()
    found.pool.close()
    assert same(found.safe, undisturbed.safe)
    for name, frame in tables(found).items():
        pd.testing.assert_frame_equal(frame, tables(undisturbed)[name], check_exact=True)
    stored = store.load(tmp_path / "tiny")
    assert stored["round"].tolist() == [1, 2, 3, 4]


def test_a_worker_killed_between_rounds_is_replaced(undisturbed):
    import ray

    found = run()
    found.advance()
    for worker in found.pool.workers:
        ray.kill(worker)
    assert same(finish(found).safe, undisturbed.safe)


def test_losses_without_end_fail_the_run_with_the_reason(monkeypatch, tmp_path):
    found = run(str(tmp_path))

    def lost(answer):
        raise WorkerLost("ActorDiedError: it died")

    monkeypatch.setattr(found.pool, "get", lost)
    monkeypatch.setattr(found.pool, "replace", lambda: [])
    with pytest.raises(WorkerLost, match=f"{orchestrator.LOSSES + 1} losses in a row"):
        found.advance()
    row = store.load(tmp_path / "tiny", "runs").iloc[0]
    assert row["status"] == "failed" and "it died" in row["reason"]
    monkeypatch.undo()
    found.pool.close()


def test_two_workers_agree_with_one_process(undisturbed):
    import fedscale

    inline = fedscale.run(config(**{**KEYS, "workers": 0}))
    for key, value in inline.payload.items():
        np.testing.assert_allclose(undisturbed.safe[key], value, atol=1e-4)
