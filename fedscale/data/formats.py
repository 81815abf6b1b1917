"""Readers of datasets' own file formats, none of which can run code that a file brings.

Each takes (folder, train, size) and gives images uint8 (N, H, W, 3) and labels int64 (N,).
A damaged file raises whatever its parser does. Only `class_folders` reads by `size`; the others
give all they have.
"""

from __future__ import annotations

import gzip
import logging
import pickle
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedscale import seeds

Images = NDArray[np.uint8]
Labels = NDArray[np.int64]
Reader = Callable[[Path, bool, int], tuple[Images, Labels]]
log = logging.getLogger(__name__)

LETTERS = "ABCDEFGHIJ"
_HELD_OUT = 3  # key of the random streams, see offline.py for the others


def rgb(gray: Images) -> Images:
    """Repeat a gray value (...,) in three channels (..., 3)."""
    return np.repeat(gray[..., None], 3, axis=-1)


def mnist(folder: Path, train: bool, size: int) -> tuple[Images, Labels]:
    """Read MNIST's four IDX files, gzip-compressed or not."""
    prefix = "train" if train else "t10k"
    images = _idx(folder, f"{prefix}-images-idx3-ubyte", 3)
    labels = _idx(folder, f"{prefix}-labels-idx1-ubyte", 1)
    if len(images) != len(labels):
        raise ValueError(f"{prefix} has {len(images)} images and {len(labels)} labels")
    return rgb(images), labels.astype(np.int64)


def _idx(folder: Path, name: str, dimensions: int) -> NDArray[np.uint8]:
    packed = folder / f"{name}.gz"
    content = gzip.decompress(packed.read_bytes()) if packed.exists() else b""
    content = content or (folder / name).read_bytes()
    start = 4 + 4 * dimensions
    if content[:4] != bytes((0, 0, 8, dimensions)) or len(content) < start:
        raise ValueError(f"{name} is not an IDX file of bytes in {dimensions} dimensions")
    shape = np.frombuffer(content, ">u4", dimensions, offset=4).astype(np.int64)
    if len(content) - start != shape.prod():
        raise ValueError(f"{name} has {len(content) - start} bytes of {shape.prod()}")
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


def cifar(files: Mapping[bool, Sequence[str]], key: str) -> Reader:
    """Return the reader of CIFAR's "python version"; `key` holds the labels in its batches."""

    def read(folder: Path, train: bool, size: int) -> tuple[Images, Labels]:
        pixels, labels = [], []
        for file in files[train]:
            with (folder / file).open("rb") as stream:
                batch = _ArraysOnly(stream, encoding="latin1").load()
            pixels.append(np.asarray(batch["data"], np.uint8))
            labels.append(np.asarray(batch[key], np.int64))
        images = np.concatenate(pixels).reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
        return np.ascontiguousarray(images), np.concatenate(labels)

    return read


class _ArraysOnly(pickle.Unpickler):
    """Unpickles dicts, lists, numbers, strings and NumPy arrays, and calls nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in (("numpy", "ndarray"), ("numpy", "dtype")):
            return getattr(np, name)
        if name == "_reconstruct" and module in ("numpy.core.multiarray", "numpy._core.multiarray"):
            return np.empty(0).__reduce__()[0]
        raise pickle.UnpicklingError(f"{module}.{name} has no place in a file of images")


def svhn(folder: Path, train: bool, size: int) -> tuple[Images, Labels]:
    """Read SVHN's cropped digits from MATLAB files, where digit 0 has label 10."""
    from scipy.io import loadmat

    content = loadmat(folder / f"{'train' if train else 'test'}_32x32.mat")
    labels = content["y"].astype(np.int64).ravel() % 10
    return np.ascontiguousarray(content["X"].transpose(3, 0, 1, 2)), labels


def class_folders(folder: Path, train: bool, size: int) -> tuple[Images, Labels]:
    """Read notMNIST: PNG files in folders A-J; of each, a seeded nine tenths are for training.

    At most size // 10 images of each letter are opened (size 0: all); files that are no images,
    of which the published archives hold a few, are skipped.
    """
    from PIL import Image

    images, labels = [], []
    for label, letter in enumerate(LETTERS):
        names = np.array(sorted(path.name for path in (folder / letter).glob("*.png")))
        seeds.stream(0, "images", round=_HELD_OUT, client=label).shuffle(names)
        border = len(names) * 9 // 10
        names = names[:border] if train else names[border:]
        wanted = size // len(LETTERS) if size else len(names)
        for name in names:
            if wanted == 0:
                break
            try:
                with Image.open(folder / letter / name) as image:
                    images.append(np.asarray(image.convert("L")))
            except OSError:
                log.info("%s/%s is not an image, skipped", letter, name)
                continue
            labels.append(label)
            wanted -= 1
    if not images:
        raise ValueError(f"its folders hold no PNG files for {'training' if train else 'testing'}")
    return rgb(np.stack(images)), np.array(labels, np.int64)
