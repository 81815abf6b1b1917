"""Heads from statistics: exact with a server, geometric by gossip, and how many bytes they take."""

import numpy as np
import pytest
import torch
from sklearn.linear_model import Ridge
from test_methods import config, finish, run

from fedscale import blocks, heads
from fedscale.graphs import mixing
from fedscale.worker import ClientFailed


def test_the_servers_head_is_the_ridge_on_all_features():
    c = config("afl", **{"head.lam": 1e-3})
    found = finish(run(c))
    worker = found.pool.workers[0]
    payload = blocks.tensors(blocks.owned(found.payload()), "cpu")
    rows = np.concatenate(worker.data.rows)
    parts = worker.learner.features(payload, worker.data.inputs[torch.from_numpy(rows)], 0)
    h = torch.cat([part for _, part in parts]).double().numpy()
    y = np.eye(40)[worker.data.labels[torch.from_numpy(rows)].numpy()]
    right = Ridge(alpha=1e-3, fit_intercept=False, solver="svd").fit(h, y).coef_
    deployed = heads.deploy(c, found.payload(), c.data.clients)["head.weight"][0]
    np.testing.assert_allclose(deployed, right, rtol=1e-3, atol=1e-4)


def test_gossiped_heads_come_near_geometrically_at_the_graphs_rate():
    """The error per round falls by λ₂(W), fitted over its straight part, within 10 %."""
    c = config(
        "fedopal_gossip",
        rounds=30,
        **{
            "data.clients": 8,
            "graph.name": "ring",
            "graph.degree": 3,
            "graph.resample": False,
            "head.lam": 1e-2,
            "local.epochs": 1,
            "data.test_size": 10,
        },
    )
    found = finish(run(c))
    rounds = found.tables["rounds"]
    error = np.array([row["head_error"] for row in rounds])
    rho = rounds[0]["rho"]
    straight = (error < 1e-2) & (error > 1e-6)
    assert straight.sum() >= 4, error
    rounds_in = np.flatnonzero(straight)
    slope = np.polyfit(rounds_in, np.log(error[straight]), 1)[0]
    assert slope == pytest.approx(np.log(rho), rel=0.1)
    assert mixing.mixing_factor(np.full((3, 3), 1 / 3)) == pytest.approx(0, abs=1e-12)


def test_bytes_are_half_a_matrix_the_sums_and_the_prompts():
    c = config("fedopal")
    found = finish(run(c))
    row = found.tables["rounds"][-1]
    d, K, n = 192, 40, c.prompts.count
    one = 8 * (d * (d + 1) // 2 + d * K) + 4 * n * d
    assert row["bytes_sent"] == c.data.clients * one
    assert row["bytes_prompts"] == c.data.clients * 4 * n * d


def test_a_second_pass_measures_the_mismatch():
    first = finish(run(config("fedopal")))
    second = finish(run(config("fedopal", **{"head.restat": True})))
    assert [row["phase"] for row in second.tables["rounds"]] == ["server", "restat"]
    a, b = (blocks.statistics(found.payload())[heads.GRAM] for found in (first, second))
    assert not np.allclose(a, b)
    again = second.tables["rounds"][0]["accuracy_mean"]
    assert again == first.tables["rounds"][0]["accuracy_mean"]


def test_a_singular_system_ends_the_run_with_what_to_do():
    c = config("fedcgs", **{"head.lam": 0.0, "data.train_size": 40})
    with pytest.raises(ClientFailed, match=r"head\.lam=0: .*rank \d+ of 192.*head\.lam > 0"):
        finish(run(c))


def test_normalised_features_give_another_head():
    plain, scaled = (
        finish(run(config("afl", **{"head.normalise": on}))).payload()[heads.GRAM]
        for on in (False, True)
    )
    packed = scaled[0] * 4
    diagonal = packed[np.cumsum([0, *range(192, 1, -1)])]
    total = sum(len(rows) for rows in run(config("afl")).parts)
    assert diagonal.sum() == pytest.approx(total, rel=1e-3)
    assert plain[0].sum() != pytest.approx(scaled[0].sum())
