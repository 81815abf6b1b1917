"""SSD-FL's regimes: equations (11) and (18) on quadratics with a known optimum, in float64."""

from itertools import pairwise
from types import SimpleNamespace

import networkx as nx
import numpy as np
import pytest
import torch

from fedscale import blocks
from fedscale.graphs import mixing
from fedscale.local import cohort
from fedscale.regimes import cluster

DEVICES, SIZE = 6, 4
MU = np.array([0.0, 0.3, 0.0, 0.1, 0.0, 0.0])
RHO = np.array([0.0, 0.0, 0.8, 0.0, 0.5, 0.0])


class Quadratic:
    """L_i(θ) = ½ (θ − c_i)' H_i (θ − c_i), a Learner without data; inputs carry the device."""

    device = torch.device("cpu")

    def __init__(self):
        rng = np.random.default_rng(0)
        roots = rng.normal(size=(DEVICES, SIZE, SIZE))
        self.H = torch.from_numpy(roots @ roots.transpose(0, 2, 1) / SIZE + np.eye(SIZE))
        self.c = torch.from_numpy(rng.normal(size=(DEVICES, SIZE)))

    def gradients(self, payload, inputs, labels, counts, *, pad=None, chunk=None):
        gap = payload["theta"] - self.c[labels]
        g = torch.einsum("cij,cj->ci", self.H[labels], gap)
        return {"theta": g}, (g * gap).sum(1) / 2


def network():
    graph = nx.empty_graph(DEVICES)
    graph.add_edges_from([(0, 1), (1, 2), (0, 2), (2, 3), (3, 4), (4, 5), (3, 5)])
    return graph


def steps(**changes):
    keys = {"cycles": 3, "tau_a": 4, "tau_r": 2, "eval_every": 1, "seed": 0}
    clusters = [[0, 1, 2], [3, 4, 5]]
    return list(cluster.steps(network=network(), clusters=clusters, **{**keys, **changes}))


def walk(stream, eta=0.05, carry=False):
    """The package's own pieces, as the worker puts them together."""
    model = Quadratic()
    data = cohort.CohortData(
        torch.zeros(DEVICES, 1), torch.arange(DEVICES), [np.array([i]) for i in range(DEVICES)]
    )
    settings = SimpleNamespace(
        optimizer="sgd", lr=eta, prompt_lr=0.0, epochs=1, batch_size=1, momentum=0.0, mu=0.0, rho=1
    )
    block = {"theta": np.zeros((DEVICES, SIZE))}
    trace = []
    for step in stream:
        before = block["theta"]
        own = dict(block)
        if step.train:
            payload = blocks.tensors(blocks.owned(block), "cpu")
            payload, _, memory = cohort.train(
                model,
                payload,
                data,
                settings,
                seed=0,
                round=step.round,
                clients=range(DEVICES),
                active=step.active,
                devices=cohort.Devices(MU, RHO),
                memory=blocks.recall(block, payload, step.restart, carry, "cpu"),
            )
            own = blocks.arrays(payload) | blocks.remember(memory)
        block = own | {"theta": step.weights @ before + (own["theta"] - before)}
        trace.append(block["theta"])
    return np.array(trace)


def dense(cycles=3, tau_a=4, tau_r=2, eta=0.05, carry=False):
    """Equations (6)–(11), (18) written out."""
    model = Quadratic()
    H, c = model.H.numpy(), model.c.numpy()
    A = mixing.metropolis(network())
    inside = network()
    inside.remove_edge(2, 3)
    tilde = mixing.metropolis(inside)
    theta, past, trace = np.zeros((DEVICES, SIZE)), [], []
    for _ in range(cycles):
        anchor = theta
        past = past if carry else []
        for _ in range(tau_a):
            g = np.einsum("ijk,ik->ij", H, theta - c)
            past = [*past, g]
            step = MU[:, None] * (theta - anchor)
            for age, old in enumerate(reversed(past)):
                step = step + RHO[:, None] ** age * old
            theta = tilde @ theta - eta * step
            trace.append(theta)
        for _ in range(tau_r):
            theta = A @ theta
            trace.append(theta)
    return np.array(trace)


