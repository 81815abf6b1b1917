"""The four image domains that need neither network nor root.

fashion and glyphs are shipped as PNG sheets of tiles, sorted by class; digits and digits_m are
computed from what scikit-learn bundles. `python -m fedscale.data.offline --build` remakes the
sheets from the full Fashion-MNIST and from matplotlib's fonts.
"""

from __future__ import annotations

import sys
from functools import lru_cache
from pathlib import Path

import numpy as np

from fedscale import seeds
from fedscale.data.formats import LETTERS, Images, Labels, rgb
from fedscale.data.shares import balanced

ASSETS = Path(__file__).parent / "assets"
FASHION = {True: 6000, False: 1000}
DIGITS = {True: 1400, False: 397}
GLYPHS = {True: 2000, False: 500}
"""Images by "is training"; every domain has 10 classes, all balanced but the digits' test."""

GLYPH_FONTS = {
    True: [
        "DejaVuSans",
        "DejaVuSans-Bold",
        "DejaVuSans-Oblique",
        "DejaVuSans-BoldOblique",
        "DejaVuSansMono",
        "DejaVuSansMono-Bold",
        "DejaVuSansMono-Oblique",
        "DejaVuSansMono-BoldOblique",
        "DejaVuSerif",
        "DejaVuSerif-Bold",
        "DejaVuSerif-Italic",
        "DejaVuSerif-BoldItalic",
        "cmr10",
        "cmb10",
        "cmti10",
        "cmmi10",
        "cmtt10",
        "cmsy10",
    ],
    False: ["STIXGeneral", "STIXGeneralBol", "STIXGeneralItalic", "STIXGeneralBolIta", "cmss10"],
}
"""matplotlib's fonts whose A-J are letters; STIX and Computer Modern Sans are for tests only."""

_CROPS, _GLYPHS = 1, 2  # keys of the random streams, beside 0 for balanced subsets


def fashion(train: bool) -> tuple[Images, Labels]:
    """Return the shipped balanced subset of Fashion-MNIST: images (N, 28, 28, 3), labels (N,)."""
    return _from_sheet("fashion", FASHION, train)


def digits(train: bool) -> tuple[Images, Labels]:
    """Return scikit-learn's optical digits, 8x8 -> 32x32 bilinearly: (N, 32, 32, 3), (N,).

    The split holds 140 scans of each digit for training (1,400) and the other 397 for testing.
    """
    gray, labels = _digits()[train]
    return rgb(gray), labels


@lru_cache(maxsize=2)
def digits_m(train: bool) -> tuple[Images, Labels]:
    """Return the same digits, same split, over photographs: |crop - digit|, (N, 32, 32, 3), (N,).

    Crops come from scikit-learn's two photographs, cut into eight vertical bands: two bands serve
    the test images and the other six the training images, so that no pixel serves both.
    """
    from sklearn.datasets import load_sample_images

    gray, labels = _digits()[train]
    photographs = np.stack(load_sample_images().images)
    count, height, width = photographs.shape[:3]
    band, size = width // 8, gray.shape[1]
    bands = np.array([0, 2, 3, 4, 6, 7] if train else [1, 5])
    rng = seeds.stream(0, "images", round=_CROPS, client=int(train))
    which = rng.integers(count, size=len(gray))
    top = rng.integers(height - size + 1, size=len(gray))
    left = rng.choice(bands, len(gray)) * band + rng.integers(band - size + 1, size=len(gray))
    rows = top[:, None, None] + np.arange(size)[:, None]
    columns = left[:, None, None] + np.arange(size)
    crops = photographs[which[:, None, None], rows, columns].astype(np.int16)
    images = np.abs(crops - gray[..., None]).astype(np.uint8)
    images.flags.writeable = False
    return images, labels


def glyphs(train: bool) -> tuple[Images, Labels]:
    """Return the shipped letters A-J in matplotlib's fonts: images (N, 32, 32, 3), labels (N,).

    The test fonts serve no training image, see `GLYPH_FONTS`.
    """
    return _from_sheet("glyphs", GLYPHS, train)


