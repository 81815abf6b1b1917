import logging
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.linear_model import Ridge
from test_statistics import partitions, pooled_images, shares

from fedscale.graphs import mixing, topology
from fedscale.local.statistics import client_statistics, sufficient_statistics, unpack_symmetric
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


@pytest.mark.parametrize("lam", [1e-6, 1.0, 10.0])
def test_ridge_is_scikit_learns_on_images(lam):
    h, labels, _ = pooled_images()
    y = torch.from_numpy(labels)
    W = analytic.ridge_solve(*sufficient_statistics(h, y, 40), lam)
    right = Ridge(alpha=lam, fit_intercept=False, solver="svd").fit(
        h.double().numpy(), one_hot(y, 40)
    )
    np.testing.assert_allclose(W.numpy(), right.coef_.T, atol=1e-8, rtol=0)


@pytest.mark.parametrize("lam", [1e-3, 1.0])
def test_ridge_is_scikit_learns_with_fewer_samples_than_features(lam):
    h, y = problem(n=9, d=20)
    W = analytic.ridge_solve(*sufficient_statistics(h, y, 4), lam)
    right = Ridge(alpha=lam, fit_intercept=False, solver="svd").fit(h.numpy(), one_hot(y, 4))
    np.testing.assert_allclose(W.numpy(), right.coef_.T, atol=1e-8, rtol=0)


def test_no_ridge_is_least_squares():
    h, y = problem()
    W = analytic.ridge_solve(*sufficient_statistics(h, y, 4), 0.0)
    right = np.linalg.lstsq(h.numpy(), one_hot(y, 4), rcond=None)[0]
    np.testing.assert_allclose(W.numpy(), right, atol=1e-10)


@pytest.mark.parametrize("scales", [1.0, np.geomspace(1, 1e6, 20)])
def test_a_vanishing_ridge_is_the_smallest_least_squares_head(caplog, scales):
    """Where λ drowns in rounding, the eigen-solve takes its limit and the condition is logged."""
    h, y = problem(n=9, d=20)
    h = h * torch.as_tensor(scales)
    R, C = sufficient_statistics(h, y, 4)
    with caplog.at_level(logging.WARNING):
        W = analytic.ridge_solve(R, C, 1e-40)
    assert "head.lam=1e-40: R + λI has condition" in caplog.text
    assert "solved in 9 of 20 directions" in caplog.text
    right = np.linalg.lstsq(h.numpy(), one_hot(y, 4), rcond=1e-12)[0]
    np.testing.assert_allclose(W.numpy(), right, atol=1e-8 * np.abs(right).max())


def test_a_system_that_cholesky_gives_up_is_solved_where_it_can_be(caplog):
    """H has a column that is another one up to 1e-9, which R cannot hold: R is indefinite."""
    h, y = problem()
    h[:, 5] = h[:, 0] + 1e-9 * h[:, 5]
    R, C = sufficient_statistics(h, y, 4)
    R = R - 1e-13 * torch.eye(6, dtype=torch.float64)
    assert int(torch.linalg.cholesky_ex(R).info)
    with pytest.raises(analytic.SingularSystem, match="rank 5 of 6"):
        analytic.ridge_solve(R, C, 0.0)
    assert not caplog.text
    W = analytic.ridge_solve(R, C, 1e-30)
    assert "condition" in caplog.text and "5 of 6" in caplog.text
    right = np.linalg.lstsq(h.numpy(), one_hot(y, 4), rcond=1e-6)[0]
    np.testing.assert_allclose(W.numpy(), right, atol=1e-7)


@settings(deadline=None, max_examples=40)
@given(keys=partitions, rg=st.floats(-6, 3).map(lambda power: 10.0**power))
def test_any_partition_and_order_give_the_joint_head(keys, rg):
    """The sums and AFL's law, client by client, give the pooled solution to 1e-8."""
    h, labels, _ = pooled_images()
    y = torch.from_numpy(labels)
    R, C = sufficient_statistics(h, y, 40)
    parts = [sufficient_statistics(h[rows], y[rows], 40) for rows in shares(keys)]
    near = {"rtol": 0, "atol": 1e-8}
    for lam in (0.0, 0.1):
        joint = analytic.ridge_solve(R, C, lam)
        summed = analytic.ridge_solve(sum(r for r, _ in parts), sum(c for _, c in parts), lam)
        torch.testing.assert_close(summed, joint, **near)
        messages = (analytic.afl_message(r, c, rg) for r, c in parts)
        torch.testing.assert_close(analytic.afl_aggregate(messages, rg, lam), joint, **near)
    messages = [analytic.afl_message(r, c, rg) for r, c in parts]
    kept = analytic.ridge_solve(R, C, len(parts) * rg)
    torch.testing.assert_close(analytic.afl_aggregate(messages, rg, None), kept, **near)


