import math

import numpy as np
import pytest
import torch
from sklearn.mixture import GaussianMixture
from threadpoolctl import threadpool_limits

from fedscale import seeds
from fedscale.server import fedpft


def client(seed=0, n=120, d=4, k=3):
    rng = np.random.default_rng(seed)
    y = rng.integers(0, k, n)
    x = (rng.normal(size=(n, d)) + 4 * np.eye(k, d)[y]).astype(np.float32)
    return torch.from_numpy(x), torch.from_numpy(y)


def test_mixtures_are_scikit_learns():
    h, y = client()
    found = fedpft.mixtures(h, y, 3, seed=7, client=2)
    assert found.shape == (3, 10, 9) and found.dtype == np.float64
    starts = seeds.stream(7, "mixtures", 0, 2).integers(2**31, size=3)
    for label in range(3):
        own = h[y == label].double().numpy()
        right = GaussianMixture(10, covariance_type="diag", random_state=int(starts[label]))
        with threadpool_limits(1):
            right.fit(own)
        np.testing.assert_allclose(found[label, :, 0], len(own) * right.weights_, rtol=1e-15)
        np.testing.assert_array_equal(found[label, :, 1:5], right.means_)
        np.testing.assert_array_equal(found[label, :, 5:], right.covariances_)
    np.testing.assert_array_equal(
        fedpft.mixtures(h.numpy(), y.numpy(), 3, seed=7, client=2), found, "arrays are taken too"
    )


def test_mixtures_do_not_depend_on_threads():
    h, y = client(n=1000, d=128, k=1)
    with threadpool_limits(2):
        two = fedpft.mixtures(h, y, 1, seed=0, client=0)
    with threadpool_limits(1):
        one = fedpft.mixtures(h, y, 1, seed=0, client=0)
    np.testing.assert_array_equal(two, one)


def test_mixtures_depend_on_their_key_and_own_class_alone():
    h, y = client()
    one = fedpft.mixtures(h, y, 3, seed=0, client=0)
    assert (fedpft.mixtures(h, y, 3, seed=0, client=1) != one).any()
    assert (fedpft.mixtures(h, y, 3, seed=1, client=0) != one).any()
    rest = y != 0
    without = fedpft.mixtures(h[rest], y[rest], 3, seed=0, client=0)
    assert not without[0].any()
    np.testing.assert_array_equal(without[1:], one[1:])


@pytest.mark.parametrize(("n", "sent"), [(0, False), (1, False), (10, False), (11, True)])
def test_classes_of_up_to_ten_samples_are_dropped(n, sent):
    h, _ = client(n=50)
    y = torch.full((50,), 7)
    y[:n] = 2
    found = fedpft.mixtures(h, y, 9, seed=0, client=0)
    assert found.any(axis=(1, 2)).tolist() == [c == 7 or (c == 2 and sent) for c in range(9)]
    assert np.isfinite(found).all()
    assert fedpft.message_bytes(found) == (1 + sent) * (10 * 9 + 1) * 8


def test_samples_have_the_clients_counts_and_moments():
    h, y = client(n=3000)
    sent = np.stack([fedpft.mixtures(h, y, 3, seed=0, client=c) for c in range(2)])
    features, labels = fedpft.sample(sent, seed=0)
    assert features.dtype == torch.float32
    assert torch.bincount(labels).tolist() == (2 * torch.bincount(y)).tolist()
    for c in range(3):
        drawn, own = features[labels == c], h[y == c]
        torch.testing.assert_close(drawn.mean(0), own.mean(0), rtol=0, atol=0.1)
        # The full covariance: components are drawn by their weights, not one after the other.
        torch.testing.assert_close(drawn.T.cov(), own.T.cov(), rtol=0, atol=0.15)


def test_samples_follow_the_weights_of_components():
    message = np.zeros((1, 1, 2, 3))
    message[0, 0] = [[3000, -50, 1e-6], [1000, 50, 4.0]]
    features, labels = fedpft.sample(message, seed=3)
    assert len(labels) == 4000
    left = features[:, 0] < 0
    assert 2880 < int(left.sum()) < 3120
    assert float(features[left].std()) < 2e-3
    assert 1.85 < float(features[~left].std()) < 2.15


def test_a_clients_samples_depend_on_its_message_alone():
    h, y = client()
    sent = np.stack([fedpft.mixtures(h, y, 3, seed=0, client=0)] * 3)
    features, _ = fedpft.sample(sent, seed=0)
    silent = sent.copy()
    silent[0] = 0
    fewer, _ = fedpft.sample(silent, seed=0)
    assert torch.equal(features[120:], fewer)
    assert not torch.equal(features[:120], features[120:240])
    assert not torch.equal(fedpft.sample(sent, seed=1)[0], features)


