import numpy as np
import pytest
import torch
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

from fedscale.local.statistics import sufficient_statistics
from fedscale.server import fedcgs
from fedscale.server.analytic import SingularSystem


def statistics(h, y, k):
    R, C = sufficient_statistics(h, y, k)
    return C, torch.bincount(y, minlength=k).double(), R


def reference(x, y, k, gamma):
    """The discriminants written out: −½ (x − μ_c)' S⁻¹ (x − μ_c) + log π_c, up to x' S⁻¹ x."""
    S = np.cov(x.T) + gamma * np.eye(x.shape[1])
    scores = np.empty((len(x), k))
    for c in range(k):
        gap = x - x[y == c].mean(0)
        scores[:, c] = -0.5 * np.einsum("nd,de,ne->n", gap, np.linalg.inv(S), gap)
        scores[:, c] += np.log((y == c).mean())
    return scores


@pytest.mark.parametrize("gamma", [0.0, 0.1, 5.0])
def test_scores_are_the_gaussian_classifiers(gamma):
    rng = np.random.default_rng(0)
    y = rng.integers(0, 3, 200)
    x = rng.normal(size=(200, 4)) + 2 * rng.normal(size=(3, 4))[y]
    W, b = fedcgs.head(*statistics(torch.from_numpy(x), torch.from_numpy(y), 3), gamma)
    found = x @ W.numpy() + b.numpy()
    right = reference(x, y, 3, gamma)
    gaps = found - right
    np.testing.assert_allclose(gaps - gaps[:, :1], 0, atol=1e-9)


def test_two_balanced_classes_are_scikit_learns_lda():
    """S and LDA's within-class covariance differ by a rank-one term along μ1 − μ0, which scales
    the difference of the two classes' scores but moves neither its zero nor its direction."""
    rng = np.random.default_rng(1)
    y = np.repeat([0, 1], 150)
    x = rng.normal(size=(300, 5)) @ rng.normal(size=(5, 5)) + np.outer(y, rng.normal(size=5))
    W, b = fedcgs.head(*statistics(torch.from_numpy(x), torch.from_numpy(y), 2), 0.0)
    lda = LinearDiscriminantAnalysis(solver="lsqr").fit(x, y)
    ours = x @ (W[:, 1] - W[:, 0]).numpy() + float(b[1] - b[0])
    theirs = lda.decision_function(x)
    ratio = ours / theirs
    np.testing.assert_allclose(ratio, ratio[0], rtol=1e-6)
    assert (np.argmax(x @ W.numpy() + b.numpy(), 1) == lda.predict(x)).all()


def test_a_class_without_samples_is_never_predicted():
    rng = np.random.default_rng(2)
    h, y = torch.from_numpy(rng.normal(size=(50, 3))), torch.from_numpy(rng.integers(0, 2, 50))
    W, b = fedcgs.head(*statistics(h, y, 4), 0.0)
    assert W.isfinite().all() and b.isfinite().all()
    assert int((h @ W + b).argmax(1).max()) < 2


def test_singular_and_bad_input_are_named():
    h, y = torch.ones(5, 3, dtype=torch.float64), torch.zeros(5, dtype=torch.int64)
    with pytest.raises(SingularSystem, match=r"head.lam=0: .* rank 0 of 3"):
        fedcgs.head(*statistics(h, y, 2), 0.0)
    C, n, R = statistics(h, y, 2)
    with pytest.raises(ValueError, match=r"head\.lam=-1"):
        fedcgs.head(C, n, R, -1.0)
    with pytest.raises(ValueError, match="at least 2 samples"):
        fedcgs.head(C, n / 10, R, 0.0)
    with pytest.raises(ValueError, match="allowed are"):
        fedcgs.head(C, n, R[:2], 0.0)
