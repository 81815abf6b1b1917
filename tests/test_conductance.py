"""Conductance, spectrum and Fiedler order against brute force, networkx and dense algebra."""

import itertools
import math

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse import csr_array

from fedscale.graphs import conductance as cond
from fedscale.graphs import fiedler, mixing

SEEDS = st.integers(0, 10**6)


def brute(A):
    """Equations (2), (3) as they stand, over every proper non-empty subset."""
    n, best, volume = len(A), math.inf, A.sum(1)
    for size in range(1, n):
        for chosen in itertools.combinations(range(n), size):
            inside = np.isin(range(n), chosen)
            smaller = min(volume[inside].sum(), volume[~inside].sum())
            if smaller > 0:
                best = min(best, A[np.ix_(inside, ~inside)].sum() / smaller)
    return best


def networkxs(A):
    """The graph of A for networkx, which counts a self-loop twice in volumes."""
    return nx.from_numpy_array(A - np.diag(np.diagonal(A)) / 2)


def connected_graphs(sizes, count, p=(0.2, 0.9)):
    """`count` connected random graphs whose size and density vary."""
    rng = np.random.default_rng(0)
    while count:
        graph = nx.gnp_random_graph(
            int(rng.choice(sizes)), rng.uniform(*p), seed=int(rng.integers(2**31))
        )
        if nx.is_connected(graph):
            count -= 1
            yield graph


def relabelled(graph):
    return nx.convert_node_labels_to_integers(graph)


def noisy(A, rng):
    noise = np.triu(rng.normal(size=A.shape) * 1e-15) * (A > 0)
    return A + noise + noise.T


