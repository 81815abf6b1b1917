import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedscale.graphs import topology

SEEDS = st.integers(0, 2**32)


@given(st.integers(1, 60), SEEDS)
@settings(deadline=None, max_examples=40)
def test_every_topology_has_the_nodes_in_order_and_no_self_loops(n, seed):
    for name in ("ring", "grid", "complete"):
        graph = topology.build(name, n, seed=seed)
        assert list(graph) == list(range(n))
        assert nx.number_of_selfloops(graph) == 0
        assert nx.is_connected(graph)


def test_ring_grid_and_complete_are_what_the_paper_describes():
    ring = topology.build("ring", 6, seed=0)
    assert nx.is_isomorphic(ring, nx.cycle_graph(6))
    for n, rows in ((50, 5), (40, 5), (36, 6), (7, 1), (2, 1)):
        grid = topology.build("grid", n, seed=0)
        assert nx.is_isomorphic(grid, nx.grid_2d_graph(rows, n // rows))
    assert topology.build("complete", 9, seed=0).number_of_edges() == 36


@given(st.integers(2, 40), st.data())
@settings(deadline=None, max_examples=40)
def test_regular_gives_every_node_its_degree(n, data):
    degree = data.draw(st.integers(1, n - 1).filter(lambda d: n * d % 2 == 0 or n == 2))
    graph = topology.build("regular", n, seed=data.draw(SEEDS), degree=degree)
    assert list(graph) == list(range(n))
    assert {d for _, d in graph.degree} == {degree}


@pytest.mark.timeout(20)
def test_dense_regular_graphs_do_not_hang():
    for degree in (40, 45, 48, 49):
        graph = topology.build("regular", 50, seed=1, degree=degree)
        assert {d for _, d in graph.degree} == {degree}


def test_regular_draws_every_pair_equally_often():
    counts = sum(
        nx.to_numpy_array(topology.build("regular", 8, seed=seed, degree=3)) for seed in range(700)
    )
    # Each pair is an edge with probability 3/7: 300 of 700, standard deviation 13.
    assert np.abs(counts[np.triu_indices(8, 1)] - 300).max() < 65


def test_erdos_renyi_has_the_expected_degree():
    edges = [
        topology.build("erdos_renyi", 50, seed=seed, degree=5).number_of_edges()
        for seed in range(200)
    ]
    assert abs(np.mean(edges) - 125) < 4
    empty = topology.build("erdos_renyi", 5, seed=0, probability=0.0)
    assert (len(empty), empty.number_of_edges()) == (5, 0)
    assert topology.build("erdos_renyi", 5, seed=0, probability=1.0).number_of_edges() == 10
    assert topology.build("erdos_renyi", 5, seed=0, probability=1.0, degree=1).size() == 10


def test_equal_seeds_give_equal_graphs_and_others_differ():
    for name in topology.TOPOLOGIES:
        if name in ("ring", "grid", "complete"):
            continue
        one, same, other = (
            sorted(topology.build(name, 30, seed=seed, degree=4).edges) for seed in (1, 1, 2)
        )
        assert one == same
        assert one != other


def test_connected_redraws_or_says_that_it_cannot():
    # Two-regular graphs on 12 nodes are unions of cycles, often more than one.
    alone = [topology.build("regular", 12, seed=s, degree=2) for s in range(30)]
    assert not all(nx.is_connected(graph) for graph in alone)
    for seed in range(30):
        assert nx.is_connected(topology.build("regular", 12, seed=seed, degree=2, connected=True))
    with pytest.raises(ValueError, match=r"graph\.connect=resample: none of 100 draws"):
        topology.build("erdos_renyi", 30, seed=0, probability=0.01, connected=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("regular", 5, {"degree": 3}), "graph.degree=3: regular on 5 clients takes an even"),
        (("regular", 4, {"degree": 4}), "graph.degree=4: regular on 4 clients takes a whole"),
        (("regular", 4, {"degree": 9}), "from 1 to 3"),
        (("regular", 4, {"degree": 0}), "graph.degree=0"),
        (("regular", 4, {"degree": -2}), "graph.degree=-2"),
        (("regular", 4, {"degree": 1.5}), "graph.degree=1.5"),
        (("regular", 4, {"degree": float("nan")}), "graph.degree=nan"),
        (("regular", 4, {"degree": float("inf")}), "graph.degree=inf"),
        (("regular", 4, {}), "graph.degree=None"),
        (("regular", 1, {"degree": 1}), "data.clients=1"),
        (("erdos_renyi", 10, {}), "graph.degree=None"),
        (("erdos_renyi", 10, {"degree": 10}), "graph.degree=10: erdos_renyi on 10"),
        (("erdos_renyi", 10, {"degree": float("nan")}), "graph.degree=nan"),
        (("erdos_renyi", 10, {"probability": 1.5}), "graph.probability=1.5"),
        (("erdos_renyi", 10, {"probability": float("nan")}), "graph.probability=nan"),
        (("watts_strogatz", 3, {}), "data.clients=3: graph.name=watts_strogatz needs more than 3"),
        (("watts_strogatz", 9, {"neighbours": 9}), "data.clients=9"),
        (("watts_strogatz", 9, {"neighbours": 2.5}), "graph.neighbours=2.5"),
        (("watts_strogatz", 9, {"neighbours": -1}), "graph.neighbours=-1"),
        (("watts_strogatz", 9, {"rewiring": 1.5}), "graph.rewiring=1.5"),
        (("watts_strogatz", 9, {"rewiring": float("nan")}), "graph.rewiring=nan"),
        (("random_geometric", 9, {"radius": -0.1}), "graph.radius=-0.1"),
        (("random_geometric", 9, {"radius": float("nan")}), "graph.radius=nan"),
        (("random_geometric", 9, {"radius": float("inf")}), "graph.radius=inf"),
        (("barabasi_albert", 9, {"attachments": 9}), "graph.attachments=9: barabasi_albert on 9"),
        (("barabasi_albert", 9, {"attachments": 0}), "graph.attachments=0"),
        (("barabasi_albert", 9, {"attachments": 1.5}), "graph.attachments=1.5"),
        (("star", 10, {}), "graph.name='star' is unknown; allowed: ring, grid"),
        (("ring", 0, {}), "data.clients=0"),
    ],
)
def test_impossible_graphs_are_refused_in_one_line(arguments, message):
    name, n, params = arguments
    for call in (topology.check, lambda *a, **k: topology.build(*a, seed=0, **k)):
        with pytest.raises(ValueError) as error:
            call(name, n, **params)
        assert message in str(error.value)
        assert "\n" not in str(error.value)


