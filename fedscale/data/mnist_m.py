"""MNIST-M: digits over crops of photographs, read from its files or made from MNIST.

The recipe is |crop - digit| in each channel (Ganin et al., "Domain-adversarial training of neural
networks", 2016), there with the photographs of BSDS500.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedscale import seeds
from fedscale.data import formats
from fedscale.data.folders import PICTURES, chosen, lines, picture
from fedscale.data.formats import Images, Read
from fedscale.data.shares import balanced

_CROPS, _TEST_PHOTOGRAPHS = 4, 5  # keys of the random streams, see offline.py for the others
_SIDE = 28
_TEST_SHARE = 5  # one photograph in five serves the test images


def read(folder: Path, train: bool, size: int) -> Read:
    """Read mnist_m_<split>.pt, else the folder mnist_m_<split> and its mnist_m_<split>_labels.txt.

    The tensor file is a pair of images uint8 (N, H, W, 3) and labels (N,), and is loaded without
    running what a pickle may bring; the text file has a line "<name>.png <digit>" per picture.

    Raises:
        ValueError: other content than that.
    """
    split = f"mnist_m_{'train' if train else 'test'}"
    if (folder / f"{split}.pt").exists():
        return _tensors(folder / f"{split}.pt")
    paths, labels = [], []
    for line in lines(folder / f"{split}_labels.txt"):
        name, _, label = line.rpartition(" ")
        if Path(name).name != name or not name or label not in set("0123456789"):
            raise ValueError(f"{split}_labels.txt: {line[:80]!r} is not <name> <digit>")
        paths.append(folder / split / name)
        labels.append(int(label))
    return chosen(paths, np.array(labels, np.int64), size)


def _tensors(file: Path) -> Read:
    import torch

    content = torch.load(file, map_location="cpu", weights_only=True)
    pair = content if isinstance(content, tuple | list) and len(content) == 2 else (None, None)
    if not all(isinstance(part, torch.Tensor) for part in pair):
        raise ValueError(f"{file.name} is not a pair of tensors")
    images, labels = (np.asarray(part) for part in pair)
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[3] != 3 or labels.ndim != 1:
        raise ValueError(
            f"{file.name} has {images.dtype} {images.shape} and {labels.dtype} {labels.shape}, "
            "not uint8 (N, H, W, 3) and integers (N,)"
        )
    if labels.dtype.kind not in "iu":
        raise ValueError(f"{file.name} has labels of {labels.dtype}, not integers")
    return Read(images, labels.astype(np.int64), len(labels))


def blended(mnist: Path, photographs: Path, train: bool, size: int) -> Read:
    """Make MNIST-M from MNIST's files and a folder of photographs: images (N, 28, 28, 3).

    Every fifth photograph, in a seeded order of their names, serves the test digits and the
    others the training digits. A digit's crop depends on nothing but the digit's number, the split
    and the photographs, so a smaller subset lies inside a larger one.

    Raises:
        ValueError: fewer than two photographs, or one smaller than a digit.
    """
    digits = formats.mnist(mnist, train, size)
    count = len(digits.labels)
    indices = balanced(digits.labels, size) if 0 < size < count else np.arange(count)
    ours = _photographs(photographs, train)
    place = seeds.stream(0, "images", round=_CROPS, client=int(train)).random((count, 3))[indices]
    which = (place[:, 0] * len(ours)).astype(np.int64)
    images = digits.images[indices]
    for number in np.unique(which):
        mine = np.flatnonzero(which == number)
        images[mine] = _over(images[mine], picture(ours[number]), place[mine, 1:], ours[number])
    return Read(images, digits.labels[indices], count)


def _over(digits: Images, photograph: Images, place: NDArray[np.float64], path: Path) -> Images:
    height, width = photograph.shape[:2]
    if min(height, width) < _SIDE:
        raise ValueError(f"{path.name} is {width}x{height}, smaller than {_SIDE}x{_SIDE}")
    corners = (place * (height - _SIDE + 1, width - _SIDE + 1)).astype(np.int64)
    rows = corners[:, 0, None, None] + np.arange(_SIDE)[:, None]
    columns = corners[:, 1, None, None] + np.arange(_SIDE)
    crops = photograph[rows, columns].astype(np.int16)
    return np.abs(crops - digits).astype(np.uint8)


def _photographs(folder: Path, train: bool) -> list[Path]:
    paths = sorted(
        path
        for path in folder.rglob("*")
        if path.suffix.lower() in PICTURES and not path.name.startswith(".")
    )
    if len(paths) < 2:
        raise ValueError(f"it holds {len(paths)} photographs (PNG or JPEG), at least 2 are needed")
    order = seeds.stream(0, "images", round=_TEST_PHOTOGRAPHS).permutation(len(paths))
    border = max(1, len(paths) // _TEST_SHARE)
    return [paths[i] for i in (order[border:] if train else order[:border])]
