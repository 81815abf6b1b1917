from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from timm.models.vision_transformer import VisionTransformer

from fedscale import seeds
from fedscale.local import cohort, memory
from fedscale.local.prompting import PromptLearner
from fedscale.models import backbone
from fedscale.models.prompted import Prompted

SPEC = backbone.BACKBONES["nano"]
SIZES = [9, 0, 14, 4, 7, 1]
CLASSES, WIDTH, COUNT, BATCH = 5, 24, 3, 4
ADAM = SimpleNamespace(
    optimizer="adam",
    lr=1e-2,
    prompt_lr=3e-2,
    epochs=2,
    batch_size=BATCH,
    momentum=0.0,
    mu=0.0,
    rho=0.01,
)
MOMENTUM = SimpleNamespace(
    optimizer="sgd",
    lr=1e-2,
    prompt_lr=3e-2,
    epochs=2,
    batch_size=BATCH,
    momentum=0.9,
    mu=0.0,
    rho=0.01,
)


@pytest.fixture(scope="module")
def module():
    torch.manual_seed(0)
    vit = VisionTransformer(
        img_size=32, patch_size=8, embed_dim=WIDTH, depth=3, num_heads=3, num_classes=0
    )
    for p in vit.parameters():
        p.data += 0.1 * torch.randn_like(p)
    return vit.eval().requires_grad_(False)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def any_model(request, module):
    return Prompted(module, SPEC, precision=request.param)


@pytest.fixture(scope="module")
def model(module):
    return Prompted(module, SPEC)


def payload(clients=6):
    """A payload that differs between clients, with heads away from zero."""
    rng = torch.Generator().manual_seed(1)
    return {
        "prompts": torch.randn(clients, COUNT, WIDTH, generator=rng),
        "head.weight": 0.3 * torch.randn(clients, CLASSES, WIDTH, generator=rng),
        "head.bias": 0.3 * torch.randn(clients, CLASSES, generator=rng),
    }


def data(model, sizes=SIZES):
    total = sum(sizes)
    rng = np.random.default_rng(2)
    images = rng.integers(0, 256, (total, 32, 32, 3), dtype=np.uint8)
    labels = torch.from_numpy(rng.integers(0, CLASSES, total))
    rows = np.split(rng.permutation(total), np.cumsum(sizes)[:-1])
    return cohort.CohortData(model.tokens(images), labels, rows)


def train(model, start, samples, settings=ADAM, clients=None, active=None, **options):
    clients = range(10, 10 + len(samples.rows)) if clients is None else clients
    active = np.ones(len(clients), dtype=bool) if active is None else active
    trained, stats, _ = cohort.train(
        PromptLearner(model),
        start,
        samples,
        settings,
        **{"seed": 3, "round": 2, "clients": clients, "active": active, **options},
    )
    return trained, stats


def only(samples, clients):
    return cohort.CohortData(samples.inputs, samples.labels, [samples.rows[c] for c in clients])


def pick(start, clients):
    return {name: value[list(clients)] for name, value in start.items()}


def plain_loss(module, tokens, labels, own):
    """Loss of one client's batch through timm's own blocks."""
    prompts = own["prompts"].expand(len(tokens), -1, -1)
    x = module.norm(module.blocks(torch.cat([tokens[:, :1], prompts, tokens[:, 1:]], 1)))
    return F.cross_entropy(F.linear(x[:, 0], own["head.weight"], own["head.bias"]), labels)


def relative(a, b):
    return float((a - b).norm() / b.norm())


