"""The CNNs of many clients at once are those of each client alone."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedscale import seeds
from fedscale.local import cohort
from fedscale.models.cnn import CHUNK_VALUES, Cnn

POOLED = {28: [1, 1, 1, 0, 0], 32: [1, 1, 1, 1, 0], 8: [1, 1, 0], 5: [1, 0], 3: [0], 1: [0]}
"""Which convolutions are followed by pooling, by image size."""
FAST = settings(max_examples=25, deadline=None)
SMALL = {"num_classes": 5, "image_size": 8, "widths": (6, 16, 7)}


def small(dtype=torch.float64, channels=3):
    return Cnn(**SMALL, channels=channels, dtype=dtype)


def plain(cnn, own):
    """The network of one client, from torch's modules, with that client's parameters."""
    layers, before, side = [], cnn.channels, cnn.image_size
    for width, pooled in zip(cnn.widths, POOLED[cnn.image_size], strict=False):
        layers += [nn.Conv2d(before, width, 3, padding=1), nn.ReLU()]
        if pooled:
            layers.append(nn.MaxPool2d(2))
            side //= 2
        before = width
    layers += [nn.Flatten(), nn.Linear(before * side**2, cnn.num_classes)]
    model = nn.Sequential(*layers).to(cnn.dtype)
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), own.values(), strict=True):
            parameter.copy_(value)
    return model


def one(payload, client):
    return {name: value[client] for name, value in payload.items()}


def pick(payload, clients):
    return {name: value[list(clients)] for name, value in payload.items()}


def problem(cnn, total, clients, seed=0):
    rng = torch.Generator().manual_seed(seed)
    side = cnn.image_size
    inputs = torch.rand(total, cnn.channels, side, side, generator=rng).to(cnn.dtype) * 2 - 1
    labels = torch.randint(cnn.num_classes, (total,), generator=rng)
    return cnn.initial(range(clients), seed=seed, init="per_client"), inputs, labels


def expected(cnn, payload, inputs, labels, counts):
    """Gradients and losses of one plain network after the other."""
    grads = {name: torch.zeros_like(value) for name, value in payload.items()}
    losses = []
    for c, (x, y) in enumerate(zip(inputs.split(counts), labels.split(counts), strict=True)):
        model = plain(cnn, one(payload, c))
        loss = F.cross_entropy(model(x), y)
        found = torch.autograd.grad(loss, list(model.parameters()))
        for name, g in zip(payload, found, strict=True):
            grads[name][c] = g
        losses.append(loss.detach())
    return grads, torch.stack(losses)


def assert_close(found, right, tolerance):
    for name in right:
        for c, value in enumerate(right[name]):
            error = (found[name][c] - value).norm()
            assert error <= tolerance * value.norm() + 1e-30, f"{name}, client {c}: {error:.1e}"


@pytest.mark.parametrize("size", [28, 32])
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)], ids=["f64", "f32"]
)
def test_gradients_of_the_papers_network(size, channels, dtype, tolerance):
    cnn = Cnn(10, size, channels, dtype=dtype)
    counts = [2, 2, 1, 3]
    payload, inputs, labels = problem(cnn, sum(counts), len(counts), seed=1)
    found, losses = cnn.gradients(payload, inputs, labels, counts)
    right, mean = expected(cnn, payload, inputs, labels, counts)
    assert list(found) == list(payload)
    assert_close(found, right, tolerance)
    torch.testing.assert_close(losses, mean, rtol=tolerance, atol=0)


@FAST
@given(
    counts=st.lists(st.integers(1, 5), min_size=1, max_size=6),
    chunk=st.one_of(st.none(), st.integers(1, 12)),
    size=st.sampled_from([8, 5, 3, 1]),
    channels=st.sampled_from([1, 3]),
)
def test_ragged_batches_in_any_passes(counts, chunk, size, channels):
    widths = (3, 16, 5)[: len(POOLED[size])]
    cnn = Cnn(4, size, channels, widths, dtype=torch.float64)
    payload, inputs, labels = problem(cnn, sum(counts), len(counts))
    found, losses = cnn.gradients(payload, inputs, labels, counts, pad=5, chunk=chunk)
    right, mean = expected(cnn, payload, inputs, labels, counts)
    assert_close(found, right, 1e-10)
    torch.testing.assert_close(losses, mean, rtol=1e-12, atol=0)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("chunk", [None, 1, 3, 100])
def test_evaluation_is_the_plain_count(channels, chunk):
    cnn = small(channels=channels)
    payload, inputs, labels = problem(cnn, 23, 6)
    correct, loss = cnn.evaluate(payload, inputs, labels, chunk=chunk)
    assert correct.dtype == torch.int64
    for c in range(6):
        logits = plain(cnn, one(payload, c))(inputs).detach()
        assert int(correct[c]) == int((logits.argmax(1) == labels).sum())
        assert float(loss[c]) == pytest.approx(float(F.cross_entropy(logits, labels)), rel=1e-12)
    assert len(set(correct.tolist())) > 1


def test_evaluation_of_no_images_is_not_a_number():
    cnn = small()
    payload, inputs, labels = problem(cnn, 0, 2)
    correct, loss = cnn.evaluate(payload, inputs, labels)
    assert correct.tolist() == [0, 0]
    assert torch.isnan(loss).all()


def test_an_epoch_of_the_cohort_is_one_run_per_device():
    cnn = small(torch.float32)
    sizes, batch, rate = [13, 8, 1, 13], 4, 0.05
    payload, inputs, labels = problem(cnn, sum(sizes), len(sizes))
    rows = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
    local = SimpleNamespace(
        optimizer="sgd",
        lr=rate,
        prompt_lr=0.0,
        epochs=1,
        batch_size=batch,
        momentum=0.0,
        mu=0.0,
        rho=0.0,
    )
    trained, *_ = cohort.train(
        cnn,
        payload,
        cohort.CohortData(inputs, labels, rows),
        local,
        seed=7,
        round=2,
        clients=[3, 4, 5, 6],
        active=np.ones(4, dtype=bool),
    )
    for c, mine in enumerate(rows):
        model = plain(cnn, one(payload, c))
        order = torch.from_numpy(mine[seeds.stream(7, "batches", 2, 3 + c).permutation(len(mine))])
        for chosen in order.split(batch):
            loss = F.cross_entropy(model(inputs[chosen]), labels[chosen])
            grads = torch.autograd.grad(loss, list(model.parameters()))
            with torch.no_grad():
                for parameter, g in zip(model.parameters(), grads, strict=True):
                    parameter -= rate * g
        for name, parameter in zip(payload, model.parameters(), strict=True):
            torch.testing.assert_close(trained[name][c], parameter.data, rtol=1e-5, atol=1e-6)
            assert not torch.equal(trained[name][c], payload[name][c])


@pytest.mark.parametrize(("size", "channels"), [(28, 1), (32, 3)])
def test_a_client_does_not_depend_on_who_shares_its_pass(size, channels):
    """To the bit on the machines seen; the tolerance is for kernels that mind the groups."""
    cnn = Cnn(10, size, channels, (16, 32, 16))
    counts = [3, 3, 3, 2, 3, 2]
    payload, inputs, labels = problem(cnn, sum(counts), 6)
    bounds = np.cumsum([0, *counts])
    together, losses = cnn.gradients(payload, inputs, labels, counts)
    score = cnn.evaluate(payload, inputs, labels)
    for clients in ([0], [3], [1, 2], [5, 4, 0], [0, 1, 2, 4]):
        mine = np.concatenate([np.arange(bounds[c], bounds[c + 1]) for c in clients])
        own = pick(payload, clients)
        found, loss = cnn.gradients(own, inputs[mine], labels[mine], [counts[c] for c in clients])
        assert_close(found, pick(together, clients), 1e-5)
        torch.testing.assert_close(loss, losses[clients], rtol=1e-6, atol=0)
        alone = cnn.evaluate(own, inputs, labels)
        assert torch.equal(alone[0], score[0][clients])
        torch.testing.assert_close(alone[1], score[1][clients], rtol=1e-6, atol=0)


def test_the_default_pass_cuts_only_large_batches(monkeypatch):
    cnn = Cnn(3, 8, 1, (4,), dtype=torch.float64)
    monkeypatch.setitem(CHUNK_VALUES, "cpu", 4 * 64 * 5)
    seen, plain_logits = [], Cnn.logits
    monkeypatch.setattr(
        Cnn, "logits", lambda self, p, x: seen.append(x.shape[:2]) or plain_logits(self, p, x)
    )
    counts = [2, 2, 2, 12, 5, 1, 1, 1]
    payload, inputs, labels = problem(cnn, sum(counts), len(counts))
    found, losses = cnn.gradients(payload, inputs, labels, counts)
    assert seen == [(2, 2), (1, 2), (1, 5), (1, 5), (1, 2), (1, 5), (3, 1)]
    right, mean = expected(cnn, payload, inputs, labels, counts)
    assert_close(found, right, 1e-10)
    torch.testing.assert_close(losses, mean)


def test_a_broken_client_harms_nobody():
    cnn = small(torch.float32)
    payload, inputs, labels = problem(cnn, 12, 3)
    right, losses = cnn.gradients(payload, inputs, labels, [4, 4, 4])
    score = cnn.evaluate(payload, inputs, labels)
    broken = {name: value.clone() for name, value in payload.items()}
    broken["conv2.weight"][1, 0, 0, 0, 0] = torch.nan
    broken["head.weight"][1, 0] = torch.inf
    found, after = cnn.gradients(broken, inputs, labels, [4, 4, 4])
    assert not torch.isfinite(after[1])
    for c in (0, 2):
        assert all(torch.equal(found[name][c], right[name][c]) for name in right)
        assert after[c] == losses[c]
    correct, loss = cnn.evaluate(broken, inputs, labels)
    assert correct[[0, 2]].tolist() == score[0][[0, 2]].tolist()
    assert torch.equal(loss[[0, 2]], score[1][[0, 2]])


@pytest.mark.parametrize("clients", [1, 3])
@pytest.mark.parametrize("trained", [True, False])
def test_logits_are_differentiable_in_shared_and_own_images(clients, trained):
    cnn = small()
    payload, inputs, _ = problem(cnn, 4, clients)
    payload = {name: value.requires_grad_(trained) for name, value in payload.items()}
    models = [
        plain(cnn, {k: v.detach() for k, v in one(payload, c).items()}) for c in range(clients)
    ]
    shared = inputs.clone().requires_grad_()
    logits = cnn.logits(payload, shared)
    right = torch.stack([model(shared) for model in models])
    torch.testing.assert_close(logits, right, rtol=1e-10, atol=1e-12)
    (a,) = torch.autograd.grad(logits.sin().sum(), shared, retain_graph=True)
    (b,) = torch.autograd.grad(right.sin().sum(), shared)
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
    own = inputs.repeat(clients, 1, 1, 1, 1).mul(torch.arange(1, clients + 1).view(-1, 1, 1, 1, 1))
    right = torch.stack([model(own[c]) for c, model in enumerate(models)])
    torch.testing.assert_close(cnn.logits(payload, own), right, rtol=1e-10, atol=1e-12)


def test_initial_draws_are_keyed_and_bounded():
    cnn = Cnn(10, 28, 1)
    mine = cnn.initial([4, 0, 9], seed=3, init="per_client")
    alone = cnn.initial([9], seed=3, init="per_client")
    shared = cnn.initial([4, 0, 9], seed=3)
    other = cnn.initial([4, 0, 9], seed=4, init="per_client")
    previous = 0.0
    for name, value in mine.items():
        assert value.shape == (3, *cnn.shapes[name])
        assert value.dtype == torch.float32
        assert torch.equal(alone[name][0], value[2])
        assert torch.equal(shared[name], value[1:2].expand_as(value))
        assert not torch.equal(value[0], value[1])
        assert not torch.equal(value, other[name])
        if name.endswith("weight"):
            previous = value[0, 0].numel() ** -0.5
        assert value.abs().max() <= previous
        deviation = float(value.std()) / (previous / 3**0.5)
        assert abs(deviation - 1) < 5 / value.numel() ** 0.5


def test_initial_draws_are_those_of_torch_layers_in_range():
    """Same bounds as torch.nn.Conv2d and Linear: their extremes come close to v from below."""
    cnn = Cnn(10, 32, 3)
    model = plain(cnn, one(cnn.initial([0], seed=0), 0))
    for layer in model:
        if hasattr(layer, "weight"):
            drawn = float(layer.weight.detach().abs().max())
            layer.reset_parameters()
            assert drawn == pytest.approx(float(layer.weight.detach().abs().max()), rel=0.02)


def test_images_become_inputs():
    rng = np.random.default_rng(0)
    grey = np.repeat(rng.integers(0, 256, (5, 28, 28, 1), dtype=np.uint8), 3, axis=3)
    grey[0, 0, :3, :] = [[0], [51], [255]]
    grey.flags.writeable = False
    x = Cnn(10, 28, 1).inputs(grey, batch=2)
    assert x.shape == (5, 1, 28, 28)
    assert x.dtype == torch.float32
    torch.testing.assert_close(x[0, 0, 0, :3], torch.tensor([-1.0, -0.6, 1.0]))
    for channel in range(3):
        torch.testing.assert_close(Cnn(10, 28, 3).inputs(grey)[:, channel], x[:, 0])
    colour = np.zeros((1, 2, 2, 3), np.uint8)
    colour[..., 1] = 255
    assert Cnn(2, 4, 3, (4,)).inputs(colour)[0].unique(dim=1).shape[1] == 1
    assert Cnn(2, 4, 3, (4,)).inputs(colour)[0, :, 0, 0].tolist() == [-1, 1, -1]
    torch.testing.assert_close(
        Cnn(2, 2, 1, (4,)).inputs(colour).flatten(), torch.full((4,), -1 / 3)
    )
    stripes = np.zeros((1, 12, 12, 3), np.uint8)
    stripes[:, ::2] = 255
    assert Cnn(2, 4, 1, (4,)).inputs(stripes).abs().max() < 0.2  # antialiased: grey, not black
    assert Cnn(2, 7, 3, (4,), dtype=torch.float64).inputs(colour[:0]).shape == (0, 3, 7, 7)


@pytest.mark.parametrize(
    "images",
    [
        np.zeros((2, 8, 8, 3), np.float32),
        np.zeros((2, 8, 8), np.uint8),
        np.zeros((2, 3, 8, 8), np.uint8),
    ],
)
def test_other_images_are_refused(images):
    with pytest.raises(ValueError, match=r"^images=.*allowed are uint8 arrays \(N, H, W, 3\)$"):
        small().inputs(images)


@pytest.mark.parametrize(
    "change",
    [
        {"num_classes": 0},
        {"image_size": 0},
        {"channels": 2},
        {"widths": ()},
        {"widths": (4, 0)},
        {"dtype": torch.bfloat16},
    ],
)
def test_wrong_values_are_refused(change):
    (name,) = change
    with pytest.raises(ValueError, match=f"^{name}=.*allowed are"):
        Cnn(**{**SMALL, **change})
    with pytest.raises(ValueError, match=r"^init=each: allowed are shared and per_client$"):
        small().initial([0], seed=0, init="each")


@pytest.mark.parametrize(("counts", "chunk"), [([2, 0], None), ([1, 1], 0), ([3, -1], 2)])
def test_empty_batches_are_refused(counts, chunk):
    cnn = small()
    payload, inputs, labels = problem(cnn, 2, 2)
    with pytest.raises(ValueError, match=r"^counts=.*: allowed are integers from 1$"):
        cnn.gradients(payload, inputs, labels, counts, chunk=chunk)
    with pytest.raises(ValueError, match=r"^counts=\[1\]: allowed are those of 2 inputs"):
        cnn.gradients(payload, inputs, labels, [1])


def test_value_semantics():
    assert Cnn(10) == Cnn(10, device="cpu")
    assert hash(Cnn(10)) == hash(Cnn(10))
    assert Cnn(10, widths=[3, 4]).widths == (3, 4)
    assert Cnn(10).device == torch.device("cpu")
    assert Cnn(10, 28).sides == (14, 7, 3, 3, 3)
    assert Cnn(10, 32).sides == (16, 8, 4, 2, 2)