@pytest.mark.parametrize("carry", [False, True])
@pytest.mark.parametrize(("tau_a", "tau_r"), [(1, 1), (4, 2), (3, 0)])
def test_cycles_are_the_equations(tau_a, tau_r, carry):
    found = walk(steps(tau_a=tau_a, tau_r=tau_r), carry=carry)
    right = dense(tau_a=tau_a, tau_r=tau_r, carry=carry)
    np.testing.assert_allclose(found, right, rtol=0, atol=1e-10)


def test_mixing_keeps_the_mean_and_its_bound_holds():
    """Equation (32): τ_r mixings leave at most λ₂^{τ_r − 1} of the gap (here even λ₂^{τ_r})."""
    trace, stream = walk(steps(tau_r=5)), steps(tau_r=5)
    A = mixing.metropolis(network())
    rate = np.abs(np.linalg.eigvalsh(A - 1 / DEVICES)).max()
    for index, step in enumerate(stream):
        if step.phase == "inter" and stream[index - 1].phase == "intra":
            start = trace[index - 1]
            gap = np.linalg.norm(start - start.mean(0))
            for taken in range(5):
                now = trace[index + taken]
                np.testing.assert_allclose(now.mean(0), start.mean(0), atol=1e-12)
                assert np.linalg.norm(now - now.mean(0)) <= rate ** (taken + 1) * gap + 1e-12


def test_devices_come_near_the_optimum():
    model = Quadratic()
    H, c = model.H.numpy(), model.c.numpy()
    best = np.linalg.solve(H.sum(0), np.einsum("ijk,ik->j", H, c))
    trace = walk(steps(cycles=400, tau_a=1, tau_r=3), eta=0.01)
    assert np.linalg.norm(trace[-1].mean(0) - best) < 0.15 * np.linalg.norm(best)


def test_steps_of_a_cycle():
    stream = steps(cycles=3, tau_a=2, tau_r=1, eval_every=2)
    assert [s.phase for s in stream[:3]] == ["intra", "intra", "inter"]
    assert [s.restart for s in stream[:4]] == [True, False, False, True]
    assert [s.cycle for s in stream] == [1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert [s.round for s in stream if s.measure] == [6, 9]
    inside = stream[0].weights
    assert not inside[:3, 3:].any() and stream[2].weights[2, 3] > 0
    for s in stream:
        np.testing.assert_allclose(s.weights.sum(0), 1)
        np.testing.assert_allclose(s.weights.sum(1), 1)


def test_a_late_stream_is_the_tail_of_a_whole_one():
    whole = steps(link_drop=0.5)
    tail = steps(link_drop=0.5, start_round=8)
    assert [s.round for s in tail] == [s.round for s in whole[7:]]
    for a, b in zip(whole[7:], tail, strict=True):
        assert np.array_equal(a.weights, b.weights)
    assert any(
        not np.array_equal(a.weights, b.weights) for a, b in pairwise(whole) if a.train and b.train
    )


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"tau_a": 0}, "regime.tau_a=0"),
        ({"tau_r": -1}, "regime.tau_r=-1"),
        ({"cycles": -1}, "rounds=-1"),
        ({"start_round": 20}, "start_round=20"),
    ],
)
def test_bad_input_is_named(changes, text):
    with pytest.raises(ValueError, match=text):
        steps(**changes)
    with pytest.raises(ValueError, match="each of 6 devices once"):
        list(
            cluster.steps(
                network=network(), clusters=[[0]], cycles=1, tau_a=1, tau_r=1, eval_every=1, seed=0
            )
        )


def test_random_clusters_cover_all_devices():
    sizes = set()
    for seed in range(30):
        found = cluster.random_clusters(7, seed=seed)
        assert sorted(d for c in found for d in c) == list(range(7))
        sizes.add(len(found))
    assert len(sizes) > 3
