"""What theorems bound in a run in cycles: measured right, and below the bounds where they hold."""

import networkx as nx
import numpy as np
import pytest
from test_methods import config, run
from tiny_run import finish, same

from fedscale import diagnostics
from fedscale.graphs import mixing
from fedscale.regimes import cluster

ETA, DEVICES, WIDTH = 0.005, 6, 5
NETWORK = nx.barbell_graph(3, 0)
CLUSTERS = [[0, 1, 2], [3, 4, 5]]


def steps(**keys):
    given = {"cycles": 4, "tau_a": 3, "tau_r": 2, "eval_every": 1, "lazy": True, "seed": 0}
    return cluster.steps(network=NETWORK, clusters=CLUSTERS, **{**given, **keys})


def numbers(B, gamma, loss):
    kinds = [("sgd", 0.0, 0.0)] * DEVICES
    given = {"labels": None, "samples": None, "optimizers": kinds, "tolerance": 10.0}
    return {**given, "eta": ETA, "tau_a": 3, "B": B, "gamma": gamma, "loss": loss}


def test_the_step_is_the_effective_gradient():
    """(14): θ' = θ − η ∇F̃, where ∇F̃ = G̃ + (I − Ã)θ/η; and (16) is θᵀ(I − Ã)θ."""
    rng = np.random.default_rng(0)
    theta, gradient = rng.normal(size=(2, DEVICES, WIDTH))
    step = next(steps())
    after = step.weights @ theta - ETA * gradient
    found = diagnostics.watch(step, CLUSTERS, ETA, {"x": theta}, {"x": after})
    effective = gradient + (np.eye(DEVICES) - step.weights) @ theta / ETA
    for index, group in enumerate(CLUSTERS):
        assert found["squares"][index] == pytest.approx(np.square(effective[group]).sum())
        own = step.weights[np.ix_(group, group)]
        pairs = sum(
            own[i, j] * np.square(theta[group[i]] - theta[group[j]]).sum() / 2
            for i in range(3)
            for j in range(3)
        )
        assert found["coupling"][index] == pytest.approx(pairs / (2 * ETA))
        away = after[group] - after[group].mean(axis=0)
        assert found["cluster_gaps"][index] == pytest.approx(np.linalg.norm(away))
    assert found["gap"] == pytest.approx(np.linalg.norm(after - after.mean(axis=0)))


@pytest.mark.parametrize("seed", range(5))
def test_bounds_hold_on_quadratics(seed):
    """f_i = c_i‖θ − a_i‖²/2 by plain SGD with exact gradients: (28), (31) and (32)."""
    rng = np.random.default_rng(seed)
    curvature, centre = rng.uniform(0.5, 2, DEVICES), rng.normal(size=(DEVICES, WIDTH))
    theta = rng.normal(size=(1, WIDTH)).repeat(DEVICES, 0)

    def gradient(x):
        return curvature[:, None] * (x - centre)

    def losses(x):
        return curvature * np.square(x - centre).sum(axis=1) / 2

    c = config("ssdfl", **{"local.lr": ETA, "regime.steps_per_instance": 1, "regime.lazy": True})
    B = 2 * np.linalg.norm(gradient(theta), axis=1).max()
    given = numbers(B, curvature.max(), losses(theta))
    bounds = diagnostics.Bounds(c, NETWORK, CLUSTERS, given, [16] * DEVICES)
    checked = 0
    for step in steps():
        before = theta
        theta = step.weights @ theta - (ETA * gradient(theta) if step.train else 0)
        assert np.linalg.norm(gradient(theta), axis=1).max() <= B
        watched = diagnostics.watch(step, CLUSTERS, ETA, {"x": before}, {"x": theta})
        rho = mixing.mixing_factor(step.weights)
        row = bounds.row(step, watched, rho, losses(before) if step.restart else None)
        for name in ("gap", "cluster_gap", "stationarity"):
            if row[f"{name}_bound"] is not None:
                assert row[name] <= row[f"{name}_bound"] * (1 + 1e-9)
                checked += 1
    assert checked == 4 * (3 + 3 + 2)


def test_a_run_records_them_and_stays_what_it_is():
    keys = {"regime.steps_per_instance": 1, "local.lr": 0.01, "regime.tau_r": 2}
    watched = finish(run(config("ssdfl", diagnostics=True, **keys)))
    for row in watched.tables["rounds"]:
        if row["phase"] == "inter":
            assert row["gap"] <= row["gap_bound"] * (1 + 1e-6) + 1e-9
            assert row["stationarity"] is row["cluster_gap"] is None
        else:
            assert 0 < row["stationarity"] <= row["stationarity_bound"]
            assert 0 <= row["cluster_gap"] <= row["cluster_gap_bound"]
    cycle = [row for row in watched.tables["rounds"] if row["cycle"] == 1 and row["stationarity"]]
    chosen = next(row for row in watched.tables["clusters"] if row["chosen"])
    assert cycle[-1]["stationarity_bound"] == pytest.approx(chosen["score"])
    plain = finish(run(config("ssdfl", **keys)))
    assert same(plain.payload(), watched.payload())
    assert plain.tables["rounds"][0]["gap"] is None


@pytest.mark.parametrize(
    "method, keys", [("stc", {}), ("ssdfl", {"graph.link_drop": 0.3}), ("ssdfl", {})]
)
def test_no_bound_is_claimed_where_its_premises_fail(method, keys):
    small = {"local.lr": 0.01, "local.batch_size": 2}
    found = finish(run(config(method, diagnostics=True, **small, **keys)))
    rows = [row for row in found.tables["rounds"] if row["phase"] == "intra"]
    assert all(row["stationarity"] > 0 for row in rows)
    assert all(row["stationarity_bound"] is None for row in rows), "an epoch is many steps"
    fixed = method == "ssdfl" and not keys
    assert [row["cluster_gap_bound"] is not None for row in rows] == [fixed] * len(rows)
