"""Conductance against brute force, planted clusters recovered, and what must not matter."""

import itertools
import math

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import adjusted_rand_score

from fedscale.graphs import conductance as cond
from fedscale.graphs import mixing, topology
from fedscale.graphs.clusters import CHOICES, RULES, form_clusters
from fedscale.graphs.heterogeneity import energy_distance, optimizer_score, pair_divergence


def barbell(size, joins=1):
    graph = nx.disjoint_union(nx.complete_graph(size), nx.complete_graph(size))
    graph.add_edges_from((i, size + i) for i in range(joins))
    return graph


def ring_of_cliques(count, size):
    return nx.convert_node_labels_to_integers(nx.ring_of_cliques(count, size))


def brute(A):
    best = math.inf
    volume = A.sum(1)
    for size in range(1, len(A)):
        for chosen in itertools.combinations(range(len(A)), size):
            inside = np.zeros(len(A), bool)
            inside[list(chosen)] = True
            cut = A[np.ix_(inside, ~inside)].sum()
            best = min(best, cut / min(volume[inside].sum(), volume[~inside].sum()))
    return best


def random_graph(n, p, seed):
    return nx.gnp_random_graph(n, p, seed=seed)


def index(members, n):
    found = np.empty(n, int)
    for number, devices in enumerate(members):
        found[list(devices)] = number
    return found


@settings(deadline=None, max_examples=120)
@given(n=st.integers(2, 8), p=st.floats(0.1, 1), seed=st.integers(0, 10**6), lazy=st.booleans())
def test_conductance_is_brute_forces_and_networkxs(n, p, seed, lazy):
    graph = random_graph(n, p, seed)
    A = mixing.metropolis(graph, lazy)
    found = cond.conductance(A)
    right = brute(A) if nx.is_connected(graph) else 0.0
    assert found == pytest.approx(right, abs=1e-12)
    order = cond.fiedler_order(A)
    weighted = nx.from_numpy_array(A)
    for size, ratio in enumerate(cond.cuts(A, order), 1):
        # networkx counts a self-loop twice in volumes and cuts never; ours once.
        inside = order[:size].tolist()
        cut = nx.cut_size(weighted, inside, weight="weight")
        assert ratio == pytest.approx(cut / min(size, n - size), abs=1e-12)
    if nx.is_connected(graph):
        assert cond.conductance(A, "sweep") >= found - 1e-12
        lambda2, lowest = cond.spectrum(A)
        values = np.linalg.eigvalsh(A)
        assert (lambda2, lowest) == pytest.approx((values[-2], values[0]), abs=1e-12)
        assert found**2 / 2 - 1e-12 <= 1 - lambda2 <= 2 * found + 1e-12
        assert cond.cheeger_bound(A) <= found + 1e-12


@settings(deadline=None, max_examples=60)
@given(n=st.integers(2, 14), p=st.floats(0.2, 1), seed=st.integers(0, 10**6))
def test_prefixes_that_are_whole_are_networkxs(n, p, seed):
    graph = random_graph(n, p, seed)
    A = mixing.metropolis(graph)
    order = cond.fiedler_order(A)
    for size, whole in enumerate(cond.whole_prefixes(A, order), 1):
        parts = graph.subgraph(order[:size].tolist()), graph.subgraph(order[size:].tolist())
        assert whole == all(nx.is_connected(part) for part in parts)


def test_large_graphs_have_the_same_spectrum_and_order():
    graph = ring_of_cliques(24, 10)
    A = mixing.metropolis(graph)
    values = np.linalg.eigvalsh(A)
    assert cond.spectrum(A) == pytest.approx((values[-2], values[0]), abs=1e-9)
    two = mixing.metropolis(barbell(120, 3))
    order = cond.fiedler_order(two)
    assert {frozenset(order[:120].tolist()), frozenset(order[120:].tolist())} == {
        frozenset(range(120)),
        frozenset(range(120, 240)),
    }


@pytest.mark.parametrize("size", [4, 8, 12])
def test_two_cliques_are_two_clusters(size):
    found = form_clusters(barbell(size))
    assert found.members == [list(range(size)), list(range(size, 2 * size))]


@pytest.mark.parametrize("n", [2, 5, 14, 15, 40])
def test_a_complete_graph_stays_whole(n):
    assert form_clusters(nx.complete_graph(n)).members == [list(range(n))]