def test_settings_of_other_topologies_are_ignored():
    others = {"degree": 99, "probability": 7.0, "radius": -1, "neighbours": 99, "rewiring": 7}
    for name in ("ring", "grid", "complete"):
        topology.check(name, 5, attachments=99, **others)


def test_permuted_keeps_the_shape_and_moves_the_clients():
    grid = topology.build("grid", 12, seed=0)
    moved = [topology.permuted(grid, seed) for seed in range(5)]
    assert all(nx.is_isomorphic(grid, graph) for graph in moved)
    assert all(list(graph) == list(range(12)) for graph in moved)
    assert len({tuple(sorted(graph.edges)) for graph in moved}) > 1


def test_drop_links_fails_each_edge_with_its_probability_and_keeps_the_nodes():
    graph = topology.build("complete", 10, seed=0)
    kept = [topology.drop_links(graph, 0.4, seed=s).number_of_edges() for s in range(300)]
    # 45 edges, 27 kept on average, standard deviation of the mean 0.19.
    assert abs(np.mean(kept) - 27) < 1
    assert sorted(topology.drop_links(graph, 0.0, seed=0).edges) == sorted(graph.edges)
    empty = topology.drop_links(graph, 1.0, seed=0)
    assert (list(empty), empty.number_of_edges()) == (list(range(10)), 0)
    shuffled = nx.Graph(reversed([(v, u) for u, v in graph.edges]))
    one, same = (sorted(topology.drop_links(g, 0.4, seed=3).edges) for g in (graph, shuffled))
    assert one == same
    for bad in (-0.1, 1.1, float("nan")):
        with pytest.raises(ValueError, match=r"graph\.link_drop="):
            topology.drop_links(graph, bad, seed=0)


def test_induced_keeps_the_edges_between_active_clients_only():
    graph = topology.build("complete", 6, seed=0)
    active = np.array([True, False, True, True, False, False])
    assert sorted(topology.induced(graph, active).edges) == [(0, 2), (0, 3), (2, 3)]
    assert len(topology.induced(graph, active)) == 6


@given(st.integers(1, 40), st.integers(1, 4), SEEDS)
@settings(deadline=None, max_examples=40)
def test_preferential_attachment_adds_its_edges_per_node(n, attachments, seed):
    if attachments >= max(n, 2):
        return
    graph = topology.build("barabasi_albert", n, seed=seed, attachments=attachments)
    assert list(graph) == list(range(n)) and nx.is_connected(graph)
    # A star of m + 1 nodes to begin with, then m edges for every node that joins.
    assert graph.number_of_edges() == (attachments * (n - attachments) if n > 1 else 0)
    if attachments == 1:
        assert nx.is_tree(topology.build("barabasi_albert", n, seed=seed))


