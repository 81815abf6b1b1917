import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedscale.graphs import mixing, topology
from fedscale.merge.mean import mean_merge


@given(st.integers(1, 8), st.lists(st.integers(0, 4), max_size=3), st.integers(0, 1000))
@settings(deadline=None, max_examples=40)
def test_it_is_the_weighted_sum_over_clients(clients, shape, seed):
    rng = np.random.default_rng(seed)
    weights = rng.dirichlet(np.ones(clients), size=3)
    received = rng.normal(size=(clients, *shape))
    merged = mean_merge(weights, torch.from_numpy(received))
    expected = sum(
        weights[:, u].reshape(-1, *[1] * len(shape)) * received[u] for u in range(clients)
    )
    assert merged.shape == (3, *shape)
    assert np.allclose(merged.numpy(), expected, atol=1e-13)


def test_idle_and_isolated_clients_keep_their_state_bit_for_bit():
    torch.manual_seed(0)
    graph = topology.build("ring", 6, seed=0)
    active = np.array([True, False, True, True, False, True])
    weights = mixing.metropolis(topology.induced(graph, active))
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        received = (torch.randn(6, 3, 5) * 1e3).to(dtype)
        merged = mean_merge(weights, received)
        assert merged.dtype == dtype
        for client in (1, 4):
            assert torch.equal(merged[client], received[client])


def test_gossip_keeps_the_average_and_the_complete_graph_reaches_it():
    received = torch.randn(7, 4, dtype=torch.float64)
    for name, params in (("ring", {}), ("erdos_renyi", {"probability": 0.5})):
        weights = mixing.metropolis(topology.build(name, 7, seed=3, **params))
        assert torch.allclose(mean_merge(weights, received).mean(0), received.mean(0), atol=1e-14)
    complete = mixing.metropolis(topology.build("complete", 7, seed=0))
    merged = mean_merge(torch.from_numpy(complete), received)
    assert torch.allclose(merged, received.mean(0).expand(7, 4), atol=1e-14)


def test_blocks_of_rows_are_rows_of_the_whole():
    weights = mixing.metropolis(topology.build("grid", 12, seed=0))
    received = torch.randn(12, 5)
    whole = mean_merge(weights, received)
    parts = torch.cat([mean_merge(weights[:5], received), mean_merge(weights[5:], received)])
    assert torch.allclose(whole, parts, atol=1e-6)


def test_bad_input_is_named():
    received = torch.zeros(3, 2)
    with pytest.raises(ValueError, match=r"weights \(2, 2\) and received \(3, 2\)"):
        mean_merge(np.eye(2), received)
    with pytest.raises(ValueError, match=r"row 1 sums to 1\.5, not to 1"):
        mean_merge(np.diag([1.0, 1.5, 1.0]), received)
    with pytest.raises(ValueError, match="row 0 sums to nan"):
        mean_merge(np.full((1, 3), np.nan), received)
    for bad in (float("nan"), float("inf")):
        received[2, 1] = bad
        with pytest.raises(ValueError, match="client 2 is not finite"):
            mean_merge(np.eye(3), received)
