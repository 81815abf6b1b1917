"""Images made by formula: the only pictures that `nano` is pre-trained on.

Two kinds of objects, one class each:

* 300 closed contours, r(θ) = 1 + Σ_k a_k cos(kθ + φ_k); a class is its amplitudes and phases;
* 40 symbols rendered from the fonts that matplotlib bundles: the letters K L M N P Q R S T U V W
  X Y Z m n q r t, the signs & # % ? @ $ + = < > * !, and Γ Θ Π Σ Φ Ψ Ω λ. No letter A–J in either
  case, no digit, and neither O, o nor l, which many fonts draw like digits.

Both are held as signed distances, so that weight, outlines and blur are one formula for all. An
object is placed, warped and drawn over a background of gratings, noise and smooth random fields,
half of the time by absolute difference. No photograph and no image of a data set is read.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d, grid_sample, interpolate

from fedscale.seeds import stream

SIDE = 32
CONTOURS = 300
SYMBOLS = "KLMNPQRSTUVWXYZmnqrt&#%?@$+=<>*!ΓΘΠΣΦΨΩλ"
CLASSES = CONTOURS + len(SYMBOLS)
SYMBOL_SHARE = 0.25
HARMONICS = 8
ANGLES = 256
# Fonts of matplotlib with the ordinary Unicode letters; the cm* family has its own encodings.
_FONTS = ("DejaVuSans*.ttf", "DejaVuSerif*.ttf", "STIXGeneral*.ttf")
_CELL = 64
_HALF = 22


@dataclass(frozen=True)
class Shapes:
    """The classes' geometry.

    Attributes:
        radius: (300, 256) contour radii over one turn, the largest of a class is 1.
        slope: (300, 256) dr/dθ of the same.
        symbols: (n, 1, 32, 32) signed distances of every symbol in every font, positive inside,
            in units of half the symbol's larger side.
        first: (41,) where each symbol's fonts begin in `symbols`.
    """

    radius: Tensor
    slope: Tensor
    symbols: Tensor
    first: np.ndarray


def shapes(seed: int) -> Shapes:
    """Return the shapes of a seed: its contour classes and the rendered symbols."""
    rng = stream(seed, "pretrain")
    order = np.arange(1, HARMONICS + 1)
    amplitude = rng.normal(size=(CONTOURS, HARMONICS)) * 0.55 / np.sqrt(order)
    # Some classes are plain (few harmonics), some are rich.
    amplitude *= order <= rng.integers(2, HARMONICS + 1, size=(CONTOURS, 1))
    amplitude[:, 0] *= 0.3
    phase = rng.uniform(0, 2 * np.pi, size=(CONTOURS, HARMONICS))
    angle = np.arange(ANGLES) * 2 * np.pi / ANGLES
    turn = order[:, None] * angle + phase[..., None]
    radius = 1 + (amplitude[..., None] * np.cos(turn)).sum(1)
    slope = -(amplitude[..., None] * order[:, None] * np.sin(turn)).sum(1)
    # A soft floor keeps the outline simple: radius → a smooth positive function of itself.
    root = np.sqrt(radius**2 + 0.09)
    soft = (radius + root) / 2
    slope = slope * (1 + radius / root) / 2
    top = soft.max(1, keepdims=True)
    symbols, first = _symbols()
    return Shapes(_tensor(soft / top), _tensor(slope / top), symbols, first)


def labels_of(rng: np.random.Generator, count: int) -> np.ndarray:
    """Draw labels (count,): a symbol with probability 0.25, classes of one kind equally likely."""
    contour = rng.integers(0, CONTOURS, size=count)
    symbol = rng.integers(CONTOURS, CLASSES, size=count)
    return np.where(rng.random(count) < SYMBOL_SHARE, symbol, contour)


def batch(
    known: Shapes, seed: int, step: int, count: int, easy: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Render the images of one step; equal arguments give equal images in every process.

    Args:
        known: `shapes(seed)`.
        seed: the run's seed.
        step: number of the step, from 1.
        count: images B.
        easy: share of the images that are a grey object on black, with no camera between.

    Returns:
        Images (B, 3, 32, 32) float32 in 0..1 and labels (B,) int64.
    """
    rng = stream(seed, "pretrain", step)
    labels = labels_of(rng, count)
    mask = _mask(_field(known, labels, rng), labels, rng)[:, None]
    back, front = _texture(count, rng, plain=0.35), _texture(count, rng, plain=0.6)
    front = _apart(front, back)
    over = back * (1 - mask) + front * mask
    difference = (back - mask * (0.4 + 0.6 * front)).abs()
    images = torch.where(_coin(rng, count, 0.5), over, difference)
    shaded = mask * (0.3 + 0.7 * front.mean(1, keepdim=True))
    images = torch.where(_coin(rng, count, easy), shaded, _camera(images, rng))
    return images, torch.from_numpy(labels)