@settings(deadline=None, max_examples=150)
@given(n=st.integers(1, 8), p=st.floats(0.1, 1), seed=SEEDS, lazy=st.booleans())
def test_exact_conductance_is_brute_forces_and_networkxs(n, p, seed, lazy):
    graph = nx.gnp_random_graph(n, p, seed=seed)
    A = mixing.metropolis(graph, lazy)
    found = cond.conductance(A)
    if n == 1 or not nx.is_connected(graph):
        assert found == 0
        return
    assert found == pytest.approx(brute(A), abs=1e-12)
    other = networkxs(A)
    subsets = (c for size in range(1, n // 2 + 1) for c in itertools.combinations(range(n), size))
    assert found == pytest.approx(min(nx.conductance(other, c, weight="weight") for c in subsets))
    if not lazy:
        assert cond.conductance(graph) == found
        assert 2 * cond.conductance(mixing.metropolis(graph, True)) == pytest.approx(found)


@settings(deadline=None, max_examples=100)
@given(n=st.integers(2, 7), seed=SEEDS, scale=st.sampled_from([1e-6, 1.0, 1e6]))
def test_conductance_of_any_weights_with_self_loops(n, seed, scale):
    rng = np.random.default_rng(seed)
    A = np.triu(rng.random((n, n)) * (rng.random((n, n)) < 0.6))
    A = (A + A.T) * scale
    if not cond.connected(A):
        assert cond.conductance(A) == 0
        return
    found = cond.conductance(A, "exact")
    assert found == pytest.approx(brute(A))
    assert cond.cheeger_bound(A) <= found + 1e-12
    assert found <= cond.conductance(A, "sweep") + 1e-12
    sweep = cond.cuts(A, fiedler.spectrum(A).order).min()
    assert sweep**2 / 2 <= 2 * cond.cheeger_bound(A) + 1e-12, "Cheeger holds for the sweep itself"


def test_cheeger_holds_on_every_connected_graph_of_up_to_7_nodes():
    graphs = [g for g in nx.graph_atlas_g() if len(g) > 1 and nx.is_connected(g)]
    assert len(graphs) == 995
    for graph in graphs:
        for lazy in (False, True):
            A = mixing.metropolis(graph, lazy)
            gap = 1 - np.linalg.eigvalsh(A)[-2]
            phi = cond.conductance(A)
            assert phi**2 / 2 - 1e-12 <= gap <= 2 * phi + 1e-12
            assert cond.cheeger_bound(A) == pytest.approx(gap / 2, abs=1e-12)


def test_cheeger_holds_on_connected_graphs_of_up_to_14_nodes_and_sweeps_are_above():
    for graph in connected_graphs(range(8, 15), 150):
        A = mixing.metropolis(graph)
        phi, gap = cond.conductance(A), 1 - np.linalg.eigvalsh(A)[-2]
        assert phi**2 / 2 - 1e-12 <= gap <= 2 * phi + 1e-12
        assert phi <= cond.conductance(A, "sweep") + 1e-12


def test_known_values():
    for n in range(2, 15):
        assert cond.conductance(nx.complete_graph(n)) == pytest.approx(math.ceil(n / 2) / n)
    for n in range(4, 15):
        assert cond.conductance(nx.cycle_graph(n)) == pytest.approx(2 / 3 / (n // 2))
    # Above 14 nodes the sweep finds the best cut of these.
    assert cond.conductance(nx.cycle_graph(40)) == pytest.approx(2 / 3 / 20)
    assert cond.conductance(nx.barbell_graph(10, 0)) == pytest.approx(1 / 11 / 10)
    assert cond.conductance(nx.complete_graph(17), "exact") == pytest.approx(9 / 17)
    for alone in (np.ones((1, 1)), np.zeros((1, 1)), np.eye(3), np.zeros((3, 3))):
        assert cond.conductance(alone) == 0
    assert cond.conductance(nx.disjoint_union(nx.cycle_graph(9), nx.cycle_graph(9))) == 0


def test_noise_between_components_is_no_link():
    A = np.kron(np.eye(2), np.full((5, 5), 0.2))
    noise = np.random.default_rng(0).normal(size=A.shape) * 1e-15
    assert cond.conductance(A + noise + noise.T) == 0
    assert cond.conductance(csr_array(A + noise + noise.T)) == 0
    A[0, 9] = A[9, 0] = 1e-6
    assert cond.conductance(A) == pytest.approx(1e-6 / 5, rel=1e-4)


def test_one_more_link_can_lower_conductance():
    lowered = 0
    for graph in connected_graphs([6], 20):
        phi = cond.conductance(graph)
        for edge in nx.non_edges(graph):
            more = graph.copy()
            more.add_edge(*edge)
            lowered += cond.conductance(more) < phi - 1e-9
    assert lowered > 0


@settings(deadline=None, max_examples=50)
@given(n=st.integers(2, 22), p=st.floats(0.1, 1), seed=SEEDS)
def test_prefixes_are_networkxs(n, p, seed):
    graph = nx.gnp_random_graph(n, p, seed=seed)
    A = mixing.metropolis(graph)
    order = np.random.default_rng(seed).permutation(n)
    sizes = range(1, n)
    for weights in (A, csr_array(A)):
        whole = cond.whole_prefixes(weights, order)
        for size, ratio in zip(sizes, cond.cuts(weights, order), strict=True):
            first, second = set(order[:size].tolist()), set(order[size:].tolist())
            cut = nx.cut_size(networkxs(A), first, weight="weight")
            assert ratio == pytest.approx(cut / min(size, n - size), abs=1e-12)
            assert whole[size - 1] == all(
                nx.is_connected(graph.subgraph(part)) for part in (first, second)
            )
        assert cond.connected(weights) == nx.is_connected(graph)


def zoo():
    """Graphs with a multiple λ₂ or symmetries, on both sides of the 200 nodes of Lanczos."""
    small = {
        "cycle": nx.cycle_graph(12),
        "grid": nx.grid_2d_graph(3, 4),
        "square grid": nx.grid_2d_graph(4, 4),
        "complete": nx.complete_graph(9),
        "star": nx.star_graph(8),
        "cube": nx.hypercube_graph(4),
        "cliques": nx.ring_of_cliques(6, 5),
        "three paths": nx.disjoint_union_all([nx.path_graph(4)] * 3),
        "petersen": nx.petersen_graph(),
        "path": nx.path_graph(9),
    }
    large = {
        "large cycle": nx.cycle_graph(210),
        "large grid": nx.grid_2d_graph(15, 15),
        "large complete": nx.complete_graph(205),
        "large star": nx.star_graph(220),
        "large cliques": nx.ring_of_cliques(24, 10),
        "large torus": nx.grid_2d_graph(15, 15, periodic=True),
        "two large cycles": nx.disjoint_union(nx.cycle_graph(105), nx.cycle_graph(110)),
        "tree": nx.balanced_tree(2, 7),
        "random": nx.gnp_random_graph(300, 0.03, seed=1),
        "long path": nx.path_graph(400),
    }
    return [(name, relabelled(graph)) for name, graph in {**small, **large}.items()]


@pytest.mark.parametrize(("name", "graph"), zoo(), ids=[name for name, _ in zoo()])
def test_noise_changes_neither_order_nor_spectrum(name, graph):
    A = mixing.metropolis(graph)
    found, rng = fiedler.spectrum(A), np.random.default_rng(0)
    values = np.linalg.eigvalsh(A)
    assert (found.lambda2, found.lambda_min) == pytest.approx((values[-2], values[0]), abs=1e-11)
    assert sorted(found.order) == list(range(len(A)))
    for trial in range(5):
        again = fiedler.spectrum(noisy(A, rng) if trial else csr_array(A))
        assert again.order.tolist() == found.order.tolist()


def projected(A):
    """The rule for the order, from the dense eigenvectors orthogonal to the constant one."""
    n = len(A)
    index = np.arange(n) - (n - 1) / 2
    values, vectors = np.linalg.eigh(A - 2 * np.ones((n, n)) / n)
    space = vectors[:, np.abs(values - values[-1]) < 1e-9]
    vector = space @ space.T @ index
    assert np.linalg.norm(vector) > 1e-6
    vector = np.round(vector / np.linalg.norm(vector), 9)
    return sorted(range(n), key=lambda i: (vector[i], i)), space.shape[1]


def test_the_order_is_the_projection_of_the_index():
    multiple = 0
    for name, graph in zoo():
        if len(graph) > 250 or name == "three paths":
            continue
        right, dimension = projected(mixing.metropolis(graph))
        found = fiedler.spectrum(mixing.metropolis(graph)).order.tolist()
        if dimension > 1:
            multiple += 1
            assert found == right, name
    assert multiple > 8
    for n in (5, 30, 210):  # all eigenvectors but the constant one belong to λ₂ = 0
        A = mixing.metropolis(nx.complete_graph(n))
        assert fiedler.spectrum(A).order.tolist() == list(range(n))


def test_an_eigenspace_orthogonal_to_the_index_still_has_an_order():
    # Two cliques whose numbers are symmetric about the middle: the index says nothing about λ₂.
    graph = nx.Graph()
    for clique in ((0, 1, 6, 7), (2, 3, 4, 5)):
        graph.add_edges_from(itertools.combinations(clique, 2))
    graph.add_edges_from([(0, 2), (7, 5)])
    A = mixing.metropolis(nx.relabel_nodes(graph, {i: i for i in range(8)}))
    rng = np.random.default_rng(0)
    orders = {tuple(fiedler.spectrum(noisy(A, rng)).order.tolist()) for _ in range(20)}
    assert len(orders) == 1
    order = orders.pop()
    assert set(order[4:]) == {0, 1, 6, 7}, "node 0 is on the positive side"


def test_where_the_second_eigenvalue_is_simple_labels_do_not_matter():
    rng, tried = np.random.default_rng(0), 0
    for graph in connected_graphs([*range(5, 16), 230], 120, p=(0.15, 0.6)):
        A = mixing.metropolis(graph)
        values, vectors = np.linalg.eigh(A)
        vector = np.sort(vectors[:, -2])
        if values[-2] - values[-3] < 1e-5 or np.diff(vector).min() < 1e-7:
            continue
        tried += 1
        order, place = fiedler.spectrum(A).order, rng.permutation(len(A))
        moved = np.empty_like(A)
        moved[np.ix_(place, place)] = A
        assert fiedler.spectrum(moved).order.tolist() == place[order].tolist()
    assert tried > 40


def test_large_graphs_are_measured_as_small_ones(monkeypatch):
    graphs = [
        relabelled(nx.ring_of_cliques(23, 10)),
        *connected_graphs([250, 300], 4, p=(0.03, 0.1)),
        nx.barbell_graph(120, 3),
    ]
    for graph in graphs:
        A = csr_array(mixing.metropolis(graph))
        found = fiedler.spectrum(A)
        with monkeypatch.context() as patch:
            patch.setattr(fiedler, "LANCZOS", 10**6)
            right = fiedler.spectrum(A)
        assert found.order.tolist() == right.order.tolist()
        assert found.lambda2 == pytest.approx(right.lambda2, abs=1e-11)
        assert found.lambda_min == pytest.approx(right.lambda_min, abs=1e-11)
        phi = cond.conductance(A)
        assert (1 - right.lambda2) / 2 - 1e-12 <= phi
        assert phi**2 / 2 <= 1 - right.lambda2 + 1e-12


def broken(values):
    return np.array(values, dtype=float)


@pytest.mark.parametrize(
    ("A", "method", "text"),
    [
        (broken([[0, 1], [1, 0]]), "best", "method='best': allowed: auto, exact, sweep"),
        (np.ones((21, 21)), "exact", "method='exact': 21 nodes"),
        (broken([[0, 1, 2]]), "auto", "A: shape (1, 3)"),
        (broken([1, 2]), "auto", "A: shape (2,)"),
        (np.zeros((0, 0)), "auto", "A: shape (0, 0)"),
        (broken([[0, np.nan], [np.nan, 0]]), "auto", "A: allowed are finite"),
        (broken([[0, 1e308], [1e308, 1e308]]), "auto", "A: allowed are finite"),
        (broken([[0, 1], [2, 0]]), "auto", "A: allowed are symmetric"),
        (broken([[0, -1], [-1, 0]]), "auto", "A: allowed are symmetric"),
        (csr_array(broken([[0, 1], [2, 0]])), "auto", "A: allowed are symmetric"),
        (nx.empty_graph(0), "auto", "A=Graph with 0 nodes"),
        (nx.DiGraph([(0, 1)]), "auto", "undirected"),
    ],
)
def test_bad_input_is_one_line(A, method, text):
    with pytest.raises(ValueError) as caught:
        cond.conductance(A, method)
    assert text in str(caught.value) and "\n" not in str(caught.value)
