"""Distillation on generated images: every term against a naive computation, and the whole."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedscale.data import offline
from fedscale.local import cohort, optimizers
from fedscale.models.cnn import Cnn
from fedscale.server import coboosting, dense

FAST = settings(max_examples=25, deadline=None)
CNN = Cnn(5, 8, 1, (6, 7), dtype=torch.float64)
TEMPERATURES = {dense: 20.0, coboosting: 4.0}
METHODS = pytest.mark.parametrize("method", [dense, coboosting], ids=["dense", "coboosting"])
TINY = {
    "epochs": 2,
    "lr": 0.01,
    "batch": 6,
    "seed": 3,
    "generator_steps": 3,
    "generator_width": 4,
}


def clients(count=3, seed=0):
    """Networks that disagree."""
    payload = CNN.initial(range(count), seed=seed, init="per_client")
    payload["head.weight"] *= 8
    return payload


def one(payload, client=0):
    return {name: value[client : client + 1] for name, value in payload.items()}


def logits(rows, classes=5, seed=0):
    return torch.tensor(np.random.default_rng(seed).normal(0, 2, (rows, classes)))


def softmax(row):
    e = np.exp(row - row.max())
    return e / e.sum()


def kl(p, q):
    return float(sum(a * np.log(a / b) for a, b in zip(p, q, strict=True)))


def plain(x, own):
    """Logits of one network, written out."""
    x = F.max_pool2d(F.relu(F.conv2d(x, own["conv1.weight"], own["conv1.bias"], padding=1)), 2)
    x = F.max_pool2d(F.relu(F.conv2d(x, own["conv2.weight"], own["conv2.bias"], padding=1)), 2)
    return F.linear(x.flatten(1), own["head.weight"], own["head.bias"])


def plain_ensemble(x, payload, weights):
    parts = [{name: value[c] for name, value in payload.items()} for c in range(len(weights))]
    return sum(w * plain(x, own) for w, own in zip(weights, parts, strict=True))


@pytest.mark.parametrize("hard", [False, True])
def test_the_generators_loss_is_the_naive_sum(hard):
    teacher, student = logits(12), logits(12, seed=1)
    student[:5] = teacher[:5] + 0.01
    labels = torch.tensor(np.random.default_rng(2).integers(5, size=12))
    total, agreeing = 0.0, 0
    for t, s, y in zip(teacher.numpy(), student.numpy(), labels.tolist(), strict=True):
        p = softmax(t)
        total += -np.log(p[y]) * ((1 - p[y]) if hard else 1)
        if t.argmax() != s.argmax():
            total -= kl(p, softmax(s))
        else:
            agreeing += 1
    assert 5 <= agreeing < 12
    found = dense.generator_loss(teacher, student, labels, hard)
    assert float(found) == pytest.approx(total / 12, rel=1e-12)


def test_the_difficulty_of_an_image_is_a_constant_to_the_generator():
    teacher = logits(1).requires_grad_()
    loss = dense.generator_loss(teacher, teacher.detach(), torch.tensor([2]), hard=True)
    (found,) = torch.autograd.grad(loss, teacher)
    p = torch.tensor(softmax(teacher.detach().numpy()[0]))
    torch.testing.assert_close(found[0], (1 - p[2]) * (p - F.one_hot(torch.tensor(2), 5)))


@pytest.mark.parametrize("temperature", [1.0, 4.0, 20.0])
def test_the_distillation_loss_is_the_naive_sum(temperature):
    teacher, student = logits(9), logits(9, seed=1)
    pairs = zip(teacher.numpy() / temperature, student.numpy() / temperature, strict=True)
    total = sum(kl(softmax(t), softmax(s)) for t, s in pairs)
    found = dense.distillation_loss(student, teacher, temperature)
    assert float(found) == pytest.approx(temperature**2 * total / 9, rel=1e-9)
    assert float(dense.distillation_loss(teacher, teacher, temperature)) == 0


def test_certain_networks_give_finite_losses():
    teacher, student = torch.tensor([[1e4, 0.0], [0.0, 1e4]]), torch.tensor([[0.0, 1e4]] * 2)
    assert torch.isfinite(dense.generator_loss(teacher, student, torch.tensor([0, 0]), True))
    assert torch.isfinite(dense.distillation_loss(student, teacher, 1.0))


def test_the_ensemble_is_the_weighted_sum():
    payload, weights = clients(), torch.tensor([0.2, 0.0, 0.7], dtype=torch.float64)
    x = torch.rand(4, 1, 8, 8, dtype=torch.float64)
    right = plain_ensemble(x, payload, weights)
    torch.testing.assert_close(dense.ensemble(CNN, payload, x, weights), right)


def test_clients_with_samples_vote_equally():
    payload = clients(4)
    payload["conv1.bias"][2, 0] = torch.nan
    chosen, weights = dense.voters(payload, [7, 1, 0, 100])
    assert weights.tolist() == pytest.approx([1 / 3] * 3)
    for name, value in payload.items():
        assert torch.equal(chosen[name], value[[0, 1, 3]])
    with pytest.raises(ValueError, match=r"^payload: client 2 is not finite; allowed are finite"):
        dense.voters(payload, [1, 1, 1, 1])
    for samples in ([0, 0, 0, 0], [1, 1], []):
        with pytest.raises(ValueError, match=r"^samples=.*: allowed are counts of 4 clients"):
            dense.voters(payload, samples)


@pytest.mark.parametrize("batch", [2, 5])
def test_the_generator_is_that_of_torch_modules(batch):
    width = 4
    drawn = dense.draw_generator(CNN, width, np.random.default_rng(0))
    model = nn.Sequential(
        nn.Linear(256, 2 * width * 4),
        nn.Unflatten(1, (2 * width, 2, 2)),
        nn.BatchNorm2d(2 * width),
        nn.Upsample(scale_factor=2),
        nn.Conv2d(2 * width, 2 * width, 3, padding=1),
        nn.BatchNorm2d(2 * width),
        nn.LeakyReLU(0.2),
        nn.Upsample(scale_factor=2),
        nn.Conv2d(2 * width, width, 3, padding=1),
        nn.BatchNorm2d(width),
        nn.LeakyReLU(0.2),
        nn.Conv2d(width, 1, 3, padding=1),
        nn.Tanh(),
    ).double()
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), drawn.values(), strict=True):
            parameter.copy_(value)
    z = torch.randn(batch, 256, dtype=torch.float64)
    torch.testing.assert_close(dense.generate(drawn, z, CNN), model(z))


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 13, 28])
def test_generated_images_fit_the_network(size):
    cnn = Cnn(3, size, 3, (4,))
    drawn = dense.draw_generator(cnn, 3, np.random.default_rng(0))
    images = dense.generate(drawn, torch.randn(2, 256), cnn)
    assert images.shape == (2, 3, size, size)
    assert images.abs().max() <= 1


@pytest.mark.parametrize("hard", [False, True])
def test_synthesis_is_adam_on_generator_and_noise(hard, monkeypatch):
    payload, student = clients(), one(clients(1, seed=9))
    weights = torch.full((3,), 1 / 3, dtype=torch.float64)
    seen, draw = [], dense.draw_generator

    def spy(cnn, width, rng):
        drawn = draw(cnn, width, rng)
        again = draw(cnn, width, dense.seeds.stream(1, "generator", 2, dense.WEIGHTS))
        assert all(torch.equal(drawn[name], again[name]) for name in drawn)
        seen.append({name: value.clone() for name, value in drawn.items()})
        return drawn

    monkeypatch.setattr(dense, "draw_generator", spy)
    options = {"width": 4, "batch": 6, "seed": 1, "epoch": 2, "hard": hard}
    images, labels = dense.synthesise(CNN, payload, weights, student, steps=8, **options)
    rng = dense.seeds.stream(1, "generator", 2, dense.SAMPLES)
    noise = torch.tensor(rng.standard_normal((6, 256))).requires_grad_()
    assert labels.tolist() == rng.integers(5, size=6).tolist()
    leaves = {name: value.requires_grad_() for name, value in seen[0].items()}
    rule = torch.optim.Adam([*leaves.values(), noise], lr=1e-3, betas=(0.5, 0.999))
    tried = []
    for _ in range(8):
        x = dense.generate(leaves, noise, CNN)
        teacher = plain_ensemble(x, payload, weights)
        answers = plain(x, {name: value[0] for name, value in student.items()})
        loss = dense.generator_loss(teacher, answers, labels, hard)
        rule.zero_grad()
        loss.backward()
        rule.step()
        tried.append((float(loss.detach()), x.detach()))
    assert tried[-1][0] < tried[0][0]
    best = min(tried, key=lambda pair: pair[0])[1]
    torch.testing.assert_close(images, best, rtol=1e-6, atol=1e-6)


def test_the_student_takes_the_steps_of_torchs_sgd():
    student = one(clients(1))
    payload, weights = clients(), torch.full((3,), 1 / 3, dtype=torch.float64)
    own = {name: value[0].clone().requires_grad_() for name, value in student.items()}
    rule = torch.optim.SGD(own.values(), lr=0.01, momentum=0.9)
    lessons = []
    for _ in range(4):
        x = torch.rand(6, 1, 8, 8, dtype=torch.float64)
        lessons.append((x, dense.ensemble(CNN, payload, x, weights)))
    for x, teacher in lessons:
        rule.zero_grad()
        dense.distillation_loss(plain(x, own), teacher, 20.0).backward()
        rule.step()
    moments = optimizers.sgd(dense.MOMENTUM).init(student)
    dense.study(CNN, student, moments, lessons, lr=0.01, temperature=20.0)
    for name, value in own.items():
        torch.testing.assert_close(student[name][0], value.detach())


def test_a_pass_is_a_permutation_cut_into_batches():
    batches = dense.shuffled(23, 5, 0, seed=1, epoch=4)
    assert [len(b) for b in batches] == [5, 5, 5, 5, 3]
    assert sorted(torch.cat(batches).tolist()) == list(range(23))
    few = dense.shuffled(23, 5, 2, seed=1, epoch=4)
    assert [b.tolist() for b in few] == [b.tolist() for b in batches[:2]]
    other = dense.shuffled(23, 5, 0, seed=1, epoch=5)
    assert torch.cat(other).tolist() != torch.cat(batches).tolist()


def test_perturbed_images_step_along_the_sign_of_a_numeric_gradient():
    payload, weights = clients(), torch.tensor([0.5, 0.1, 0.9], dtype=torch.float64)
    rng = np.random.default_rng(0)
    images = torch.tensor(rng.uniform(-1, 1, (2, 1, 8, 8)))
    u = torch.tensor(rng.uniform(-1, 1, (2, 5)))
    moved = coboosting.perturbed(CNN, payload, images, weights, u) - images

    def aim(x):
        return float((u * (plain_ensemble(x, payload, weights) / 4).softmax(1)).sum())

    for place in np.ndindex(*images.shape):
        step = torch.zeros_like(images)
        step[place] = 1e-6
        slope = aim(images + step) - aim(images - step)
        assert float(moved[place]) == pytest.approx(8 / 255 * np.sign(slope))


@FAST
@given(
    weights=st.lists(st.floats(0, 1), min_size=1, max_size=5),
    epoch=st.integers(0, 300),
    seed=st.integers(0, 99),
)
def test_client_weights_take_a_sign_step_inside_the_unit_interval(weights, epoch, seed):
    rng = np.random.default_rng(seed)
    every = torch.tensor(rng.normal(0, 2, (len(weights), 7, 4)))
    labels = torch.tensor(rng.integers(4, size=7))
    w = torch.tensor(weights, dtype=torch.float64)
    found = coboosting.reweighted(every, labels, w, epoch)
    assert found.min() >= 0
    assert found.max() <= 1

    def loss(weights):
        return float(
            F.cross_entropy(sum(a * f for a, f in zip(weights, every, strict=True)), labels)
        )

    for c in range(len(weights)):
        e = torch.zeros_like(w)
        e[c] = 1e-6
        slope = loss(w + e) - loss(w - e)
        step = -0.01 * 0.99**epoch * np.sign(slope)
        assert float(found[c]) == pytest.approx(np.clip(weights[c] + step, 0, 1), abs=1e-12)


def test_client_weights_stay_in_the_unit_interval_all_along(monkeypatch):
    seen, step = [], coboosting.reweighted

    def spy(every, labels, weights, epoch):
        seen.append((epoch, found := step(every, labels, weights, epoch)))
        return found

    monkeypatch.setattr(coboosting, "reweighted", spy)
    monkeypatch.setattr(coboosting, "WEIGHT_RATE", 0.3)
    coboosting.distil(CNN, clients(), [1, 1, 1], **{**TINY, "epochs": 4})
    assert [epoch for epoch, _ in seen] == [0, 1, 1, 2, 2, 2, 3, 3, 3, 3]
    weights = torch.stack([found for _, found in seen])
    assert weights.min() >= 0
    assert weights.max() <= 1
    assert (weights[-1] != weights[0]).any()


def test_the_parts_of_co_boosting_meet(monkeypatch):
    """Hard images by the current weights; then new weights; then lessons by those, perturbed."""
    made, weighed, lessons = [], [], []
    synthesise, reweighted, study = dense.synthesise, coboosting.reweighted, dense.study

    def make(cnn, payload, weights, student, **options):
        assert options["hard"]
        equal = torch.full((3,), 1 / 3, dtype=torch.float64)
        assert torch.equal(weights, weighed[-1] if weighed else equal)
        made.append(synthesise(cnn, payload, weights, student, **options))
        return made[-1]

    def weigh(every, labels, weights, epoch):
        weighed.append(reweighted(every, labels, weights, epoch))
        return weighed[-1]

    def learn(cnn, student, moments, taught, **options):
        lessons.append((list(taught), weighed[-1]))
        study(cnn, student, moments, lessons[-1][0], **options)

    monkeypatch.setattr(dense, "synthesise", make)
    monkeypatch.setattr(coboosting, "reweighted", weigh)
    monkeypatch.setattr(dense, "study", learn)
    payload = clients()
    coboosting.distil(CNN, payload, [1, 1, 1], **TINY)
    assert [len(taught) for taught, _ in lessons] == [1, 2]
    (images, _), ((seen, teacher),) = made[0], lessons[0][0]
    order = dense.shuffled(6, 6, 0, seed=TINY["seed"], epoch=0)[0]
    steps = (seen - images[order]) / coboosting.PERTURBATION
    assert steps.abs().max() == pytest.approx(1)
    torch.testing.assert_close(steps, steps.round())
    torch.testing.assert_close(teacher, plain_ensemble(seen, payload, lessons[0][1]))


@METHODS
def test_distillation_is_seeded_and_leaves_the_clients_alone(method):
    payload = clients()
    before = {name: value.clone() for name, value in payload.items()}
    first = method.distil(CNN, payload, [1, 5, 2], **TINY)
    again = method.distil(CNN, payload, [1, 5, 2], **TINY)
    other = method.distil(CNN, payload, [1, 5, 2], **{**TINY, "seed": 4})
    start = CNN.initial([0], seed=3)
    for name, value in first.items():
        assert value.shape == (1, *CNN.shapes[name])
        assert not value.requires_grad
        assert torch.equal(value, again[name])
        assert not torch.equal(value, other[name])
        assert not torch.equal(value, start[name])
        assert torch.equal(payload[name], before[name])


@METHODS
def test_clients_without_samples_have_no_say(method):
    payload = clients(4)
    payload["head.bias"][1] = torch.nan
    found = method.distil(CNN, payload, [3, 0, 3, 3], **TINY)
    chosen = {name: value[[0, 2, 3]] for name, value in payload.items()}
    right = method.distil(CNN, chosen, [1, 1, 1], **TINY)
    assert all(torch.equal(found[name], right[name]) for name in right)


@METHODS
def test_steps_of_the_student_can_be_limited(method, monkeypatch):
    seen, loss = [], dense.distillation_loss

    def spy(student, teacher, temperature):
        seen.append((len(student), temperature))
        return loss(student, teacher, temperature)

    monkeypatch.setattr(dense, "distillation_loss", spy)
    method.distil(CNN, clients(), [1, 1, 1], **{**TINY, "epochs": 3})
    assert seen == [(6, TEMPERATURES[method])] * (1 + 2 + 3)
    seen.clear()
    method.distil(CNN, clients(), [1, 1, 1], **{**TINY, "epochs": 3}, student_steps=2)
    assert len(seen) == 1 + 2 + 2


@METHODS
@pytest.mark.parametrize(
    ("name", "value", "least"),
    [
        ("epochs", 0, 1),
        ("batch", 1, 2),
        ("generator_steps", 0, 1),
        ("generator_width", 0, 1),
        ("student_steps", -1, 0),
    ],
)
def test_counts_that_are_too_small_are_refused(method, name, value, least):
    with pytest.raises(ValueError, match=f"^{name}={value}: allowed are integers from {least}$"):
        method.distil(CNN, clients(), [1, 1, 1], **{**TINY, name: value})


@pytest.fixture(scope="module")
def digits():
    """Three clients trained on a third of the digits each, and the test images."""
    cnn = Cnn(10, 8, 1, (16, 32))
    (images, labels), (test, answers) = offline.digits(True), offline.digits(False)
    local = SimpleNamespace(
        optimizer="sgd",
        lr=0.05,
        prompt_lr=0.0,
        epochs=15,
        batch_size=20,
        momentum=0.9,
        mu=0.0,
        rho=0.0,
    )
    rows = np.array_split(np.random.default_rng(0).permutation(len(labels)), 3)
    payload, *_ = cohort.train(
        cnn,
        cnn.initial(range(3), seed=0),
        cohort.CohortData(cnn.inputs(images), torch.tensor(labels), rows),
        local,
        seed=0,
        round=0,
        clients=[0, 1, 2],
        active=np.ones(3, dtype=bool),
    )
    return cnn, payload, cnn.inputs(test), torch.tensor(answers)


@METHODS
def test_the_student_reads_digits_it_never_saw(method, digits):
    cnn, payload, test, answers = digits
    assert cnn.evaluate(payload, test, answers)[0].min() > 0.9 * len(answers)
    student = method.distil(
        cnn,
        payload,
        [467, 467, 466],
        epochs=16,
        lr=0.02,
        batch=64,
        seed=0,
        generator_steps=15,
        generator_width=8,
    )
    accuracy = float(cnn.evaluate(student, test, answers)[0]) / len(answers)
    assert accuracy > 0.5