def test_planted_clusters_are_recovered():
    for seed in range(3):
        graph = nx.planted_partition_graph(4, 10, 0.8, 0.02, seed=seed)
        graph = nx.convert_node_labels_to_integers(graph)
        found = form_clusters(graph)
        truth = np.repeat(range(4), 10)
        assert adjusted_rand_score(truth, index(found.members, 40)) == 1.0
    found = form_clusters(ring_of_cliques(6, 5))
    assert found.members == [list(range(5 * i, 5 * i + 5)) for i in range(6)]


@settings(deadline=None, max_examples=40)
@given(n=st.integers(2, 18), p=st.floats(0.1, 0.7), seed=st.integers(0, 10**6))
def test_every_rule_partitions_every_graph(n, p, seed):
    graph = random_graph(n, p, seed)
    rng = np.random.default_rng(seed)
    options = {"gradients": rng.normal(size=(n, 5)), "tau_r": 2}
    for rule, accept, split, order in itertools.product(
        RULES, CHOICES["accept"], CHOICES["split"], CHOICES["order"]
    ):
        found = form_clusters(graph, rule=rule, accept=accept, split=split, order=order, **options)
        assert sorted(d for c in found.members for d in c) == list(range(n))
        for row in found.candidates.to_dict("records"):
            assert sorted(d for c in row["clusters"] for d in c) == list(range(n))
            assert row["score"] >= 0 and row["S"] == len(row["conductances"])
        if len(found.candidates):
            assert found.candidates["chosen"].sum() == 1
        alone = {d for d in graph if graph.degree(d) == 0}
        assert alone <= {c[0] for c in found.members if len(c) == 1}


@settings(deadline=None, max_examples=40)
@given(n=st.integers(4, 16), p=st.floats(0.2, 0.8), seed=st.integers(0, 10**6))
def test_edge_order_and_labels_do_not_matter(n, p, seed):
    graph = random_graph(n, p, seed)
    rng = np.random.default_rng(seed)
    edges = list(graph.edges)
    shuffled = nx.empty_graph(n)
    for i in rng.permutation(len(edges)):
        shuffled.add_edge(*edges[i][::-1])
    found = form_clusters(graph)
    assert form_clusters(shuffled).members == found.members
    if not _all_simple(graph, found):
        return
    place = rng.permutation(n)
    renamed = nx.relabel_nodes(graph, dict(enumerate(place.tolist())))
    again = form_clusters(nx.Graph(renamed))
    back = {frozenset(c) for c in again.members}
    assert back == {frozenset(int(place[d]) for d in c) for c in found.members}


def _all_simple(graph, found):
    """Whether λ₂ is simple, and no two prefixes tie, in every cluster on the way."""
    for row in found.candidates.to_dict("records"):
        for devices in row["clusters"]:
            if len(devices) < 3:
                continue
            inside = nx.convert_node_labels_to_integers(graph.subgraph(devices))
            A = mixing.metropolis(inside)
            values = np.linalg.eigvalsh(A)
            if values[-2] - values[-3] < 1e-6 or 1 - values[-2] < 1e-9:
                return False
            cuts = np.sort(cond.cuts(A, cond.fiedler_order(A)))
            vector = np.sort(np.linalg.eigh(A)[1][:, -2])
            if (np.diff(cuts) < 1e-9).any() or (np.diff(vector) < 1e-7).any():
                return False
    phis = [round(phi, 9) for row in found.candidates["conductances"] for phi in row]
    return len(set(phis)) > 0


@pytest.mark.parametrize("graph", [nx.cycle_graph(12), nx.grid_2d_graph(3, 4), nx.path_graph(9)])
def test_noise_in_the_weights_does_not_matter(graph):
    A = mixing.metropolis(nx.convert_node_labels_to_integers(graph))
    order = cond.fiedler_order(A).tolist()
    rng = np.random.default_rng(0)
    for _ in range(20):
        noise = rng.normal(size=A.shape) * 1e-15 * (A > 0)
        assert cond.fiedler_order(A + noise + noise.T).tolist() == order


@pytest.mark.parametrize(
    ("graph", "members"),
    [
        (nx.empty_graph(3), [[0], [1], [2]]),
        (nx.empty_graph(1), [[0]]),
        (nx.path_graph(2), [[0, 1]]),
        (nx.star_graph(4), [[0, 1, 2, 3, 4]]),
        (nx.disjoint_union(nx.complete_graph(3), nx.empty_graph(2)), [[0, 1, 2], [3], [4]]),
        (nx.disjoint_union(nx.complete_graph(3), nx.complete_graph(4)), [[0, 1, 2], [3, 4, 5, 6]]),
    ],
)
def test_odd_networks_have_a_sensible_answer(graph, members):
    assert form_clusters(graph).members == members


