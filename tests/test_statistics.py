import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedscale.local import statistics


@settings(deadline=None, max_examples=40)
@given(
    n=st.integers(0, 60),
    d=st.integers(1, 9),
    k=st.integers(1, 5),
    parts=st.integers(1, 7),
    seed=st.integers(0, 999),
)
def test_sums_over_parts_are_the_sums_over_all(n, d, k, parts, seed):
    rng = np.random.default_rng(seed)
    h = torch.from_numpy(rng.normal(size=(n, d)).astype(np.float32))
    y = torch.from_numpy(rng.integers(0, k, n))
    R, C = statistics.sufficient_statistics(h, y, k)
    assert R.dtype == C.dtype == torch.float64
    order = torch.from_numpy(rng.permutation(n))
    cuts = sorted(rng.integers(0, n + 1, parts - 1).tolist())
    pieces = [
        statistics.sufficient_statistics(h[rows], y[rows], k) for rows in order.tensor_split(cuts)
    ]
    torch.testing.assert_close(sum(r for r, _ in pieces), R, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(sum(c for _, c in pieces), C, rtol=1e-12, atol=1e-12)
    x, one = h.double().numpy(), np.eye(k)[y.numpy()]
    np.testing.assert_allclose(R.numpy(), x.T @ x, atol=1e-12)
    np.testing.assert_allclose(C.numpy(), x.T @ one, atol=1e-12)


@pytest.mark.parametrize("d", [1, 2, 7, 30])
def test_packing_keeps_the_matrix_in_half_the_numbers(d):
    x = torch.randn(3, d, d, dtype=torch.float64)
    x = x + x.mT
    packed = statistics.pack_symmetric(x)
    assert packed.shape == (3, d * (d + 1) // 2)
    assert torch.equal(statistics.unpack_symmetric(packed), x)


def test_bad_input_is_named():
    h, y = torch.ones(3, 2), torch.tensor([0, 1, 5])
    with pytest.raises(ValueError, match="labels 0 to 5: allowed: 0 to 2"):
        statistics.sufficient_statistics(h, y, 3)
    with pytest.raises(ValueError, match="sample 1 are not finite"):
        statistics.sufficient_statistics(torch.tensor([[1.0], [torch.inf]]), y[:2], 2)
    with pytest.raises(ValueError, match="allowed are"):
        statistics.sufficient_statistics(h, y[:2], 3)
    with pytest.raises(ValueError, match="must be d"):
        statistics.unpack_symmetric(torch.zeros(5))
    with pytest.raises(ValueError, match="allowed are"):
        statistics.pack_symmetric(torch.zeros(2, 3))
