import numpy as np
import ot
import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedscale import metrics


def squared_distances(x, y):
    return np.square(x[:, None] - y[None]).sum(axis=2)


@given(st.integers(1, 7), st.integers(1, 7), st.integers(1, 5), st.integers(0, 10**6))
@settings(deadline=None, max_examples=60)
def test_w2_equals_the_linear_program(n, k, d, seed):
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(n, d)), rng.normal(size=(k, d)) + 1
    expected = ot.emd2(np.full(n, 1 / n), np.full(k, 1 / k), squared_distances(x, y))
    assert metrics.wasserstein2_squared(x, y) == pytest.approx(expected, rel=1e-9)
    a, b = rng.uniform(0.1, 3, size=n), rng.uniform(0.1, 3, size=k)
    expected = ot.emd2(a / a.sum(), b / b.sum(), squared_distances(x, y))
    assert metrics.wasserstein2_squared(x, y, a, b) == pytest.approx(expected, rel=1e-9)


@given(st.integers(1, 6), st.integers(1, 4), st.integers(0, 10**6))
@settings(deadline=None, max_examples=40)
def test_w2_is_a_metric_blind_to_order(n, d, seed):
    rng = np.random.default_rng(seed)
    x, y, z = rng.normal(size=(3, n, d))
    xy = metrics.wasserstein2_squared(x, y)
    assert metrics.wasserstein2_squared(x, rng.permutation(x)) == 0.0
    assert metrics.wasserstein2_squared(y, x) == pytest.approx(xy)
    assert metrics.wasserstein2_squared(rng.permutation(x), y) == pytest.approx(xy)
    distances = np.sqrt(
        [xy, metrics.wasserstein2_squared(y, z), metrics.wasserstein2_squared(x, z)]
    )
    assert distances[2] <= distances[:2].sum() + 1e-9
    shift = rng.normal(size=d)
    assert metrics.wasserstein2_squared(x, x + shift) == pytest.approx(np.square(shift).sum())


def test_w2_of_huge_and_of_equal_points():
    x = np.array([[0.0], [1e16], [3e16]])
    y = np.array([[1e16], [3e16]])
    # Masses 1/3 and 1/2: sixths of 1/6·4e32 and so on; the unscaled solver is not exact here.
    scaled = metrics.wasserstein2_squared(x / 1e16, y / 1e16)
    assert metrics.wasserstein2_squared(x, y) == pytest.approx(scaled * 1e32, rel=1e-12)
    assert metrics.wasserstein2_squared(np.zeros((3, 2)), np.zeros((5, 2))) == 0.0
    assert metrics.wasserstein2_squared(np.zeros((3, 2)), np.zeros((3, 2))) == 0.0


def test_w2_takes_tensors_of_any_float_type():
    x = torch.arange(6.0).reshape(3, 2)
    for dtype in (torch.float32, torch.bfloat16):
        value = metrics.wasserstein2_squared(x.to(dtype).requires_grad_(), (x + 1).to(dtype))
        assert value == 2.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([[np.nan]], [[0.0]]), "mu: allowed are finite values, found nan"),
        (([[0.0]], [[np.inf]]), "nu: allowed are finite values, found inf"),
        (([[0.0]], [[0.0, 1.0]]), "mu has width 1, nu 2"),
        (([0.0], [[0.0]]), r"mu: shape \(1,\)"),
        ((np.zeros((0, 2)), [[0.0, 1.0]]), r"mu: shape \(0, 2\)"),
        (([[0.0]], [[1.0]], [-1.0], [1.0]), "mu_weights=.*allowed are 1 numbers from 0"),
        (([[0.0]], [[1.0]], [1.0], [0.0]), "nu_weights="),
        (([[0.0]], [[1.0]], [1.0, 1.0], [1.0]), "mu_weights="),
        (([[0.0]], [[1.0]], [np.nan], [1.0]), "mu_weights"),
        (([[1e200]], [[-1e200]]), "squared distances overflow"),
    ],
)
def test_w2_refuses_what_solvers_swallow(arguments, message):
    with pytest.raises(ValueError, match=message):
        metrics.wasserstein2_squared(*arguments)