def test_gradients_of_one_step_are_the_plain_loops(model, module):
    samples, start = data(model), payload()
    clients = [c for c, size in enumerate(SIZES) if size]
    flat = torch.from_numpy(np.concatenate([samples.rows[c] for c in clients]))
    counts = [SIZES[c] for c in clients]
    tokens, labels = samples.inputs[flat], samples.labels[flat]
    found, losses = PromptLearner(model).gradients(pick(start, clients), tokens, labels, counts)
    parts = zip(tokens.split(counts), labels.split(counts), strict=True)
    for i, (x, y) in enumerate(parts):
        own = {k: v[clients[i]].clone().requires_grad_() for k, v in start.items()}
        loss = plain_loss(module, x, y, own)
        assert float(losses[i]) == pytest.approx(float(loss.detach()), rel=1e-5)
        for k, right in zip(own, torch.autograd.grad(loss, list(own.values())), strict=True):
            assert relative(found[k][i], right) < 1e-5


@pytest.mark.parametrize("settings", [ADAM, MOMENTUM], ids=["adam", "momentum"])
def test_training_is_one_plain_run_per_client(model, module, settings):
    samples, start = data(model), payload()
    before = {k: v.clone() for k, v in start.items()}
    trained, stats = train(model, start, samples, settings)
    assert all(torch.equal(start[k], before[k]) for k in start)
    for c, rows in enumerate(samples.rows):
        own = {k: v[c].clone().requires_grad_() for k, v in start.items()}
        groups = [
            {"params": [own["prompts"]], "lr": settings.prompt_lr},
            {"params": [own["head.weight"], own["head.bias"]], "lr": settings.lr},
        ]
        if settings.optimizer == "adam":
            optimizer = torch.optim.Adam(groups)
        else:
            optimizer = torch.optim.SGD(groups, momentum=settings.momentum)
        rng, losses = seeds.stream(3, "batches", 2, 10 + c), []
        for _ in range(settings.epochs):
            order = torch.from_numpy(rows[rng.permutation(len(rows))])
            for batch in order.split(BATCH) if len(order) else ():
                optimizer.zero_grad()
                loss = plain_loss(module, samples.inputs[batch], samples.labels[batch], own)
                loss.backward()
                optimizer.step()
                losses.append(float(loss.detach()))
        assert int(stats.steps[c]) == len(losses)
        if not losses:
            assert torch.isnan(stats.loss[c])
            continue
        assert float(stats.loss[c]) == pytest.approx(np.mean(losses), rel=1e-4)
        for k, right in own.items():
            moved = right.detach() - start[k][c]
            assert relative(trained[k][c] - start[k][c], moved) < 1e-3


def test_a_client_does_not_depend_on_who_shares_its_cohort(any_model):
    """To the bit on the machines seen; the tolerance is for kernels that mind the row count."""
    samples, start = data(any_model), payload()
    together, stats = train(any_model, start, samples, MOMENTUM)
    tolerance = 1e-5 if any_model.precision == "float32" else 1e-2
    for clients in ([0], [5], [2, 3], [4, 0, 5]):
        numbers = [10 + c for c in clients]
        mine, few = pick(start, clients), only(samples, clients)
        apart, alone = train(any_model, mine, few, MOMENTUM, clients=numbers)
        for k in start:
            assert relative(apart[k] - mine[k], together[k][clients] - mine[k]) < tolerance
        torch.testing.assert_close(alone.loss, stats.loss[clients], rtol=tolerance, atol=0)


@pytest.mark.parametrize("chunk", [1, 3, 4, 9, 10**6])
def test_the_chunk_does_not_matter(model, chunk):
    samples, start = data(model), payload()
    clients = [c for c, size in enumerate(SIZES) if size]
    flat = torch.from_numpy(np.concatenate([samples.rows[c] for c in clients]))
    args = (samples.inputs[flat], samples.labels[flat], [SIZES[c] for c in clients])
    whole, losses = PromptLearner(model).gradients(pick(start, clients), *args)
    found, other = PromptLearner(model).gradients(pick(start, clients), *args, chunk=chunk)
    torch.testing.assert_close(other, losses, rtol=1e-6, atol=0)
    for k in whole:
        assert relative(found[k], whole[k]) < 2e-6


