"""The same run with 0, 1 and 2 workers, one client per worker, and what a worker's error says."""

import re
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
from tiny_run import config, untimed, words

import fedscale
from fedscale import cluster, room, store
from fedscale.config import ConfigError
from fedscale.room import Machine


@pytest.fixture(scope="module")
def inline():
    return fedscale.run(config())


@pytest.mark.parametrize("layout", [{"workers": 1}, {"workers": 2}])
def test_layouts_agree(inline, layout):
    found = fedscale.run(config(**layout), address="local")
    assert found.payload.keys() == inline.payload.keys()
    for key, value in inline.payload.items():
        np.testing.assert_allclose(found.payload[key], value, atol=1e-4)
    pd.testing.assert_frame_equal(
        untimed(found.rounds), untimed(inline.rounds), rtol=1e-3, atol=1e-4
    )
    assert found.rounds["accuracy_mean"].tolist() == pytest.approx(
        inline.rounds["accuracy_mean"].tolist(), nan_ok=True
    )


def test_a_session_of_the_callers_is_left_alone():
    import ray

    with cluster.session("local"):
        before = ray.get_runtime_context().get_job_id()
        fedscale.run(config(workers=1))
        assert ray.is_initialized() and ray.get_runtime_context().get_job_id() == before
    assert not ray.is_initialized()


def test_a_share_that_cannot_fit_is_refused():
    for share, gpus in (("0.5", 0), ("1", 0), ("0.25", 0)):
        with pytest.raises(ConfigError, match=f"gpus_per_worker={share}"):
            room.fit(config(workers=1, gpus_per_worker=share), [Machine(9, gpus)])
    eight = config(workers=8, gpus_per_worker="0.4")
    with pytest.raises(ConfigError, match="6 would fit"):
        room.fit(eight, [Machine(9, 2)])
    assert room.fit(config(workers=6, gpus_per_worker="0.4"), [Machine(9, 2)]) == 0.3333
    assert room.fit(config(workers=8), [Machine(9, 2)]) == 0.25
    assert room.fit(config(workers=2), [Machine(9, 0)]) == 0
    assert room.fit(config(workers=1), [Machine(9, 4)]) == 1


def test_a_stale_address_does_not_hang(monkeypatch, tmp_path):
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text("127.0.0.1:1")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    assert cluster.resolve("auto") == "local"


def test_long_temporary_folders_are_avoided(monkeypatch, tmp_path):
    deep = tmp_path / ("x" * 120)
    deep.mkdir()
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.setenv("TMPDIR", str(deep))
    found = fedscale.run(config(workers=1, rounds=1), address="local")
    assert found.summary["status"] == "completed"


@pytest.mark.parametrize("method, where", [("dpsgd_pt", "round 1"), ("ssdfl", "first gradients")])
def test_a_divergence_in_a_worker_is_one_line(method, where, tmp_path):
    small = {"dpsgd_pt": words(**{"local.lr": 1e30})}
    keys = small.get(method, ["local.lr=1e30", "rounds=1", "data.train_size=60"])
    command = [sys.executable, "-m", "fedscale.cli", "run", method, *keys, "workers=1"]
    places = ["--address", "local", "--results", str(tmp_path)]
    done = subprocess.run([*command, *places], capture_output=True, text=True, timeout=240)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()
    assert len(last) == 1 and re.match(rf"{method}-s0-\w+: {where}, client 0: ", last[0])
    row = store.load(tmp_path / "runs", "runs").iloc[0]
    assert row["status"] == "diverged" and row["reason"].startswith(where)