@lru_cache(maxsize=1)
def _digits() -> dict[bool, tuple[Images, Labels]]:
    from sklearn.datasets import load_digits

    bunch = load_digits()
    labels = bunch.target.astype(np.int64)
    # Weights of half-pixel-centred bilinear upscaling are multiples of 1/8, so integers do it
    # exactly, whatever the BLAS.
    position = np.clip((np.arange(32) + 0.5) / 4 - 0.5, 0, 7)
    weight = np.maximum(0, 8 - np.abs(8 * position[:, None] - 8 * np.arange(8))).astype(np.int64)
    scaled = np.einsum("ia,nab,jb->nij", weight, bunch.images.astype(np.int64), weight)
    gray = ((scaled * 255 + 512) // 1024).astype(np.uint8)
    chosen = balanced(labels, DIGITS[True])
    others = np.setdiff1d(np.arange(len(labels)), chosen)
    labels.flags.writeable = False
    return {True: (gray[chosen], labels[chosen]), False: (gray[others], labels[others])}


@lru_cache(maxsize=2)
def _sheet(name: str) -> Images:
    from PIL import Image

    with Image.open(ASSETS / f"{name}.png") as sheet:
        return np.asarray(sheet)


def _from_sheet(name: str, sizes: dict[bool, int], train: bool) -> tuple[Images, Labels]:
    tile = 28 if name == "fashion" else 32
    sheet = _sheet(name)
    rows, columns = sheet.shape[0] // tile, sheet.shape[1] // tile
    tiles = sheet.reshape(rows, tile, columns, tile).transpose(0, 2, 1, 3).reshape(-1, tile, tile)
    gray = tiles[: sizes[True]] if train else tiles[sizes[True] :]
    return rgb(gray), np.repeat(np.arange(10), sizes[train] // 10)


def render_glyphs(train: bool) -> Images:
    """Render the glyphs domain, sorted by letter: gray images (N, 32, 32).

    Each letter is drawn at four times its size (22-30 pixels high type), thickened by up to one
    pixel, centred, turned by up to 15 degrees, shifted by up to 2 pixels, and averaged down.
    The bytes depend on the version of Pillow's FreeType, hence the shipped sheet.
    """
    from matplotlib import get_data_path
    from PIL import Image, ImageDraw, ImageFont

    folder = Path(get_data_path()) / "fonts" / "ttf"
    fonts, total = GLYPH_FONTS[train], GLYPHS[train]
    rng = seeds.stream(0, "images", round=_GLYPHS, client=int(train))
    images = np.empty((total, 32, 32), np.uint8)
    for index in range(total):
        letter = LETTERS[index * len(LETTERS) // total]
        font = ImageFont.truetype(
            folder / f"{fonts[index % len(fonts)]}.ttf", int(rng.integers(88, 121))
        )
        stroke = int(rng.integers(0, 5))
        canvas = Image.new("L", (128, 128))
        draw = ImageDraw.Draw(canvas)
        x0, y0, x1, y1 = draw.textbbox((0, 0), letter, font=font, stroke_width=stroke)
        corner = (64 - (x0 + x1) / 2, 64 - (y0 + y1) / 2)
        draw.text(corner, letter, fill=255, font=font, stroke_width=stroke)
        shift = (int(rng.integers(-8, 9)), int(rng.integers(-8, 9)))
        turned = canvas.rotate(
            rng.uniform(-15, 15), resample=Image.Resampling.BICUBIC, translate=shift
        )
        images[index] = np.asarray(turned.reduce(4))
    return images


def build(folder: Path = ASSETS) -> list[Path]:
    """Write the sheets fashion.png and glyphs.png into a folder; return their paths.

    Raises:
        DataUnavailable: the full Fashion-MNIST cannot be had here.
    """
    from PIL import Image

    from fedscale.data import sources

    subsets = []
    for train in (True, False):
        images, labels = sources.load("fmnist", train)
        chosen = balanced(labels, FASHION[train])
        subsets.append(images[chosen[np.argsort(labels[chosen], kind="stable")], :, :, 0])
    sheets = {
        "fashion": (np.concatenate(subsets), 100),
        "glyphs": (np.concatenate([render_glyphs(True), render_glyphs(False)]), 50),
    }
    paths = []
    for name, (tiles, columns) in sheets.items():
        rows, tile = len(tiles) // columns, tiles.shape[1]
        sheet = tiles.reshape(rows, columns, tile, tile).transpose(0, 2, 1, 3)
        paths.append(folder / f"{name}.png")
        Image.fromarray(sheet.reshape(rows * tile, columns * tile)).save(paths[-1], optimize=True)
    return paths


if __name__ == "__main__":
    if sys.argv[1:] != ["--build"]:
        sys.exit("usage: python -m fedscale.data.offline --build")
    for path in build():
        print(f"{path.name}: {path.stat().st_size:,} bytes")