def _field(known: Shapes, labels: np.ndarray, rng: np.random.Generator) -> Tensor:
    """Signed distance (B, 32, 32) to the placed object's outline, pixels, positive inside."""
    count = len(labels)
    where = _coordinates(count, rng)
    size = _uniform(rng, count, 7.0, 14.5)
    shift = _uniform(rng, (count, 2), -1, 1) * (16.5 - size)[:, None].clamp(max=5)
    angle = _uniform(rng, count, -0.4, 0.4)
    shear = _uniform(rng, count, -0.25, 0.25)
    aspect = _uniform(rng, count, -0.25, 0.25).exp()
    x, y = (where - shift[:, :, None, None]).unbind(1)
    cos, sin = angle.cos()[:, None, None], angle.sin()[:, None, None]
    x, y = cos * x + sin * y, cos * y - sin * x
    x = (x + shear[:, None, None] * y) * aspect[:, None, None]
    y = y / aspect[:, None, None]
    x, y = x / size[:, None, None], y / size[:, None, None]
    field = torch.empty(count, SIDE, SIDE)
    round_ = torch.from_numpy(labels < CONTOURS)
    kind = torch.from_numpy(labels)[round_]
    field[round_] = _contour(known, kind, x[round_], y[round_])
    symbol = labels[labels >= CONTOURS] - CONTOURS
    low, high = known.first[symbol], known.first[symbol + 1]
    pick = torch.from_numpy(rng.integers(low, high))
    grid = torch.stack((x[~round_], y[~round_]), dim=-1) * (2 * _HALF / _CELL)
    drawn = grid_sample(known.symbols[pick], grid, padding_mode="border", align_corners=False)
    field[~round_] = drawn[:, 0]
    return field * size[:, None, None]


def _contour(known: Shapes, kind: Tensor, x: Tensor, y: Tensor) -> Tensor:
    distance = (x.square() + y.square()).sqrt()
    place = torch.atan2(y, x) * (ANGLES / (2 * torch.pi))
    index = (place.floor().long() % ANGLES).flatten(1)
    radius = known.radius[kind].gather(1, index).view_as(x)
    slope = known.slope[kind].gather(1, index).view_as(x)
    # (r(θ) − ρ) / |∇(r(θ) − ρ)| is the distance to the outline, to first order.
    steep = slope / distance.clamp(min=0.15)
    return (radius - distance) * (1 + steep.square()).rsqrt()


def _mask(field: Tensor, labels: np.ndarray, rng: np.random.Generator) -> Tensor:
    """Coverage (B, 32, 32) in 0..1: filled, outlined, or (contours) filled with nested rings."""
    count = len(labels)
    view = (count, 1, 1)
    weight = _uniform(rng, view, -0.5, 1.3)
    line = _uniform(rng, view, 0.5, 1.8)
    period = _uniform(rng, view, 3.0, 7.0)
    softness = _uniform(rng, view, -0.5, 0.8).exp()
    style = rng.random(count)
    symbol = labels >= CONTOURS
    outlined = torch.from_numpy(style < np.where(symbol, 0.2, 0.35)).view(view)
    ringed = torch.from_numpy(~symbol & (style > 0.85)).view(view)
    nearest = (field + period / 2).remainder(period) - period / 2
    rings = torch.minimum(line - nearest.abs(), field + line)
    edge = torch.where(outlined, line - field.abs(), field + weight)
    edge = torch.where(ringed, rings, edge)
    return torch.sigmoid(3 * edge / softness)


def _texture(count: int, rng: np.random.Generator, *, plain: float) -> Tensor:
    """Surfaces (B, 3, 32, 32): a colour, smooth fields, a grating, noise; any may be absent."""
    view = (count, 1, 1, 1)
    colour = _uniform(rng, (count, 3, 1, 1), 0, 1)
    grey = _uniform(rng, view, 0, 1)
    grey = torch.where(_coin(rng, count, 0.4), (4 * grey - 1.5).clamp(0, 1), grey)
    colour = torch.where(_coin(rng, count, 0.35), grey.expand_as(colour), colour)
    smooth = interpolate(
        _normal(rng, (count, 3, 5, 5)), size=(SIDE, SIDE), mode="bilinear", align_corners=True
    )
    rough = interpolate(
        _normal(rng, (count, 3, 12, 12)), size=(SIDE, SIDE), mode="bilinear", align_corners=True
    )
    where = _plane()
    angle = _uniform(rng, view, 0, 2 * np.pi)
    pulse = _uniform(rng, view, np.log(0.25), np.log(2.2)).exp()
    along = where[0] * angle.cos() + where[1] * angle.sin()
    grating = torch.sin(along * pulse + _uniform(rng, view, 0, 2 * np.pi))
    grating = grating * _uniform(rng, view, 0, 1.5).exp()
    grating = grating.clamp(-1, 1) * _uniform(rng, (count, 3, 1, 1), -0.5, 0.5)
    noise = _normal(rng, (count, 3, SIDE, SIDE))
    busy = _amount(rng, count, 0.7, 0.35) * smooth + _amount(rng, count, 0.5, 0.25) * rough
    busy = busy + _amount(rng, count, 0.4, 1.0) * grating + _amount(rng, count, 0.3, 0.2) * noise
    return (colour + busy * _coin(rng, count, 1 - plain)).clamp(0, 1)


