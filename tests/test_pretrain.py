"""Pre-training of `nano`: its images, its loop, its file, its probe."""

import dataclasses
import subprocess
import sys

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors import safe_open

from fedscale.models import backbone, formula, pretrain, probe
from fedscale.models.pretrain import Recipe
from fedscale.seeds import stream

HASH = (
    "import hashlib; from fedscale.models import formula as f; "
    "x, y = f.batch(f.shapes(3), 3, 7, 24, 0.2); "
    "print(hashlib.sha256((x * 255).round().byte().numpy().tobytes() + y.numpy().tobytes())"
    ".hexdigest())"
)


@pytest.fixture(scope="module")
def known():
    return formula.shapes(0)


def test_a_batch_depends_on_seed_and_step_alone(known):
    images, labels = formula.batch(known, 0, 5, 32)
    formula.batch(known, 0, 6, 32)
    again, same_labels = formula.batch(known, 0, 5, 32)
    assert torch.equal(images, again) and torch.equal(labels, same_labels)
    for seed, step in ((0, 6), (1, 5)):
        other, other_labels = formula.batch(known, seed, step, 32)
        assert not torch.equal(images, other) and not torch.equal(labels, other_labels)
    assert not torch.equal(known.radius, formula.shapes(1).radius)


def test_a_fresh_process_makes_the_same_images():
    runs = [
        subprocess.run([sys.executable, "-c", HASH], capture_output=True, text=True, check=True)
        for _ in range(2)
    ]
    assert runs[0].stdout == runs[1].stdout != ""


def test_images_and_labels_have_their_ranges(known):
    images, labels = formula.batch(known, 0, 1, 200)
    assert images.shape == (200, 3, 32, 32) and images.dtype == torch.float32
    assert labels.shape == (200,) and labels.dtype == torch.int64
    assert images.min() >= 0 and images.max() <= 1 and images.isfinite().all()
    assert labels.min() >= 0 and labels.max() < formula.CLASSES == 340
    flat = images.flatten(1).std(dim=1)
    assert (flat > 0.01).float().mean() > 0.95, "blank images"


def test_easy_images_are_bright_objects_on_black(known):
    images, _ = formula.batch(known, 0, 1, 100, easy=1.0)
    assert torch.equal(images[:, 0], images[:, 1]) and torch.equal(images[:, 0], images[:, 2])
    assert images[:, 0, ::31, ::31].mean() < 0.1 < images[:, 0, 8:24, 8:24].mean()
    mixed, _ = formula.batch(known, 0, 1, 400, easy=0.25)
    grey = (mixed[:, 0] == mixed[:, 1]).flatten(1).all(1)
    plain = grey & (mixed[:, 0, 0, 0] < 0.05)
    assert 0.15 < plain.float().mean() < 0.5


def test_labels_are_balanced_within_contours_and_symbols():
    labels = formula.labels_of(stream(0, "pretrain", 1), 170_000)
    held = np.bincount(labels, minlength=formula.CLASSES)
    contours, symbols = held[: formula.CONTOURS], held[formula.CONTOURS :]
    assert symbols.sum() / held.sum() == pytest.approx(formula.SYMBOL_SHARE, abs=0.01)
    for part in (contours, symbols):
        # Counts of a fair draw have variance of about their mean.
        assert part.var() < 2 * part.mean()
        assert np.abs(part - part.mean()).max() < 6 * np.sqrt(part.mean())


def test_no_symbol_is_a_letter_of_the_glyphs_or_a_digit():
    forbidden = set("ABCDEFGHIJabcdefghij0123456789OolI")
    assert not forbidden & set(formula.SYMBOLS)
    assert len(set(formula.SYMBOLS)) == len(formula.SYMBOLS) == 40


