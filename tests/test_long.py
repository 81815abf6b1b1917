"""Long runs, many runs, many trials: memory stays, and everything that was asked for is there."""

import gc

import numpy as np
import psutil
import pytest
from test_methods import config, finish
from test_methods import run as start
from test_sweep import run as sweep

import fedscale

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def resident():
    gc.collect()
    return psutil.Process().memory_info().rss / 2**20


def growth(samples):
    """Growth over the second half, in MiB."""
    half = len(samples) // 2
    return float(np.median(samples[-3:]) - np.median(samples[half : half + 3]))


@pytest.mark.parametrize("method", ["dfrost", "ssdfl"])
def test_memory_is_flat_over_200_rounds(method, tmp_path):
    found = start(config(method, rounds=200, eval_every=5), str(tmp_path))
    samples = []
    while not found.done:
        found.advance()
        samples.append(resident())
    assert len(samples) == 40
    assert growth(samples) < 10, samples


def test_memory_is_flat_over_20_runs_in_one_process():
    samples = []
    for seed in range(20):
        finish(start(config("dfrost", seed=seed)))
        samples.append(resident())
    assert growth(samples) < 10, samples


def test_64_trials_wait_for_two_cores(tmp_path):
    seeds = ",".join(str(seed) for seed in range(13))
    keys = ["rounds=1", "eval_every=1", "backbone.weights=random", "data.clients=8"]
    keys += ["data.train_size=40", "data.test_size=20", "graph.degree=3", "local.epochs=1"]
    done = sweep(tmp_path, "--seeds", seeds, keys=[*keys, "merge.steps=2"])
    assert done.returncode == 0, done.stderr
    runs = fedscale.load(tmp_path / "dfrost_eps", "runs")
    assert len(runs) == 65 and (runs["status"] == "completed").all()
    assert len(fedscale.load(tmp_path / "dfrost_eps")) == 65
