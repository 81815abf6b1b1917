import itertools

import numpy as np
import pytest

from fedscale.graphs import mixing, topology
from fedscale.regimes import gossip

BASE = {
    "clients": 12,
    "rounds": 7,
    "eval_every": 3,
    "graph": "regular",
    "degree": 3,
    "seed": 5,
}


def stream(**changes):
    return list(gossip.steps(**{**BASE, **changes}))


def edges(step):
    off = step.weights - np.diag(np.diagonal(step.weights))
    return {(int(u), int(v)) for u, v in np.argwhere(off > 0)}


def same(one, other):
    return (
        (one.round, one.phase, one.train, one.measure)
        == (other.round, other.phase, other.train, other.measure)
        and np.array_equal(one.active, other.active)
        and np.array_equal(one.weights, other.weights)
    )


def test_rounds_count_from_one_and_the_last_is_measured():
    steps = stream()
    assert [step.round for step in steps] == [1, 2, 3, 4, 5, 6, 7]
    assert [step.round for step in steps if step.measure] == [3, 6, 7]
    assert all(step.train and step.active.all() and step.phase == "gossip" for step in steps)
    assert [step.round for step in stream(eval_every=100) if step.measure] == [7]


@pytest.mark.parametrize("graph", topology.TOPOLOGIES)
def test_every_round_is_doubly_stochastic(graph):
    for step in stream(graph=graph, link_drop=0.3, participation=0.7):
        assert np.array_equal(step.weights, step.weights.T)
        assert np.abs(step.weights.sum(axis=1) - 1).max() < 1e-12


@pytest.mark.parametrize("graph", ["ring", "grid", "regular", "erdos_renyi"])
def test_resample_redraws_and_otherwise_the_graph_stays(graph):
    fresh = stream(graph=graph)
    assert len({frozenset(edges(step)) for step in fresh}) > 4
    assert len({frozenset(edges(step)) for step in stream(graph=graph, resample=False)}) == 1
    shapes = {tuple(sorted(np.diagonal(step.weights).round(9))) for step in fresh}
    assert (len(shapes) == 1) == (graph != "erdos_renyi")


@pytest.mark.parametrize("start", [1, 4, 7, 8])
def test_a_stream_that_starts_late_is_the_tail_of_the_whole(start):
    options = {"link_drop": 0.3, "participation": 0.5}
    whole, late = stream(**options), stream(**options, start_round=start)
    assert len(late) == 8 - start
    assert all(same(*pair) for pair in zip(whole[start - 1 :], late, strict=True))


def test_the_stream_depends_on_the_seed_alone():
    options = {"link_drop": 0.3, "participation": 0.5}
    one, again, other = (stream(**options, seed=seed) for seed in (5, 5, 6))
    assert all(same(*pair) for pair in zip(one, again, strict=True))
    assert not any(same(*pair) for pair in zip(one, other, strict=True))


def test_a_longer_run_begins_like_a_shorter_one():
    short, long = stream(), stream(rounds=20)
    assert all(np.array_equal(a.weights, b.weights) for a, b in zip(short, long[:7], strict=True))


@pytest.mark.parametrize(
    ("participation", "sampled"), [(1.0, 12), (0.5, 6), (0.2, 2), (0.29, 3), (1e-9, 1), (0.97, 12)]
)
def test_participation_samples_a_fraction_of_the_clients(participation, sampled):
    for step in stream(participation=participation):
        assert step.active.sum() == sampled


def test_the_papers_ten_of_fifty():
    steps = stream(clients=50, degree=5, participation=0.2, rounds=100, eval_every=100)
    counts = sum(step.active.astype(int) for step in steps)
    assert {int(step.active.sum()) for step in steps} == {10}
    # Each client is drawn 20 times of 100 on average, standard deviation 4.
    assert np.abs(counts - 20).max() < 20


def test_idle_clients_keep_everything_and_active_ones_mix_in_the_induced_subgraph():
    full = stream()
    for whole, part in zip(full, stream(participation=0.5), strict=True):
        idle = ~part.active
        assert np.array_equal(part.weights[idle], np.eye(12)[idle])
        assert np.array_equal(part.weights[:, idle], np.eye(12)[:, idle])
        inside = {(u, v) for u, v in edges(whole) if part.active[u] and part.active[v]}
        assert edges(part) == inside
        active = np.flatnonzero(part.active)
        block = part.weights[np.ix_(active, active)]
        assert np.abs(block.sum(axis=1) - 1).max() < 1e-12


def test_link_drop_removes_edges_independently_per_round():
    full, dropped = stream(rounds=150), stream(rounds=150, link_drop=0.4)
    kept = [len(edges(d)) / len(edges(f)) for f, d in zip(full, dropped, strict=True)]
    assert all(edges(d) <= edges(f) for f, d in zip(full, dropped, strict=True))
    # 18 edges per round, 150 rounds: standard deviation of the mean 0.01.
    assert abs(np.mean(kept) - 0.6) < 0.04
    still = [edges(step) for step in stream(graph="complete", link_drop=0.4, resample=False)]
    assert all(a != b for a, b in itertools.pairwise(still))
    assert all(np.array_equal(step.weights, np.eye(12)) for step in stream(link_drop=1.0))


def test_resample_asks_for_connected_draws():
    loose = stream(degree=2, rounds=40)
    tight = stream(degree=2, rounds=40, connect="resample")
    assert max(mixing.mixing_factor(step.weights) for step in loose) > 1 - 1e-9
    assert max(mixing.mixing_factor(step.weights) for step in tight) < 1 - 1e-3


def test_a_single_client_is_a_legal_run():
    for step in stream(clients=1, graph="complete"):
        assert np.array_equal(step.weights, np.ones((1, 1)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"clients": 11}, r"graph\.degree=3: regular on 11 clients takes an even number"),
        ({"rounds": 0}, "rounds=0"),
        ({"eval_every": 0}, "eval_every=0"),
        ({"start_round": 0}, "start_round=0"),
        ({"start_round": 9}, "start_round=9: allowed are rounds from 1 to 8"),
        ({"link_drop": 1.5}, r"graph\.link_drop=1\.5"),
        ({"link_drop": float("nan")}, r"graph\.link_drop=nan"),
        ({"participation": 0.0}, r"graph\.participation=0\.0"),
        ({"participation": 10}, r"graph\.participation=10"),
        ({"participation": float("nan")}, r"graph\.participation=nan"),
    ],
)
def test_bad_settings_are_refused_at_the_call(changes, message):
    with pytest.raises(ValueError, match=message):
        gossip.steps(**{**BASE, **changes})