def test_the_head_is_torchs_sgd():
    h, y = client(n=300)
    weight, bias = fedpft.train_head(h, y, 3, seed=0)
    layer = torch.nn.Linear(4, 3)
    torch.nn.init.zeros_(layer.weight), torch.nn.init.zeros_(layer.bias)
    rule = torch.optim.SGD(layer.parameters(), lr=0.01, momentum=0.9)
    rng = seeds.stream(0, "mixtures", 2)
    for _ in range(50):
        for rows in torch.from_numpy(rng.permutation(len(y))).split(128):
            rule.zero_grad()
            torch.nn.functional.cross_entropy(layer(h[rows]), y[rows]).backward()
            rule.step()
    torch.testing.assert_close(weight, layer.weight.detach(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(bias, layer.bias.detach(), rtol=1e-4, atol=1e-5)


def test_the_server_learns_what_clients_know():
    """Each client has one class only; the head knows all, and never predicts an absent one."""
    h, y = client(n=300)
    sent = [fedpft.mixtures(h[y == c], y[y == c], 5, seed=0, client=c) for c in range(3)]
    weight, bias = fedpft.learn(np.stack(sent), seed=0)
    assert weight.shape == (5, 4) and bias.shape == (5,)
    fresh, labels = client(seed=1, n=300)
    assert float(((fresh @ weight.T + bias).argmax(1) == labels).float().mean()) > 0.9
    again = fedpft.learn(np.stack(sent), seed=0)
    assert torch.equal(weight, again[0]) and torch.equal(bias, again[1])


@pytest.mark.parametrize("power", [-30, -10, 3, 30])
def test_scales_are_finite_or_refused(power):
    h, y = client()
    try:
        sent = fedpft.mixtures(h * 10.0**power, y, 3, seed=0, client=0)
        assert np.isfinite(sent).all()
        weight, bias = fedpft.learn(sent[None], seed=0)
    except ValueError as error:
        assert power == 30 and "allowed: head.normalise=True" in str(error)
        assert "\n" not in str(error)
    else:
        assert power < 30 and weight.isfinite().all() and bias.isfinite().all()


@pytest.mark.parametrize("value", [0.0, 0.1, 1e5])
def test_equal_samples_are_fitted_or_refused(value):
    h, y = torch.full((30, 4), value), torch.zeros(30, dtype=torch.int64)
    try:
        drawn, _ = fedpft.sample(fedpft.mixtures(h, y, 1, seed=0, client=0)[None], seed=0)
    except ValueError as error:
        assert value == 1e5 and "allowed: head.normalise=True" in str(error)
    else:
        torch.testing.assert_close(drawn, h, rtol=0.01, atol=0.01)


H, Y = client(n=12)


@pytest.mark.parametrize(
    ("h", "y", "k", "message"),
    [
        (H, Y, 2, "labels 0 to 2: allowed are 0 to 1"),
        (H, Y[:3], 3, "allowed are .N, d. and .N,."),
        (H, Y.float(), 3, "allowed are integers"),
        (H * math.nan, Y, 3, "allowed are finite values"),
        (H * math.inf, Y, 3, "allowed are finite values"),
        (H.double() * 1e100, Y, 3, "within float32"),
    ],
)
def test_bad_samples_are_one_line(h, y, k, message):
    for call in (
        lambda: fedpft.mixtures(h, y, k, seed=0, client=0),
        lambda: fedpft.train_head(h, y, k, seed=0),
    ):
        with pytest.raises(ValueError, match=message) as caught:
            call()
        assert "\n" not in str(caught.value)


SENT = np.ones((2, 3, 10, 9))


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        (SENT * 0, "no client has a class with more than 10"),
        (SENT[:0], "no client has a class with more than 10"),
        (SENT[0], "allowed are .M, K, J, 2d . 1."),
        (SENT[..., :8], "allowed are .M, K, J, 2d . 1."),
        (SENT[..., :1], "allowed are .M, K, J, 2d . 1."),
        (SENT * math.nan, "allowed are finite"),
        (-SENT, "masses and variances from 0"),
        (SENT * [1, *[1e39] * 4, *[1] * 4], "beyond float32"),
    ],
)
def test_bad_messages_are_one_line(sent, message):
    with pytest.raises(ValueError, match=message) as caught:
        fedpft.learn(sent, seed=0)
    assert "\n" not in str(caught.value)


def test_no_samples_to_train_on_is_said():
    with pytest.raises(ValueError, match="1 sample or more"):
        fedpft.train_head(H[:0], Y[:0], 3, seed=0)
