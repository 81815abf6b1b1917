"""Threshold (37), scores (28), (33) and heterogeneity (38)–(41), each written out again."""

import math

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial.distance import jensenshannon

from fedscale.graphs import heterogeneity, mixing
from fedscale.graphs.clusters import CHOICES, form_clusters


def barbell(size):
    graph = nx.disjoint_union(nx.complete_graph(size), nx.complete_graph(size))
    graph.add_edge(0, size)
    return graph


def metropolis(graph, devices):
    inside = nx.convert_node_labels_to_integers(graph.subgraph(devices), ordering="sorted")
    return mixing.metropolis(inside)


def test_the_threshold_is_the_equation():
    numbers = {"eta": 0.02, "B": 2.0, "tolerance": 5.0, "tau_a": 4, "order": "literal"}

    def limit(size, scale=1):
        return math.sqrt(2 * 0.02 + 4 * 0.02 * 2.0 * scale * math.sqrt(size) / 5.0)

    graph = nx.disjoint_union(barbell(8), nx.empty_graph(3))
    for row in form_clusters(graph, **numbers).candidates.to_dict("records"):
        assert row["thresholds"] == pytest.approx([limit(16 // row["S"])] * row["S"])
    with_tau = form_clusters(graph, threshold="with_tau_a", **numbers).candidates
    assert with_tau["thresholds"][0] == pytest.approx([limit(16, 4)])
    each = form_clusters(graph, threshold_size="cluster", **numbers).candidates
    for row in each.to_dict("records"):
        sizes = [len(c) for c in row["clusters"] if c[0] < 16]
        assert row["thresholds"] == pytest.approx([limit(size) for size in sizes])


def terms(part, graph, gamma, eta, tau_a, B):
    A = metropolis(graph, part)
    lowest = np.linalg.eigvalsh(A)[0]
    effective = max(gamma[d] for d in part) + 1 + (1 - lowest) / eta
    return A, effective, effective + tau_a * B * math.sqrt(len(part))


def test_the_score_is_the_equation():
    graph = nx.disjoint_union(barbell(4), nx.empty_graph(1))
    rng = np.random.default_rng(0)
    eta, tau_a, B = 0.004, 3, 1.5
    gamma, loss = rng.uniform(0.5, 2.2, 9), rng.uniform(1, 3, 9)
    kinds = [("sgd", 0.0, 0.0), ("prox", 1e-4, 0.0), ("momentum", 0.0, 0.8)] * 3
    labels = [rng.integers(0, 4, 20) for _ in range(9)]
    numbers = {"eta": eta, "tau_a": tau_a, "B": B, "gamma": gamma, "loss": loss, "order": "literal"}
    found = form_clusters(graph, optimizers=kinds, labels=labels, **numbers)
    for row in found.candidates.to_dict("records"):
        bounds = []
        for part in row["clusters"]:
            beta = np.mean(
                [
                    (kinds[i][0] != kinds[j][0])
                    + abs(kinds[i][1] - kinds[j][1])
                    + abs(kinds[i][2] - kinds[j][2])
                    for i in part
                    for j in part
                ]
            )
            pairs = [
                jensenshannon(*(np.bincount(labels[d], minlength=4) for d in edge), base=2) ** 2
                for edge in graph.subgraph(part).edges
            ]
            alpha = 1 + 0.2 * beta / 3 + (0.2 * np.mean(pairs) if pairs else 0)
            _, _, top = terms(part, graph, gamma, eta, tau_a, B)
            above = sum(loss[part]) + 0.1 * tau_a * eta**2 * top / 2
            bounds.append(above / (eta - alpha * eta**2 * top / 2))
        assert min(bounds) > 0
        assert row["score"] == pytest.approx(np.mean(bounds))


def test_the_cycles_score_is_the_equation():
    graph = nx.disjoint_union(barbell(4), nx.complete_graph(3))
    rng = np.random.default_rng(0)
    eta, tau_a, tau_r, B, n = 0.004, 4, 2, 1.5, 11
    gamma, loss, g = rng.uniform(0.5, 2.2, n), rng.uniform(1, 3, n), rng.normal(size=(n, 7))
    numbers = {"eta": eta, "tau_a": tau_a, "tau_r": tau_r, "B": B, "gamma": gamma, "loss": loss}
    found = form_clusters(graph, accept="cycle", gradients=g, **numbers)
    assert len(found.candidates) > 2
    for row in found.candidates.to_dict("records"):
        right = 0.0
        for whole in (list(range(8)), [8, 9, 10]):
            own = [part for part in row["clusters"] if part[0] in whole]
            tilde = np.zeros((n, n))
            for part in own:
                tilde[np.ix_(part, part)] = metropolis(graph, part)
            tilde = tilde[np.ix_(whole, whole)]
            J = np.ones_like(tilde) / len(whole)
            powers = sum(np.linalg.matrix_power(tilde, q) for q in range(tau_a))
            gap = eta * np.linalg.norm((powers - tau_a * J) @ g[whole])
            values = np.linalg.eigvalsh(metropolis(graph, whole))
            effective = max(gamma[whole]) + 1 + (1 - np.linalg.eigvalsh(tilde)[0]) / eta
            tops = [terms(part, graph, gamma, eta, tau_a, B)[2] for part in own]
            c1 = (tau_a + 2 * tau_r - 2) * eta**2 / 2
            c2 = tau_a**2 * B**2 * len(whole) * tau_r * (tau_a + tau_r - 1) ** 2
            top = effective + tau_a * B * math.sqrt(len(whole))
            right += ((2 * tau_r - 1) * sum(loss[whole]) + 0.1 * c1 * sum(tops)) / (
                eta - eta**2 * top / 2
            )
            pull = effective * (1 - values[0]) / (1 - values[-2])
            right += 4 * tau_r * pull**2 * gap**2 + 4 * c2
        assert row["score"] == pytest.approx(right, rel=1e-9)


@settings(deadline=None, max_examples=40)
@given(
    n=st.integers(2, 10),
    seed=st.integers(0, 10**6),
    eta=st.floats(1e-4, 1e3),
    B=st.floats(1e-3, 1e6),
)
def test_no_score_is_negative(n, seed, eta, B):
    graph = nx.gnp_random_graph(n, 0.5, seed=seed)
    g = np.random.default_rng(seed).normal(size=(n, 3))
    for accept in CHOICES["accept"]:
        rows = form_clusters(graph, accept=accept, eta=eta, B=B, gamma=2.0, gradients=g).candidates
        assert all(score >= 0 for score in rows["score"])


def test_heterogeneity_scores():
    assert heterogeneity.optimizer_score([("sgd", 0, 0)] * 4) == 0
    mixed = heterogeneity.optimizer_score([("sgd", 0.0, 0.0), ("momentum", 0.0, 0.8)])
    assert mixed == pytest.approx((0.5 + 0.4) / 3 * 0.2)
    links = np.array([[0, 1], [0, 2], [1, 2], [0, 3]])
    labels = [np.array([0, 0, 5]), np.array([5, 7]), np.array([0, 5, 0]), np.array([], int)]
    found = heterogeneity.link_divergences(links, labels, None)
    p = {0: [2 / 3, 1 / 3, 0], 1: [0, 0.5, 0.5], 2: [2 / 3, 1 / 3, 0]}
    for row, (u, v) in enumerate(links[:3]):
        right = jensenshannon(p[u], p[v], base=2) ** 2
        assert found[row] == pytest.approx(right, abs=1e-12)
    assert np.isnan(found[3])
    assert heterogeneity.data_score(found) == pytest.approx(0.2 * found[:3].mean())
    assert heterogeneity.data_score(found[3:]) == heterogeneity.data_score(found[:0]) == 0
    apart = [np.zeros(3, int), np.ones(3, int)]
    assert heterogeneity.link_divergences(links[:1], apart, None)[0] == pytest.approx(1.0)


def test_energy_distance_is_the_double_sum_per_feature():
    rng = np.random.default_rng(0)
    samples = [rng.random((6, 5)) ** power for power in (1, 2, 3)]
    found = heterogeneity.link_divergences(np.array([[0, 2], [1, 1]]), None, samples)

    def mean(x, y):
        return np.mean([np.linalg.norm(a - b) for a in x for b in y])

    x, y = samples[0], samples[2]
    right = (2 * mean(x, y) - mean(x, x) - mean(y, y)) / 5
    assert found == pytest.approx([right, 0.0], abs=1e-12)
    graph = nx.path_graph(3)
    with_samples, without = (form_clusters(graph, samples=s) for s in (samples, None))
    assert with_samples.candidates["score"][0] > without.candidates["score"][0]
