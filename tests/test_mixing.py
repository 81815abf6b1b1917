import networkx as nx
import numpy as np
import pytest
import reference
from hypothesis import given, settings
from hypothesis import strategies as st

from fedscale.graphs import mixing, topology


@given(st.integers(1, 30), st.floats(0, 1), st.integers(0, 1000), st.booleans())
@settings(deadline=None, max_examples=60)
def test_metropolis_is_symmetric_and_doubly_stochastic_on_every_graph(n, p, seed, lazy):
    graph = topology.build("erdos_renyi", max(n, 1), seed=seed, probability=p)
    weights = mixing.metropolis(graph, lazy=lazy)
    assert np.array_equal(weights, weights.T)
    assert np.abs(weights.sum(axis=0) - 1).max() < 1e-12
    assert np.abs(weights.sum(axis=1) - 1).max() < 1e-12
    assert weights.min() >= 0
    off = ~np.eye(n, dtype=bool)
    assert np.array_equal(weights[off] > 0, nx.to_numpy_array(graph)[off] > 0)
    full = reference.metropolis(graph)
    assert np.allclose(weights, (full + np.eye(n)) / 2 if lazy else full, atol=1e-14, rtol=0)


def test_the_six_ring_and_the_star_that_others_got_wrong():
    ring = mixing.metropolis(nx.cycle_graph(6))
    assert np.allclose(ring.sum(axis=1), 1, atol=1e-15)
    assert np.allclose(np.diagonal(ring), 1 / 3)
    star = mixing.metropolis(nx.star_graph(5))
    assert np.allclose(star[0], 1 / 6)
    assert np.allclose(star.sum(axis=1), 1, atol=1e-15)


def test_isolated_nodes_keep_everything():
    graph = nx.empty_graph(4)
    graph.add_edge(1, 3)
    weights = mixing.metropolis(graph)
    assert weights[0, 0] == 1.0
    assert weights[2, 2] == 1.0


def test_metropolis_follows_node_numbers_not_their_order_of_insertion():
    graph = nx.Graph([(3, 1), (2, 0)])
    assert mixing.metropolis(graph)[3, 1] == 0.5
    assert mixing.metropolis(graph)[2, 0] == 0.5


def test_metropolis_ignores_self_loops_and_refuses_what_it_cannot_mean():
    looped = nx.path_graph(3)
    looped.add_edge(0, 0)
    assert np.array_equal(mixing.metropolis(looped), mixing.metropolis(nx.path_graph(3)))
    for bad in (nx.DiGraph([(0, 1)]), nx.Graph([(1, 2)]), nx.Graph([("a", "b")])):
        with pytest.raises(ValueError, match="undirected graphs on the nodes"):
            mixing.metropolis(bad)


def test_mixing_factor_of_graphs_with_known_spectra():
    complete = mixing.metropolis(topology.build("complete", 12, seed=0))
    assert mixing.mixing_factor(complete) < 1e-15
    assert mixing.mixing_factor(np.ones((1, 1))) == 0.0
    n = 10  # ring: eigenvalues (1 + 2 cos(2πk/n)) / 3
    ring = mixing.metropolis(topology.build("ring", n, seed=0))
    assert mixing.mixing_factor(ring) == pytest.approx((1 + 2 * np.cos(2 * np.pi / n)) / 3)


def test_disconnected_graphs_report_one():
    two = nx.disjoint_union(nx.cycle_graph(4), nx.cycle_graph(5))
    assert mixing.mixing_factor(mixing.metropolis(two)) == pytest.approx(1, abs=1e-12)
    assert mixing.mixing_factor(np.eye(3)) == pytest.approx(1, abs=1e-12)


@given(st.integers(2, 20), st.integers(0, 1000))
@settings(deadline=None, max_examples=30)
def test_one_mixing_step_shrinks_disagreement_by_at_least_rho(n, seed):
    graph = topology.build("erdos_renyi", n, seed=seed, probability=0.4)
    weights = mixing.metropolis(graph)
    x = np.random.default_rng(seed).normal(size=(n, 3))
    before, after = (np.linalg.norm(v - v.mean(axis=0)) for v in (x, weights @ x))
    assert after <= mixing.mixing_factor(weights) * before + 1e-12
    assert np.allclose((weights @ x).mean(axis=0), x.mean(axis=0), atol=1e-12)


def test_lazy_halves_the_distance_to_the_identity_and_is_positive_semidefinite():
    graph = topology.build("ring", 8, seed=0)
    lazy = mixing.metropolis(graph, lazy=True)
    assert np.allclose(lazy, (np.eye(8) + mixing.metropolis(graph)) / 2)
    assert np.linalg.eigvalsh(lazy).min() > -1e-12