def test_preferential_attachment_prefers_high_degrees():
    largest = [
        max(dict(topology.build("barabasi_albert", 60, seed=seed).degree).values())
        for seed in range(40)
    ]
    uniform = [
        max(dict(nx.random_labeled_tree(60, seed=seed).degree).values()) for seed in range(40)
    ]
    assert np.mean(largest) > 2 * np.mean(uniform)


def test_random_geometric_graphs_grow_with_their_radius():
    sizes = [
        topology.build("random_geometric", 30, seed=3, radius=radius).number_of_edges()
        for radius in (0, 0.1, 0.2, 0.5, 2)
    ]
    assert sizes == sorted(sizes) and sizes[0] == 0 and sizes[-1] == 30 * 29 // 2
    default = topology.build("random_geometric", 30, seed=3)
    assert default.number_of_edges() == sizes[2]
    # E = pairs × share of the square within 0.2: π r² − 8/3 r³ + r⁴/2 = 0.1059.
    mean = np.mean(
        [topology.build("random_geometric", 30, seed=s).number_of_edges() for s in range(200)]
    )
    assert abs(mean - 435 * 0.1059) < 3


@given(st.integers(2, 60), st.integers(0, 9), SEEDS)
@settings(deadline=None, max_examples=80)
def test_small_worlds_have_the_asked_neighbours_odd_ones_too(n, k, seed):
    if k >= n:
        return
    regular = topology.small_world(n, k, 0.0, seed=seed)
    degrees = sorted(d for _, d in regular.degree)
    short = 1 if n * k % 2 else 0
    assert degrees == [k - 1] * short + [k] * (n - short)
    assert nx.is_connected(regular) or k < 2
    for u, v in regular.edges:
        assert min(v - u, n - v + u) <= max(k // 2, 2 * (k // 2) + 1), "links are short"
    rewired = topology.small_world(n, k, 0.5, seed=seed)
    assert list(rewired) == list(range(n))
    assert rewired.number_of_edges() == regular.number_of_edges()
    assert nx.number_of_selfloops(rewired) == 0


def test_small_worlds_are_networkxs_where_neighbours_are_even_and_rewire_their_share():
    for k in (2, 4, 6):
        ours, theirs = topology.small_world(20, k, 0, seed=0), nx.watts_strogatz_graph(20, k, 0)
        assert sorted(ours.edges) == sorted(tuple(sorted(edge)) for edge in theirs.edges)
    regular = set(topology.small_world(60, 3, 0, seed=0).edges)
    moved = [
        len(regular - set(topology.build("watts_strogatz", 60, seed=seed).edges))
        for seed in range(100)
    ]
    # 90 links, each rewired with probability 0.2: 18, standard deviation of the mean 0.38.
    assert abs(np.mean(moved) - 18) < 2
    assert topology.build("watts_strogatz", 60, seed=1, rewiring=0.0).number_of_edges() == 90
    four = topology.build("watts_strogatz", 60, seed=1, neighbours=4, rewiring=0.0)
    assert {d for _, d in four.degree} == {4}


@given(st.integers(1, 30), st.floats(0, 0.3), SEEDS)
@settings(deadline=None, max_examples=40)
def test_connect_bridges_by_the_fewest_edges(n, p, seed):
    graph = nx.gnp_random_graph(n, p, seed=seed)
    joined = topology.connect(graph, "bridge", seed)
    parts = nx.number_connected_components(graph)
    assert nx.is_connected(joined)
    assert joined.number_of_edges() == graph.number_of_edges() + parts - 1
    assert set(map(frozenset, graph.edges)) <= set(map(frozenset, joined.edges))
    assert sorted(joined.edges) == sorted(topology.connect(graph, "bridge", seed).edges)
    assert topology.connect(graph, "allow", seed) is graph


def test_connect_resamples_until_connected():
    def draw(rng):
        return topology.build("erdos_renyi", 12, seed=rng, probability=0.2)

    apart = nx.empty_graph(12)
    drawn = [topology.connect(apart, "resample", seed, draw) for seed in range(10)]
    assert all(nx.is_connected(graph) for graph in drawn)
    assert len({tuple(sorted(graph.edges)) for graph in drawn}) > 1
    again = topology.connect(apart, "resample", 3, draw)
    assert sorted(again.edges) == sorted(drawn[3].edges)
    whole = nx.cycle_graph(12)
    assert topology.connect(whole, "resample", 0, draw) is whole
    for arguments, text in (
        (("join", 0), "graph.connect='join': allowed: allow, bridge, resample"),
        (("resample", 0), "needs a way to draw"),
        (("resample", 0, lambda rng: apart), "none of 100 draws on 12 clients"),
    ):
        with pytest.raises(ValueError) as error:
            topology.connect(apart, *arguments)
        assert text in str(error.value) and "\n" not in str(error.value)