def test_projected_tokens_give_the_same(any_model):
    samples, start = data(any_model), payload()
    wide = cohort.CohortData(any_model.project(samples.inputs), samples.labels, samples.rows)
    a, b = train(any_model, start, samples)[0], train(any_model, start, wide)[0]
    for k in start:
        torch.testing.assert_close(a[k], b[k], rtol=1e-6, atol=1e-6)


def test_every_sample_once_per_epoch():
    rows = np.arange(100, 111)
    options = {"batch_size": 4, "seed": 0, "round": 1, "client": 7}
    cuts = cohort.batches(rows, epochs=3, **options)
    assert [len(c) for c in cuts] == [4, 4, 3] * 3
    epochs = [np.concatenate(cuts[i : i + 3]) for i in (0, 3, 6)]
    for epoch in epochs:
        assert sorted(epoch) == list(rows)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    # Fewer epochs are a prefix; another key is another order.
    short = cohort.batches(rows, epochs=1, **options)
    assert all(np.array_equal(a, b) for a, b in zip(short, cuts, strict=False))
    for change in ({"round": 2}, {"client": 8}, {"seed": 1}):
        other = cohort.batches(rows, epochs=1, **{**options, **change})
        assert not np.array_equal(np.concatenate(other), epochs[0])


def test_the_batches_of_a_round_are_the_keyed_ones(model, monkeypatch):
    """The images a step sees are those of `batches`, in order of clients by their steps."""
    samples, start, seen = data(model), payload(), []
    plain = PromptLearner.gradients

    def spy(learner, params, tokens, labels, counts, **options):
        seen.append((tokens, labels, list(counts)))
        return plain(learner, params, tokens, labels, counts, **options)

    monkeypatch.setattr(PromptLearner, "gradients", spy)
    train(model, start, samples)
    assert [counts for _, _, counts in seen] == [
        [4, 4, 4, 4, 1],
        [4, 4, 3, 4, 1],
        [4, 1, 4],
        [2, 4, 3],
        [4, 4],
        [4, 1],
        [4],
        [2],
    ]
    longest = cohort.batches(
        samples.rows[2], batch_size=BATCH, epochs=2, seed=3, round=2, client=12
    )
    for (tokens, labels, counts), batch in zip(seen, longest, strict=True):
        assert torch.equal(tokens[: counts[0]], samples.inputs[torch.from_numpy(batch)])
        assert torch.equal(labels[: counts[0]], samples.labels[torch.from_numpy(batch)])


def test_idle_and_empty_clients_keep_their_state(model):
    samples, start = data(model), payload()
    active = np.array([True, True, False, True, False, True])
    trained, stats = train(model, start, samples, active=active)
    for c, size in enumerate(SIZES):
        moved = active[c] and size > 0
        assert bool(stats.steps[c] > 0) == moved
        assert bool(torch.isnan(stats.loss[c])) == (not moved)
        assert torch.equal(trained["prompts"][c], start["prompts"][c]) == (not moved)
        assert torch.equal(trained["head.bias"][c], start["head.bias"][c]) == (not moved)
    assert not stats.diverged.any()
    none, stats = train(model, start, samples, active=np.zeros(6, dtype=bool))
    assert all(torch.equal(none[k], start[k]) for k in start)
    assert stats.steps.tolist() == [0] * 6


def test_a_diverged_client_is_reported_and_harms_nobody(any_model):
    samples, start = data(any_model), payload()
    right, _ = train(any_model, start, samples)
    broken = {k: v.clone() for k, v in start.items()}
    broken["prompts"][2, 0, 0] = torch.nan
    trained, stats = train(any_model, broken, samples)
    assert stats.diverged.tolist() == [c == 2 for c in range(6)]
    assert torch.isnan(trained["prompts"][2]).any()
    others = [c for c in range(6) if c != 2]
    for k in start:
        torch.testing.assert_close(trained[k][others], right[k][others], rtol=1e-6, atol=1e-6)


def test_a_huge_rate_ends_in_a_reported_loss(model):
    settings = SimpleNamespace(**{**vars(MOMENTUM), "lr": 1e38, "prompt_lr": 0.0})
    _, stats = train(model, payload(), data(model), settings)
    assert stats.diverged[[0, 2]].all()


