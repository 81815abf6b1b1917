"""The four shipped or computed domains: what they are, and that they stay what they are."""

import hashlib
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fedscale.data import offline, sources

SIZES = {
    offline.fashion: (6000, 1000, 28),
    offline.digits: (1400, 397, 32),
    offline.digits_m: (1400, 397, 32),
    offline.glyphs: (2000, 500, 32),
}


def _digest():
    pieces = [piece for domain in SIZES for train in (True, False) for piece in domain(train)]
    return hashlib.sha256(b"".join(piece.tobytes() for piece in pieces)).hexdigest()


@pytest.mark.parametrize("domain", SIZES)
@pytest.mark.parametrize("train", [True, False])
def test_shapes_types_and_balance(domain, train):
    size, side = SIZES[domain][not train], SIZES[domain][2]
    images, labels = domain(train)
    assert images.shape == (size, side, side, 3) and images.dtype == np.uint8
    assert labels.shape == (size,) and labels.dtype == np.int64
    held = np.bincount(labels)
    assert len(held) == 10
    assert np.ptp(held) == 0 or (domain in (offline.digits, offline.digits_m) and not train)


@pytest.mark.parametrize("domain", SIZES)
def test_no_image_is_in_both_splits(domain):
    train, test = ({image.tobytes() for image in domain(part)[0]} for part in (True, False))
    assert not train & test


def test_a_fresh_process_computes_the_same_bytes():
    run = [sys.executable, "-c", "import test_offline as t; print(t._digest())"]
    fresh = subprocess.run(
        run, capture_output=True, text=True, check=True, cwd=Path(__file__).parent
    )
    assert fresh.stdout.strip() == _digest()


def test_digits_are_all_of_scikit_learns_scans_upscaled_bilinearly():
    from scipy.ndimage import zoom
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = np.concatenate([offline.digits(part)[0] for part in (True, False)])[..., 0]
    labels = np.concatenate([offline.digits(part)[1] for part in (True, False)])
    assert np.array_equal(np.bincount(labels), np.bincount(bunch.target))
    # Means over 4x4 blocks of a bilinear upscaling keep the image's total to within the border.
    small = images.reshape(-1, 8, 4, 8, 4).mean(axis=(2, 4))
    scans = {scan.astype(np.uint8).tobytes() for scan in bunch.images}
    assert len(images) == len(bunch.images) == 1797 and len(scans) == 1797
    expected = zoom(bunch.images, (1, 4, 4), order=1, mode="nearest", grid_mode=True) * 255 / 16
    order, theirs = np.lexsort(small.reshape(1797, -1).T), expected.round()
    coarse = theirs.reshape(-1, 8, 4, 8, 4).mean(axis=(2, 4))
    again = np.lexsort(coarse.reshape(1797, -1).T)
    difference = images[order].astype(int) - theirs[again]
    assert np.abs(difference).max() <= 1


def _places(photograph, image, pixels):
    """Corners of the 32x32 crops that agree with an image in some pixels."""
    height, width = photograph.shape[0] - 31, photograph.shape[1] - 31
    fits = np.ones((height, width), bool)
    for row, column in pixels:
        shifted = photograph[row : row + height, column : column + width]
        fits &= (shifted == image[row, column]).all(axis=2)
    return np.argwhere(fits).tolist()


def test_digits_m_is_the_digit_blended_by_absolute_difference():
    from sklearn.datasets import load_sample_images

    photographs = load_sample_images().images
    for train in (True, False):
        digits, labels = offline.digits(train)
        blended, same = offline.digits_m(train)
        assert np.array_equal(labels, same)
        # Where the digit is black the photograph shows; some crop of one of them must fit.
        for index in (0, 7, 100):
            digit, image = digits[index].astype(int), blended[index].astype(int)
            black = digit[..., 0] == 0
            photograph, row, column = next(
                (photograph, *place)
                for photograph in photographs
                for place in _places(photograph, image, np.argwhere(black)[:60])
            )
            crop = photograph[row : row + 32, column : column + 32].astype(int)
            assert np.array_equal(np.abs(crop - digit), image)
            band, last = column // 80, (column + 31) // 80
            assert band == last and (band in (1, 5)) != train


def test_glyph_fonts_are_disjoint_and_have_the_letters():
    from fontTools.ttLib import TTFont
    from matplotlib import get_data_path

    train, test = (set(offline.GLYPH_FONTS[part]) for part in (True, False))
    assert not train & test
    for name in train | test:
        font = TTFont(Path(get_data_path()) / "fonts" / "ttf" / f"{name}.ttf")
        assert set(map(ord, offline.LETTERS)) <= set(font.getBestCmap())


def test_glyphs_as_rendered_here_are_those_of_the_sheet():
    """Exact with the FreeType that made the sheet; another may shade edges differently."""
    shipped = offline.glyphs(False)[0][..., 0].astype(int)
    assert np.abs(shipped - offline.render_glyphs(False)).mean() < 4


@pytest.mark.parametrize("train", [True, False])
def test_every_glyph_shows_a_letter_and_not_a_block(train):
    ink = offline.glyphs(train)[0][..., 0].mean(axis=(1, 2))
    assert ink.min() > 5 and ink.max() < 160


@pytest.mark.slow
@pytest.mark.skipif(sources.find("fmnist") is None, reason="the full Fashion-MNIST is not here")
def test_the_shipped_sheets_are_what_build_makes(tmp_path):
    from PIL import Image

    for path in offline.build(tmp_path):
        with Image.open(path) as made, Image.open(offline.ASSETS / path.name) as shipped:
            made, shipped = np.asarray(made).astype(int), np.asarray(shipped).astype(int)
        assert made.shape == shipped.shape
        assert np.abs(made - shipped).mean() < (1e-9 if path.stem == "fashion" else 4)


def test_the_assets_are_small_and_carry_their_licence():
    sizes = {path.name: path.stat().st_size for path in offline.ASSETS.iterdir()}
    assert set(sizes) == {"fashion.png", "glyphs.png", "LICENSE.fashion-mnist"}
    assert sum(sizes.values()) < 3.5e6
