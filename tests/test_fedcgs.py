import logging
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from test_statistics import partitions, pooled_images, shares

from fedscale.local.statistics import client_statistics, sufficient_statistics, unpack_symmetric
from fedscale.server import fedcgs
from fedscale.server.analytic import SingularSystem


def statistics(h, y, k):
    R, C = sufficient_statistics(h, y, k)
    return C, torch.bincount(y, minlength=k).double(), R


def problem(k=3, n=200, d=4, seed=0):
    rng = np.random.default_rng(seed)
    y = rng.choice(k, n, p=np.arange(1, k + 1) / (k * (k + 1) / 2))
    x = rng.normal(size=(n, d)) @ rng.normal(size=(d, d)) + 2 * rng.normal(size=(k, d))[y]
    return torch.from_numpy(x), torch.from_numpy(y)


def scores(h, head):
    """Scores without what all classes share."""
    found = h.double() @ head[0] + head[1]
    return found - found.mean(dim=1, keepdim=True)


def reference(x, y, k, gamma):
    """The discriminants written out: −½ (x − μ_c)' S⁻¹ (x − μ_c) + log π_c."""
    S = np.cov(x.T) + gamma * np.eye(x.shape[1])
    found = np.empty((len(x), k))
    for c in range(k):
        gap = x - x[y == c].mean(0)
        found[:, c] = -0.5 * np.einsum("nd,de,ne->n", gap, np.linalg.inv(S), gap)
        found[:, c] += np.log((y == c).mean())
    return found - found.mean(1, keepdims=True)


@pytest.mark.parametrize("gamma", [0.0, 0.1, 5.0])
def test_scores_are_the_gaussian_classifiers(gamma):
    h, y = problem()
    head = fedcgs.head(*statistics(h, y, 3), gamma)
    right = reference(h.numpy(), y.numpy(), 3, gamma)
    np.testing.assert_allclose(scores(h, head), right, atol=1e-9)


@pytest.mark.parametrize("k", [3, 7])
def test_the_head_is_scikit_learns_lda_where_the_covariances_are_one(k):
    """Any number of classes, unequal priors: B made so that S is LDA's covariance within classes,
    Σ (x − μ_c)(x − μ_c)'/N. On real statistics S is the covariance around the common mean."""
    h, y = problem(k, d=5)
    lda = LinearDiscriminantAnalysis(solver="lsqr").fit(h.numpy(), y.numpy())
    C, counts, _ = statistics(h, y, k)
    mean = h.mean(0)
    within = (len(y) - 1) * torch.from_numpy(lda.covariance_) + len(y) * torch.outer(mean, mean)
    W, b = fedcgs.head(C, counts, within, 0.0)
    np.testing.assert_allclose(W.T.numpy(), lda.coef_, atol=1e-9)
    np.testing.assert_allclose(b.numpy(), lda.intercept_, atol=1e-9)


def test_two_equally_large_classes_are_scikit_learns_lda():
    """S and LDA's within-class covariance differ by a rank-one term along μ1 − μ0, which scales
    the difference of the two classes' scores but moves neither its zero nor its direction."""
    rng = np.random.default_rng(1)
    y = np.repeat([0, 1], 150)
    x = rng.normal(size=(300, 5)) @ rng.normal(size=(5, 5)) + np.outer(y, rng.normal(size=5))
    W, b = fedcgs.head(*statistics(torch.from_numpy(x), torch.from_numpy(y), 2), 0.0)
    lda = LinearDiscriminantAnalysis(solver="lsqr").fit(x, y)
    ours = x @ (W[:, 1] - W[:, 0]).numpy() + float(b[1] - b[0])
    ratio = ours / lda.decision_function(x)
    np.testing.assert_allclose(ratio, ratio[0], rtol=1e-6)
    assert ratio[0] > 0
    assert (np.argmax(x @ W.numpy() + b.numpy(), 1) == lda.predict(x)).all()


@settings(deadline=None, max_examples=20)
@given(keys=partitions)
def test_any_partition_gives_the_pooled_head(keys):
    h, labels, _ = pooled_images()
    y = torch.from_numpy(labels)
    rows = shares(keys)
    found = client_statistics(((h[r], y[r]) for r in rows), [len(r) for r in rows], 36, 40)
    gram = unpack_symmetric(found.gram.sum(0))
    W, b = fedcgs.head(found.sums.sum(0), found.counts.sum(0), gram, 1e-3)
    right = fedcgs.head(*statistics(h, y, 40), 1e-3)
    torch.testing.assert_close(W, right[0], rtol=0, atol=1e-8)
    torch.testing.assert_close(b, right[1], rtol=0, atol=1e-8)


def test_fractions_of_the_sums_give_the_same_head():
    """Means over clients, or a client's view by gossip: only N − 1 notices the scale."""
    h, y = problem()
    whole = fedcgs.head(*statistics(h, y, 3), 0.0)
    part = fedcgs.head(*(0.4 * value for value in statistics(h, y, 3)), 0.0)
    ratio = (0.4 * 200 - 1) / (0.4 * (200 - 1))
    torch.testing.assert_close(part[0], whole[0] * ratio)


@pytest.mark.parametrize("shift", [10.0, 1e3, 1e5])
def test_the_origin_of_features_does_not_matter(shift):
    h, y = problem()
    right = scores(h, fedcgs.head(*statistics(h, y, 3), 0.0))
    moved = scores(h + shift, fedcgs.head(*statistics(h + shift, y, 3), 0.0))
    torch.testing.assert_close(moved, right, rtol=0, atol=1e-13 * (1 + shift) ** 2)


