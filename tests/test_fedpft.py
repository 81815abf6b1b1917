import numpy as np
import pytest
import torch
from sklearn.mixture import GaussianMixture

from fedscale import seeds
from fedscale.server import fedpft


def clients(seed=0, n=120, d=4, k=3):
    rng = np.random.default_rng(seed)
    y = rng.integers(0, k, n)
    return rng.normal(size=(n, d)) + 4 * np.eye(k, d)[y], y


def test_mixtures_are_scikit_learns():
    x, y = clients()
    found = fedpft.mixtures(x, y, 3, seed=7, client=2)
    start = seeds.stream(7, "mixtures", 0, 2).integers(2**31, size=3)
    right = GaussianMixture(10, covariance_type="diag", random_state=int(start[1]))
    right.fit(x[y == 1])
    np.testing.assert_array_equal(found[1, :, 1], right.weights_)
    np.testing.assert_array_equal(found[1, :, 2:6], right.means_)
    np.testing.assert_array_equal(found[1, :, 6:], right.covariances_)
    assert (found[1, :, 0] == (y == 1).sum()).all()


def test_small_classes_are_dropped():
    x, y = clients()
    y[:10], y[10:] = 2, np.minimum(y[10:], 1)
    found = fedpft.mixtures(x, y, 4, seed=0, client=0)
    assert not found[2].any() and not found[3].any() and found[:2].any()


def test_samples_have_the_clients_counts_and_moments():
    x, y = clients(n=3000)
    sent = np.stack([fedpft.mixtures(x, y, 3, seed=0, client=c) for c in range(2)])
    features, labels = fedpft.sample(sent, seed=0)
    assert torch.bincount(labels).tolist() == (2 * np.bincount(y)).tolist()
    for c in range(3):
        drawn = features[labels == c].numpy()
        np.testing.assert_allclose(drawn.mean(0), x[y == c].mean(0), atol=0.1)
        np.testing.assert_allclose(drawn.std(0), x[y == c].std(0), atol=0.1)
    again = fedpft.sample(sent, seed=0)
    assert torch.equal(again[0], features)


def test_the_head_is_torchs_sgd():
    x, y = clients()
    h, labels = torch.from_numpy(x.astype(np.float32)), torch.from_numpy(y)
    weight, bias = fedpft.train_head(h, labels, 3, seed=0)
    layer = torch.nn.Linear(4, 3)
    torch.nn.init.zeros_(layer.weight), torch.nn.init.zeros_(layer.bias)
    rule = torch.optim.SGD(layer.parameters(), lr=0.01, momentum=0.9)
    rng = seeds.stream(0, "mixtures", 2)
    for _ in range(50):
        for rows in torch.from_numpy(rng.permutation(len(y))).split(128):
            rule.zero_grad()
            torch.nn.functional.cross_entropy(layer(h[rows]), labels[rows]).backward()
            rule.step()
    torch.testing.assert_close(weight, layer.weight.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(bias, layer.bias.detach(), rtol=1e-5, atol=1e-6)
    assert ((h @ weight.T + bias).argmax(1) == labels).float().mean() > 0.9


def test_nothing_sent_is_said():
    with pytest.raises(ValueError, match="no client has a class"):
        fedpft.sample(np.zeros((2, 3, 10, 10)), seed=0)