def test_prompts_move_with_the_other_rate_when_theirs_is_zero(model):
    samples, start = data(model), payload()
    zero, same = (SimpleNamespace(**{**vars(ADAM), "prompt_lr": r}) for r in (0.0, ADAM.lr))
    a, b = train(model, start, samples, zero)[0], train(model, start, samples, same)[0]
    assert all(torch.equal(a[k], b[k]) for k in a)
    assert not torch.equal(a["prompts"], train(model, start, samples)[0]["prompts"])


def test_the_optimizer_starts_afresh_every_round(model):
    samples, start = data(model), payload()
    first, _ = train(model, start, samples, MOMENTUM)
    again, _ = train(model, start, samples, MOMENTUM)
    assert all(torch.equal(first[k], again[k]) for k in first)


@pytest.mark.parametrize("chunk", [None, 1, 5])
def test_evaluation_is_the_plain_count(any_model, module, chunk):
    samples, own = data(any_model), payload()
    tokens, labels = samples.inputs, samples.labels
    for x in (tokens, any_model.project(tokens)):
        correct, loss = PromptLearner(any_model).evaluate(own, x, labels, chunk=chunk)
        for c in range(len(SIZES)):
            with torch.no_grad():
                h = any_model.features(tokens, own["prompts"][c : c + 1], [len(tokens)])
                logits = F.linear(h, own["head.weight"][c], own["head.bias"][c])
            assert int(correct[c]) == int((logits.argmax(1) == labels).sum())
            assert float(loss[c]) == pytest.approx(float(F.cross_entropy(logits, labels)), rel=1e-5)
            if any_model.precision == "float32":
                with torch.no_grad():
                    right = plain_loss(module, tokens, labels, {k: v[c] for k, v in own.items()})
                assert float(loss[c]) == pytest.approx(float(right), rel=1e-5)


def test_evaluation_of_a_diverged_client():
    torch.manual_seed(0)
    vit = VisionTransformer(
        img_size=32, patch_size=8, embed_dim=WIDTH, depth=1, num_heads=3, num_classes=0
    )
    model = Prompted(vit, SPEC)
    own = payload(2)
    own["prompts"][0] = torch.inf
    samples = data(model)
    _, loss = PromptLearner(model).evaluate(own, samples.inputs, samples.labels)
    assert not torch.isfinite(loss[0])
    assert torch.isfinite(loss[1])


def test_initial_payload(model):
    sizes = {"count": 2, "patch": 4, "num_classes": 3}
    shared = PromptLearner(model).initial(range(4), **sizes, seed=5)
    bound = (6 / (3 * 16 + WIDTH)) ** 0.5
    assert shared["prompts"].shape == (4, 2, WIDTH)
    assert shared["head.weight"].shape == (4, 3, WIDTH)
    assert shared["head.bias"].shape == (4, 3)
    assert all(value.dtype == torch.float32 for value in shared.values())
    assert 0.8 * bound < float(shared["prompts"].abs().max()) <= bound
    assert not shared["head.weight"].any()
    assert (shared["prompts"] == shared["prompts"][0]).all()
    own = PromptLearner(model).initial(range(4), **sizes, init="per_client", seed=5)["prompts"]
    assert len({tuple(p.flatten().tolist()) for p in own}) == 4
    block = PromptLearner(model).initial([2, 3], **sizes, init="per_client", seed=5)["prompts"]
    assert torch.equal(block, own[2:])
    other = PromptLearner(model).initial(range(4), **sizes, seed=6)["prompts"]
    assert not torch.equal(other, shared["prompts"])


def test_memory_is_left_alone_without_glibc(monkeypatch):
    assert isinstance(memory.keep_freed_memory(), bool)
    monkeypatch.setattr(memory.platform, "libc_ver", lambda: ("", ""))
    assert memory.keep_freed_memory() is False
