import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.linear_model import LinearRegression, Ridge

from fedscale.local.statistics import sufficient_statistics
from fedscale.server import analytic


def problem(n=80, d=6, k=4, seed=0):
    rng = np.random.default_rng(seed)
    h = torch.from_numpy(rng.normal(size=(n, d)) + rng.normal(size=d))
    return h, torch.from_numpy(rng.integers(0, k, n))


def one_hot(y, k):
    return np.eye(k)[y.numpy()]


@pytest.mark.parametrize("lam", [1e-6, 1e-3, 1.0, 10.0, 1e6])
def test_ridge_is_scikit_learns(lam):
    h, y = problem()
    W = analytic.ridge_solve(*sufficient_statistics(h, y, 4), lam)
    right = Ridge(alpha=lam, fit_intercept=False, solver="svd").fit(h.numpy(), one_hot(y, 4))
    np.testing.assert_allclose(W.numpy(), right.coef_.T, atol=1e-8, rtol=0)


def test_no_ridge_is_least_squares():
    h, y = problem()
    W = analytic.ridge_solve(*sufficient_statistics(h, y, 4), 0.0)
    right = LinearRegression(fit_intercept=False).fit(h.numpy(), one_hot(y, 4))
    np.testing.assert_allclose(W.numpy(), right.coef_.T, atol=1e-10)


@settings(deadline=None, max_examples=30)
@given(clients=st.integers(1, 12), seed=st.integers(0, 999), sort=st.booleans())
def test_the_partition_and_the_order_do_not_matter(clients, seed, sort):
    """For any partition (by class too) sums and AFL's law give the joint solution."""
    h, y = problem(seed=seed)
    rng = np.random.default_rng(seed)
    owner = rng.integers(0, clients, len(y))
    owner = owner[np.argsort(np.argsort(y.numpy() if sort else owner, kind="stable"))]
    R, C = sufficient_statistics(h, y, 4)
    lam, rg = 1e-2, 0.5
    parts = []
    for client in rng.permutation(clients):
        rows = torch.from_numpy(np.flatnonzero(owner == client))
        parts.append(sufficient_statistics(h[rows], y[rows], 4))
    joint = analytic.ridge_solve(R, C, lam)
    torch.testing.assert_close(analytic.joint_solution(parts, lam), joint, rtol=0, atol=1e-9)
    messages = [analytic.afl_local(r, c, rg) for r, c in parts]
    plain = analytic.ridge_solve(R, C, 0.0)
    torch.testing.assert_close(analytic.afl_aggregate(messages, rg), plain, rtol=0, atol=1e-8)
    kept = analytic.afl_aggregate(messages, rg, remove=False)
    torch.testing.assert_close(kept, analytic.ridge_solve(R, C, clients * rg), rtol=0, atol=1e-8)


def test_a_singular_system_says_rank_lambda_and_what_to_do():
    h, y = problem(n=4)
    R, C = sufficient_statistics(h, y, 4)
    with pytest.raises(analytic.SingularSystem) as caught:
        analytic.ridge_solve(R, C, 0.0)
    text = str(caught.value)
    assert "\n" not in text and "rank 4 of 6" in text and "head.lam=0" in text
    assert "larger head.lam" in text
    analytic.ridge_solve(R, C, 1e-3)


@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
def test_scale_of_the_features_only_scales_the_head(scale):
    h, y = problem()
    R, C = sufficient_statistics(h, y, 4)
    one = analytic.ridge_solve(R, C, 0.0)
    other = analytic.ridge_solve(R * scale**2, C * scale, 0.0)
    torch.testing.assert_close(other * scale, one, rtol=1e-9, atol=1e-12)


def test_bad_input_is_named():
    R, C = torch.eye(3), torch.ones(3, 2)
    for lam in (-1.0, float("nan")):
        with pytest.raises(ValueError, match=r"head\.lam"):
            analytic.ridge_solve(R, C, lam)
    with pytest.raises(ValueError, match="allowed are"):
        analytic.ridge_solve(R, C[:2], 1.0)
    with pytest.raises(ValueError, match="not finite"):
        analytic.ridge_solve(R * torch.nan, C, 1.0)
    with pytest.raises(ValueError, match="one client"):
        analytic.afl_aggregate([], 1.0)


def test_a_message_is_the_packed_gram_and_the_sums():
    assert analytic.message_numbers(192, 40) == 192 * 193 // 2 + 192 * 40