@pytest.mark.parametrize("power", [-30, 0, 30])
def test_scales_of_features_do_not_matter(power):
    h, y = problem()
    h = (h * 10.0**power).float()
    right = scores(*problem()[:1], fedcgs.head(*statistics(*problem(), 3), 0.0))
    found = scores(h, fedcgs.head(*statistics(h, y, 3), 0.0))
    torch.testing.assert_close(found, right, rtol=0, atol=1e-4)
    W, b = fedcgs.head(*statistics(h, y, 3), 1e-3)
    assert W.isfinite().all() and b.isfinite().all()


@pytest.mark.parametrize("n", [20, 2000])
@pytest.mark.parametrize("value", [0.1, 7.7, 1e3, 1e30, 1e-30])
def test_a_constant_feature_is_no_information(n, value, caplog):
    """Its variance is rounding: γ = 0 is refused, a γ that drowns in it changes no score."""
    h, y = problem(n=n)
    one = scores(h, fedcgs.head(*statistics(h, y, 3), 0.0))
    h = torch.column_stack((torch.full((n,), value, dtype=torch.float64), h))
    with pytest.raises(SingularSystem, match="rank 4 of 5"):
        fedcgs.head(*statistics(h, y, 3), 0.0)
    with caplog.at_level(logging.WARNING):
        found = scores(h, fedcgs.head(*statistics(h, y, 3), 1e-280))
    assert "4 of 5 directions" in caplog.text
    torch.testing.assert_close(found, one, rtol=0, atol=1e-8)


@pytest.mark.parametrize("shift", [0.0, 300.0])
def test_a_class_without_samples_is_never_predicted(shift):
    h, y = problem()
    h = h + shift
    W, b = fedcgs.head(*statistics(h, 2 * y, 6), 0.0)
    right = fedcgs.head(*statistics(h, y, 3), 0.0)
    torch.testing.assert_close(W[:, ::2], right[0])
    torch.testing.assert_close(b[::2], right[1])
    assert float(right[1].max()) < -690 or not shift, "the bias alone would not do"
    far = torch.randn(500, 4, dtype=torch.float64) * 1e6
    found = far @ W + b
    assert found.isfinite().all()
    assert set(found.argmax(1).tolist()) <= {0, 2, 4}
    assert (found[:, 1::2].amax(1) < found.amax(1) - 600).all()


def test_a_class_of_one_sample_has_its_prior():
    h, y = problem()
    y[:] = 0
    y[7] = 1
    W, b = fedcgs.head(*statistics(h, y, 2), 1.0)
    np.testing.assert_allclose(
        float(b[1]), -0.5 * float(h[7] @ W[:, 1]) + math.log(1 / 200), rtol=1e-12
    )


def test_a_singular_covariance_says_rank_gamma_and_what_to_do():
    h, y = problem(n=4)
    with pytest.raises(SingularSystem) as caught:
        fedcgs.head(*statistics(h, y, 3), 0.0)
    text = str(caught.value)
    assert "\n" not in text and "head.lam=0: the covariance S has rank 3 of 4" in text
    assert "allowed: head.lam > 0" in text


@pytest.mark.parametrize("d", [1, 3])
@pytest.mark.parametrize(("n", "value"), [(5, 1.0), (5000, 7.7), (5000, 1e30)])
def test_constant_features_have_rank_zero(n, value, d):
    h, y = torch.full((n, d), value), torch.zeros(n, dtype=torch.int64)
    with pytest.raises(SingularSystem, match=f"rank 0 of {d}"):
        fedcgs.head(*statistics(h, y, 2), 0.0)


C, N, B = statistics(*problem(), 3)


@pytest.mark.parametrize(
    ("sums", "counts", "gram", "gamma", "message"),
    [
        (C, N, B, -1.0, "head.lam=-1"),
        (C, N, B, math.nan, "head.lam=nan"),
        (C, N / 200, B, 0.0, "sum 1; allowed is more than 1 sample"),
        (C, N * 0, B, 0.0, "sum 0; allowed is more than 1 sample"),
        (C, N * math.nan, B, 0.0, "numbers from 0"),
        (C, N - 1000, B, 0.0, "numbers from 0"),
        (C * math.nan, N, B, 0.0, "allowed are finite"),
        (C, N, B * math.inf, 0.0, "allowed are finite"),
        (C, N, B[:2], 0.0, "allowed are .d, K., .K,., .d, d."),
        (C, N[:2], B, 0.0, "allowed are .d, K., .K,., .d, d."),
        (C[:, 0], N, B, 0.0, "allowed are .d, K., .K,., .d, d."),
        (C[:0], N, B[:0, :0], 0.0, "allowed are .d, K., .K,., .d, d."),
        (C * 100, N, B, 0.0, "negative eigenvalue"),
        (C, N, -B, 0.0, "negative diagonal"),
    ],
)
def test_bad_statistics_are_one_line(sums, counts, gram, gamma, message):
    with pytest.raises(ValueError, match=message) as caught:
        fedcgs.head(sums, counts, gram, gamma)
    assert "\n" not in str(caught.value)


def test_bytes_are_those_of_what_is_sent():
    found = client_statistics([problem()], [200], 4, 3)
    assert fedcgs.message_bytes(4, 3) == sum(value.nbytes for value in found)