@settings(deadline=None, max_examples=40)
@given(
    n=st.integers(12, 60),
    d=st.integers(1, 8),
    k=st.integers(1, 5),
    clients=st.integers(1, 70),
    seed=st.integers(0, 999),
)
def test_more_clients_than_samples_give_the_joint_head(n, d, k, clients, seed):
    """Clients without samples, or with one, change nothing."""
    h, y = problem(n, d, k, seed)
    owner = np.random.default_rng(seed).integers(0, clients, n)
    R, C = sufficient_statistics(h, y, k)
    parts = [sufficient_statistics(h[owner == c], y[owner == c], k) for c in range(clients)]
    found = analytic.afl_aggregate([analytic.afl_message(r, c, 0.5) for r, c in parts], 0.5)
    torch.testing.assert_close(found, analytic.ridge_solve(R, C, 0.0), rtol=0, atol=1e-8)


def test_the_law_is_afls_formula():
    rng = np.random.default_rng(0)
    (hu, yu), (hv, yv) = problem(50, seed=1), problem(30, seed=2)
    u = analytic.afl_message(*sufficient_statistics(hu, yu, 4), 0.3)
    v = analytic.afl_message(*sufficient_statistics(hv, yv, 4), 0.3)
    v = analytic.Message(v.weight + torch.from_numpy(rng.normal(size=(6, 4))), v.gram)

    def part(Cu, Cv, Wu):
        Ru = np.linalg.inv(Cu)
        return (np.eye(6) - Ru @ Cv + Ru @ Cv @ np.linalg.inv(Cu + Cv) @ Cv) @ Wu

    Wu, Cu, Wv, Cv = (part.numpy() for part in (*u, *v))
    joined = analytic.afl_join(u, v)
    right = part(Cu, Cv, Wu) + part(Cv, Cu, Wv)
    np.testing.assert_allclose(joined.weight.numpy(), right, atol=1e-11)
    np.testing.assert_allclose(joined.gram.numpy(), Cu + Cv)


def test_gossip_gives_every_client_the_servers_head():
    """M times the consensus of (R, C) are the sums; fewer rounds leave a larger error."""
    h, labels, _ = pooled_images()
    y = torch.from_numpy(labels)
    keys = {"name": "dirichlet", "clients": 12, "alpha": 0.1, "seed": 0}
    rows = shares(keys)
    found = client_statistics(((h[r], y[r]) for r in rows), [len(r) for r in rows], 36, 40)
    right = analytic.ridge_solve(*sufficient_statistics(h, y, 40), 0.1)
    weights = mixing.metropolis(topology.build("ring", 12, seed=0))
    errors = []
    for rounds in (100, 400):
        mixed = torch.from_numpy(np.linalg.matrix_power(weights, rounds))
        gram = unpack_symmetric(12 * (mixed @ found.gram))
        sums = 12 * torch.einsum("uv,vdk->udk", mixed, found.sums)
        heads = torch.stack(
            [analytic.ridge_solve(r, c, 0.1) for r, c in zip(gram, sums, strict=True)]
        )
        errors.append(float((heads - right).abs().max()))
    assert errors[1] < 1e-8 < errors[0] < 0.1


@pytest.mark.parametrize("power", [-30, -15, 0, 15, 30])
@pytest.mark.parametrize("lam", [0.0, 1e-6])
def test_scales_of_features_are_solved(power, lam):
    """Features times s with ridge λs² give the head divided by s, from 1e-30 to 1e30."""
    h, y = problem()
    scale = 10.0**power
    one = analytic.ridge_solve(*sufficient_statistics(h, y, 4), lam)
    W = analytic.ridge_solve(*sufficient_statistics(h * scale, y, 4), lam * scale**2)
    torch.testing.assert_close(W * scale, one, rtol=1e-9, atol=1e-12)
    fixed = analytic.ridge_solve(*sufficient_statistics(h * scale, y, 4), 1e-6)
    assert fixed.isfinite().all() and fixed.any()