def _apart(front: Tensor, back: Tensor) -> Tensor:
    """Shift the colours (B, 3, 32, 32) of objects that would vanish in their backgrounds."""
    mean = back.mean((2, 3), keepdim=True)
    gap = front.mean((2, 3), keepdim=True) - mean
    lost = gap.square().sum(1, keepdim=True).sqrt() < 0.35
    return (front + torch.where(mean < 0.5, 0.45, -0.45) * lost).clamp(0, 1)


def _camera(images: Tensor, rng: np.random.Generator) -> Tensor:
    """Low resolution, contrast, inversion, loss of colour and noise, each for some images."""
    count = len(images)
    coarse = interpolate(avg_pool2d(images, 4), scale_factor=4, mode="bilinear")
    half = interpolate(avg_pool2d(images, 2), scale_factor=2, mode="bilinear")
    draw = torch.from_numpy(rng.random(count)).view(count, 1, 1, 1)
    images = torch.where(draw < 0.15, coarse, torch.where(draw < 0.3, half, images))
    grey = images.mean(1, keepdim=True).expand_as(images)
    images = torch.where(_coin(rng, count, 0.3), grey, images)
    images = torch.where(_coin(rng, count, 0.2), 1 - images, images)
    gain, offset = _uniform(rng, (count, 1, 1, 1), 0.6, 1.3), _uniform(rng, (count, 1, 1, 1), 0, 1)
    images = images * gain + offset * (1 - gain).clamp(min=0)
    noise = _normal(rng, tuple(images.shape)) * _amount(rng, count, 0.4, 0.08)
    return (images + noise).clamp(0, 1)


def _coordinates(count: int, rng: np.random.Generator) -> Tensor:
    """Pixel positions (B, 2, 32, 32) from the centre, bent by a smooth random field."""
    bend = _normal(rng, (count, 2, 4, 4)) * _uniform(rng, (count, 1, 1, 1), 0, 1.0)
    bend = interpolate(bend, size=(SIDE, SIDE), mode="bilinear", align_corners=True)
    return _plane() + bend


def _plane() -> Tensor:
    axis = torch.arange(SIDE, dtype=torch.float32) - (SIDE - 1) / 2
    return torch.stack((axis.expand(SIDE, SIDE), axis[:, None].expand(SIDE, SIDE)))


def _symbols() -> tuple[Tensor, np.ndarray]:
    import matplotlib
    from matplotlib.ft2font import FT2Font

    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    files = sorted(file for pattern in _FONTS for file in folder.glob(pattern))
    charmaps = {file: FT2Font(str(file)).get_charmap() for file in files}
    fields, first = [], [0]
    for symbol in SYMBOLS:
        owners = [file for file in files if ord(symbol) in charmaps[file]]
        if not owners:
            raise RuntimeError(f"none of matplotlib's fonts in {folder} has the symbol {symbol!r}")
        fields += [_distances(symbol, file) for file in owners]
        first.append(len(fields))
    return _tensor(np.stack(fields)[:, None]), np.array(first)


def _distances(symbol: str, file: Path) -> np.ndarray:
    from PIL import Image, ImageDraw, ImageFont
    from scipy.ndimage import distance_transform_edt

    font = ImageFont.truetype(str(file), 96)
    left, top, right, bottom = font.getbbox(symbol)
    picture = Image.new("L", (int(right - left), int(bottom - top)))
    ImageDraw.Draw(picture).text((-left, -top), symbol, fill=255, font=font)
    scale = 2 * _HALF / max(picture.size)
    width, height = (max(1, round(side * scale)) for side in picture.size)
    cell = Image.new("L", (_CELL, _CELL))
    cell.paste(picture.resize((width, height)), ((_CELL - width) // 2, (_CELL - height) // 2))
    inside = np.asarray(cell) > 127
    distance = distance_transform_edt(inside) - distance_transform_edt(~inside)
    return distance.reshape(_CELL // 2, 2, _CELL // 2, 2).mean((1, 3)) / _HALF


def _tensor(array: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array, dtype=np.float32))


def _uniform(
    rng: np.random.Generator, shape: int | tuple[int, ...], low: float, high: float
) -> Tensor:
    return torch.from_numpy(rng.random(shape, dtype=np.float32)) * (high - low) + low


def _normal(rng: np.random.Generator, shape: tuple[int, ...]) -> Tensor:
    return torch.from_numpy(rng.standard_normal(shape, dtype=np.float32))


def _coin(rng: np.random.Generator, count: int, share: float) -> Tensor:
    return torch.from_numpy(rng.random(count) < share).view(count, 1, 1, 1)


def _amount(rng: np.random.Generator, count: int, share: float, most: float) -> Tensor:
    """Strengths (B, 1, 1, 1): 0 with probability 1 − share, else uniform up to `most`."""
    return _coin(rng, count, share) * _uniform(rng, (count, 1, 1, 1), 0, most)