def test_no_dataset_is_read():
    """The generator loads no module that could hand it an image of a data set."""
    code = (
        "import sys; from fedscale.models import formula as f; f.batch(f.shapes(0), 0, 1, 4); "
        "other = ('sklearn', 'torchvision', 'fedscale.data'); "
        "print([name for name in sys.modules if name.startswith(other)])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_contours_are_closed_positive_and_their_slope_is_the_derivative(known):
    radius, slope = known.radius.double(), known.slope.double()
    assert radius.shape == slope.shape == (300, 256)
    assert (radius > 0).all() and torch.allclose(radius.max(dim=1).values, torch.ones(300).double())
    step = 2 * torch.pi / formula.ANGLES
    central = (radius.roll(-1, 1) - radius.roll(1, 1)) / (2 * step)
    # The highest harmonic is 8: central differences lose a factor of sinc(8·2π/256) = 0.994.
    assert (central - slope).abs().max() < 0.03 * slope.abs().max()
    apart = torch.cdist(radius, radius) + torch.eye(300) * 9
    assert apart.min() > 0.1, "two classes have one outline"


def test_a_circles_distance_is_exact(known):
    circle = dataclasses.replace(known, radius=torch.ones(1, 256), slope=torch.zeros(1, 256))
    x, y = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    distance = formula._contour(circle, torch.tensor([0]), x, y)
    assert torch.allclose(distance, 1 - torch.hypot(x, y), atol=1e-6)


def test_symbols_are_signed_distances(known):
    fields = known.symbols[:, 0]
    assert known.first[0] == 0 and known.first[-1] == len(fields)
    assert (np.diff(known.first) >= 8).all(), "a symbol has hardly any font"
    assert (fields[:, 0, 0] < 0).all() and (fields.amax((1, 2)) > 0).all()
    # Half the larger side is 1: no ink is further than that from the centre, nor deeper.
    assert fields.max() < 1
    along = (fields[:, :, 1:] - fields[:, :, :-1]).abs()
    # Cells are 2 pixels wide; pixels are counted from their middles, 1 more at the outline.
    assert along.max() <= 3 / formula._HALF + 1e-5, "steeper than a distance can be"


def test_the_rate_rises_to_its_peak_and_falls_to_zero():
    recipe = Recipe(images=256_000, lr=2e-3)
    rates = [recipe.rate(step) for step in range(1, recipe.steps + 1)]
    assert recipe.steps == 1000 and np.argmax(rates) == 39
    assert max(rates) == pytest.approx(2e-3) and rates[-1] == pytest.approx(0, abs=1e-12)
    assert np.all(np.diff(rates[:40]) > 0) and np.all(np.diff(rates[39:]) < 0)


def test_easy_images_give_way_to_hard_ones():
    recipe = Recipe(images=256_000)
    shares = [recipe.easy_share(step) for step in range(1, recipe.steps + 1)]
    assert shares[0] == 1 and shares[-1] == pytest.approx(recipe.easy)
    assert np.all(np.diff(shares) <= 0)


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_twenty_steps_lower_the_loss(monkeypatch, one_thread):
    """On the same 32 images at every step, so that the fall is not a matter of luck."""
    drawn = formula.batch

    def fixed(known, seed, step, count, easy):
        return drawn(known, seed, 1, count, easy)

    monkeypatch.setattr(formula, "batch", fixed)
    losses, hits = [], []

    def on_step(step, loss, accuracy, model):
        losses.append(loss)
        hits.append(accuracy)

    recipe = Recipe(images=20 * 32, batch=32, seed=2)
    model = pretrain.train(recipe, on_step)
    assert len(losses) == 20
    images, _ = drawn(formula.shapes(2), 2, 1, 32, recipe.easy_share(1))
    drawing = float(pretrain.thumbnails(images).square().mean())
    first = (1 + recipe.patches) * np.log(340) + recipe.thumbnail * drawing
    assert losses[0] == pytest.approx(first, rel=1e-3)
    assert losses[-1] < 0.7 * losses[0] and hits[-1] > hits[0]
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert not any(module.training for module in model.modules())


def test_training_is_reproducible_and_leaves_the_random_state_alone(one_thread):
    before = torch.random.get_rng_state()
    recipe = Recipe(images=3 * 8, batch=8)
    first, second = (pretrain.train(recipe).state_dict() for _ in range(2))
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert torch.equal(before, torch.random.get_rng_state())


def test_the_command_writes_weights_that_load_and_their_notes(tmp_path):
    out = tmp_path / "new folder" / "w.safetensors"
    options = ["--images", "12", "--batch", "4", "--seed", "5", "--every", "2", "--out", str(out)]
    done = CliRunner().invoke(pretrain.main, options)
    assert done.exit_code == 0, done.output
    assert [path.name for path in out.parent.iterdir()] == ["w.safetensors"]
    assert out.stat().st_size <= 5 * 2**20
    notes = backbone.metadata(out)
    assert notes["seed"] == "5" and notes["images"] == "12" and notes["steps"] == "3 of 3"
    assert "--images 12" in notes["command"] and notes["torch"] == torch.__version__
    with safe_open(out, framework="pt") as stored:
        assert {stored.get_tensor(key).dtype for key in stored.keys()} == {torch.float16}  # noqa: SIM118
    assert backbone.build("nano", out).pos_embed.dtype == torch.float32


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--images", "0"], "--images"),
        (["--lr", "0"], "--lr"),
        (["--seed", "-1"], "--seed"),
        (["--probe", "absent.safetensors"], "absent.safetensors: there is no such file"),
    ],
)
def test_bad_options_end_in_one_line(options, words):
    done = CliRunner().invoke(pretrain.main, options)
    assert done.exit_code in (1, 2)
    assert words in done.output.splitlines()[-1] and "Traceback" not in done.output


def test_the_probe_finds_what_is_linear_and_nothing_else():
    rng = np.random.default_rng(0)
    labels = np.arange(600) % 3
    x = rng.normal(size=(600, 5)) * 100
    x[:, 0] += 1000 * labels
    accuracy, strength = probe.linear_probe(x[:400], labels[:400], x[400:], labels[400:])
    assert accuracy > 0.98 and strength in probe.STRENGTHS
    noise = rng.normal(size=(600, 5))
    accuracy, strength = probe.linear_probe(noise[:400], labels[:400], noise[400:], labels[400:])
    assert 0.2 < accuracy < 0.47


def test_trained_features_beat_untrained_ones():
    models = {"untrained": backbone.build("nano", "random"), "trained": backbone.build("nano")}
    rows = probe.probe("nano", models, ("digits_m", "glyphs"), train_size=600, test_size=300)
    assert [row.domain for row in rows] == ["digits_m", "glyphs"]
    for row in rows:
        assert row.accuracy["trained"] > row.accuracy["untrained"] + 0.1, row
    drawn = probe.table(rows)
    assert drawn.row_count == 2 and [column.header for column in drawn.columns][3:] == [*models]