def test_a_bound_that_does_not_hold_scores_infinity():
    found = form_clusters(barbell(5), eta=0.5, B=100.0, accept="score")
    assert np.isinf(found.candidates["score"]).all()
    assert any("bound" in line or "threshold" in line for line in found.warnings)


def test_the_threshold_is_the_equation():
    table = form_clusters(barbell(8), eta=0.02, B=2.0, tolerance=5.0).candidates
    for row in table.to_dict("records"):
        size = 16 // row["S"]
        right = math.sqrt(2 * 0.02 + 4 * 0.02 * 2.0 * math.sqrt(size) / 5.0)
        assert row["thresholds"] == pytest.approx([right] * row["S"])
    with_tau = form_clusters(
        barbell(8), eta=0.02, B=2.0, tolerance=5.0, tau_a=4, threshold="with_tau_a"
    ).candidates
    right = math.sqrt(2 * 0.02 + 4 * 0.02 * 2.0 * 4 * math.sqrt(16) / 5.0)
    assert with_tau["thresholds"][0] == pytest.approx([right])


def test_the_score_is_the_equation():
    graph, eta, tau_a, B, gamma, loss = nx.complete_graph(5), 0.01, 3, 1.5, 0.7, 2.0
    row = form_clusters(graph, eta=eta, tau_a=tau_a, B=B, gamma=gamma, loss=loss).candidates.iloc[0]
    lowest = np.linalg.eigvalsh(mixing.metropolis(graph))[0]
    top = gamma + 1 + (1 - lowest) / eta + tau_a * B * math.sqrt(5)
    right = (5 * loss + 0.1 * tau_a * eta**2 * top / 2) / (eta - eta**2 * top / 2)
    assert row["score"] == pytest.approx(right)


def test_heterogeneity_scores():
    assert optimizer_score([("sgd", 0, 0)] * 4) == 0
    mixed = optimizer_score([("sgd", 0.0, 0.0), ("momentum", 0.0, 0.8)])
    assert mixed == pytest.approx((0.5 + 0.4) / 3 * 0.2)
    one, other = np.zeros(10, int), np.ones(10, int)
    assert pair_divergence((one, other), None) == pytest.approx(1.0)
    assert pair_divergence((one, one), None) == pytest.approx(0.0)
    x = np.random.default_rng(0).random((64, 7))
    assert energy_distance(x, x) == pytest.approx(0.0, abs=1e-12)
    assert energy_distance(x, x + 1) > 1


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"rule": "best"}, "rule='best': allowed: sound, literal"),
        ({"accept": "last"}, "accept='last': allowed: first, score, cycle"),
        ({"speed": 1}, "unknown rule"),
        ({"eta": 0.0}, "eta=0.0"),
        ({"eta": float("nan")}, "eta=nan"),
        ({"B": -1.0}, "B=-1.0"),
        ({"labels": [np.zeros(3, int)]}, "labels: 1 entries for 4 devices"),
        ({"accept": "cycle"}, "needs gradients"),
    ],
)
def test_bad_input_is_one_line(options, text):
    with pytest.raises(ValueError, match=text.split("=")[0]) as caught:
        form_clusters(nx.complete_graph(4), **options)
    assert text in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="undirected"):
        form_clusters(nx.DiGraph([(0, 1)]))


@settings(deadline=None, max_examples=40)
@given(n=st.integers(5, 40), k=st.integers(2, 3), seed=st.integers(0, 10**6))
def test_small_worlds_have_the_asked_links(n, k, seed):
    graph = topology.small_world(n, k, 0.2, seed=seed)
    regular = topology.small_world(n, k, 0.0, seed=seed)
    assert graph.number_of_edges() == regular.number_of_edges()
    degrees = [d for _, d in regular.degree]
    assert max(degrees) <= k
    assert sum(d < k for d in degrees) <= (3 if k == 3 else 0)
    assert nx.is_connected(regular)


@settings(deadline=None, max_examples=40)
@given(n=st.integers(1, 30), p=st.floats(0, 0.3), seed=st.integers(0, 10**6))
def test_bridges_are_the_fewest_links_that_connect(n, p, seed):
    graph = random_graph(n, p, seed)
    joined = topology.bridged(graph, seed=seed)
    parts = nx.number_connected_components(graph)
    assert nx.is_connected(joined)
    assert joined.number_of_edges() == graph.number_of_edges() + parts - 1
    assert set(map(frozenset, graph.edges)) <= set(map(frozenset, joined.edges))