def test_units_of_single_features_do_not_matter():
    h, y = problem()
    units = torch.tensor([1e-12, 1e-6, 1.0, 1e6, 1e12, 1e20], dtype=torch.float64)
    one = analytic.ridge_solve(*sufficient_statistics(h, y, 4), 0.0)
    W = analytic.ridge_solve(*sufficient_statistics(h * units, y, 4), 0.0)
    torch.testing.assert_close(W * units[:, None], one, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("n", [1, 4])
def test_a_singular_system_says_rank_lambda_and_what_to_do(n):
    h, y = problem(n=n)
    R, C = sufficient_statistics(h, y, 4)
    with pytest.raises(analytic.SingularSystem) as caught:
        analytic.ridge_solve(R, C, 0.0)
    text = str(caught.value)
    assert "\n" not in text and f"rank {n} of 6" in text and "head.lam=0" in text
    assert "allowed: head.lam > 0" in text
    assert analytic.ridge_solve(R, C, 1e-3).isfinite().all()


def test_afl_says_what_is_singular():
    h, y = problem(n=4)
    R, C = sufficient_statistics(h, y, 4)
    with pytest.raises(analytic.SingularSystem, match=r"rg=0: .* rank 4 of 6 .* rg > 0"):
        analytic.afl_message(R, C, 0.0)
    messages = [analytic.afl_message(R, C, 1.0)] * 2
    with pytest.raises(analytic.SingularSystem, match=r"head.lam=0: .* rank 4 of 6 .*head.lam > 0"):
        analytic.afl_aggregate(messages, 1.0)
    right = analytic.ridge_solve(2 * R, 2 * C, 0.1)
    torch.testing.assert_close(analytic.afl_aggregate(messages, 1.0, 0.1), right)


def test_no_samples_and_absent_classes():
    h, y = problem()
    R, C = sufficient_statistics(h, 3 * y, 12)
    W = analytic.ridge_solve(R, C, 1e-3)
    absent = [k for k in range(12) if k % 3]
    assert not W[:, absent].any() and W[:, ::3].any(dim=0).all()
    assert not analytic.ridge_solve(R * 0, C * 0, 1.0).any()
    with pytest.raises(analytic.SingularSystem, match="rank 0 of 6"):
        analytic.ridge_solve(R * 0, C * 0, 0.0)


EYE, ONES = torch.eye(3), torch.ones(3, 2)


@pytest.mark.parametrize(
    ("R", "C", "lam", "message"),
    [
        (EYE, ONES, -1.0, "head.lam=-1"),
        (EYE, ONES, math.nan, "head.lam=nan"),
        (EYE, ONES, math.inf, "head.lam=inf"),
        (EYE, ONES[:2], 1.0, "allowed are .d, d. and .d, K."),
        (EYE[:2], ONES, 1.0, "allowed are .d, d. and .d, K."),
        (EYE[0], ONES, 1.0, "allowed are .d, d. and .d, K."),
        (EYE, ONES[:, 0], 1.0, "allowed are .d, d. and .d, K."),
        (EYE[:0, :0], ONES[:0], 1.0, "allowed are .d, d. and .d, K."),
        (EYE * math.nan, ONES, 1.0, "allowed are finite"),
        (EYE, ONES * math.inf, 1.0, "allowed are finite"),
        (EYE.double() * 1.7e308, ONES, 1.7e308, "allowed are finite"),
        (EYE + torch.tensor([0.0, 0.0, 1.0]), ONES, 1.0, "allowed are symmetric"),
        (-EYE, ONES, 0.5, "negative diagonal"),
        (1 - EYE, ONES, 0.5, "negative eigenvalue"),
        (EYE.double() * 1e-300, ONES.double() * 1e100, 0.0, "overflows float64"),
    ],
)
def test_bad_systems_are_one_line(R, C, lam, message):
    with pytest.raises(ValueError, match=message) as caught:
        analytic.ridge_solve(R, C, lam)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("messages", "rg", "lam", "message"),
    [
        ([], 1.0, 0.0, "one client or more"),
        ([(ONES, EYE)], -1.0, 0.0, "rg=-1"),
        ([(ONES, EYE)], 1.0, math.nan, "head.lam=nan"),
        ([(EYE, ONES)], 1.0, None, "allowed are .d, d. and .d, K."),
        ([(ONES, EYE), (ONES[:, :1], EYE)], 1.0, None, "allowed are equal shapes"),
        ([(ONES, EYE * math.nan)], 1.0, None, "allowed are finite"),
        ([(ONES, EYE)], 2.0, 0.0, "negative eigenvalue"),
    ],
)
def test_bad_messages_are_one_line(messages, rg, lam, message):
    with pytest.raises(ValueError, match=message):
        analytic.afl_aggregate(messages, rg, lam)


def test_bytes_are_those_of_what_is_sent():
    h, y = problem(d=7)
    found = client_statistics([(h, y)], [80], 7, 4)
    prompts = torch.zeros(1, 5, 7)
    assert analytic.message_bytes(7, 4) == found.gram.nbytes + found.sums.nbytes
    assert analytic.message_bytes(7, 4, 5) == analytic.message_bytes(7, 4) + prompts.nbytes