def test_consensus_is_zero_only_for_equal_prompt_sets():
    rng = np.random.default_rng(0)
    prompts = rng.normal(size=(4, 8))
    shuffled = np.stack([rng.permutation(prompts) for _ in range(6)])
    assert metrics.consensus_error(shuffled) == pytest.approx(0, abs=1e-28)
    assert metrics.consensus_error(np.zeros((3, 4, 2))) == 0.0
    shuffled[2, 0] += 1.0
    assert metrics.consensus_error(shuffled) > 0.1


@given(st.integers(1, 3), st.integers(1, 3), st.integers(0, 10**6))
@settings(deadline=None, max_examples=40)
def test_consensus_bounds_the_global_minimum_from_above(m, n, seed):
    prompts = np.random.default_rng(seed).normal(size=(m, n, 2))
    best = reference.consensus_error(prompts)
    found = [metrics.consensus_error(prompts, start=u) for u in range(m)]
    assert min(found) >= best - 1e-12
    if m <= 2 or n == 1:
        assert found == pytest.approx([best] * m, rel=1e-9, abs=1e-12)


@given(st.integers(0, 10**6))
@settings(deadline=None, max_examples=25)
def test_consensus_of_drifted_copies_is_the_global_minimum(seed):
    # Where a run lives: every client's set is a shuffled, slightly moved copy of one set.
    rng = np.random.default_rng(seed)
    base = 10 * np.eye(3)
    prompts = np.stack([rng.permutation(base) + rng.normal(size=(3, 3)) for _ in range(3)])
    expected = reference.consensus_error(prompts)
    assert metrics.consensus_error(prompts) == pytest.approx(expected, rel=1e-9)


@given(st.integers(1, 6), st.integers(1, 5), st.integers(0, 10**6))
@settings(deadline=None, max_examples=25)
def test_barycenter_agrees_with_pot_and_with_its_own_distance(m, n, seed):
    prompts = np.random.default_rng(seed).normal(size=(m, n, 3))
    atoms = metrics.barycenter(prompts)
    error = metrics.consensus_error(prompts)
    distances = [metrics.wasserstein2_squared(atoms, client) for client in prompts]
    assert np.mean(distances) == pytest.approx(error, rel=1e-9, abs=1e-15)
    uniform = np.full(n, 1 / n)
    oracle = ot.lp.free_support_barycenter(
        list(prompts), [uniform] * m, prompts[0], uniform, numItermax=200, stopThr=1e-14
    )
    assert np.allclose(atoms, oracle, atol=1e-8)


def test_barycenter_of_one_client_is_its_prompts_and_keeps_the_kind():
    prompts = torch.randn(1, 3, 5)
    atoms = metrics.barycenter(prompts)
    assert isinstance(atoms, torch.Tensor)
    assert atoms.dtype == torch.float32
    assert torch.equal(atoms, prompts[0])
    assert isinstance(metrics.barycenter(prompts.numpy()), np.ndarray)
    with pytest.raises(ValueError, match="prompts: allowed are finite values, found nan"):
        metrics.consensus_error(prompts * torch.nan)


def test_consensus_error_of_two_points_by_hand():
    # One prompt each at 0 and 2: barycenter 1, mean squared distance 1.
    assert metrics.consensus_error(np.array([[[0.0]], [[2.0]]])) == 1.0


def test_payload_bytes_counts_one_client():
    payload = {
        "prompts": torch.zeros(5, 10, 768),
        "head.weight": torch.zeros(5, 7, 768),
        "head.bias": torch.zeros(5, 7),
    }
    assert metrics.payload_bytes(payload, "prompts") == 10 * 768 * 4
    assert metrics.payload_bytes(payload) == (10 * 768 + 7 * 769) * 4
    half = {name: tensor.bfloat16() for name, tensor in payload.items()}
    assert metrics.payload_bytes(half) == (10 * 768 + 7 * 769) * 2


def test_messages_counts_directed_sends():
    weights = np.array([[0.5, 0.5, 0.0], [0.5, 0.5, 0.0], [0.0, 0.0, 1.0]])
    assert metrics.messages(weights) == 2
    assert metrics.messages(np.eye(4)) == 0
    assert metrics.messages(np.full((4, 4), 0.25)) == 12
