"""Readers of datasets' own array files, none of which can run code that a file brings.

Each takes (folder, train, size) and gives a `Read`. A damaged file raises whatever its parser
does. These read all they have whatever the size; those of folders.py open only what is wanted.
"""

from __future__ import annotations

import gzip
import pickle
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Images = NDArray[np.uint8]
Labels = NDArray[np.int64]

LETTERS = "ABCDEFGHIJ"


class Read(NamedTuple):
    """One split: images uint8 (N, H, W, 3), labels int64 (N,), and how many images are there.

    `there` exceeds N where only a balanced subset was opened, or where files are no images.
    """

    images: Images
    labels: Labels
    there: int


Reader = Callable[[Path, bool, int], Read]


def rgb(gray: Images) -> Images:
    """Repeat a gray value (...,) in three channels (..., 3)."""
    return np.repeat(gray[..., None], 3, axis=-1)


def mnist(folder: Path, train: bool, size: int) -> Read:
    """Read MNIST's four IDX files, gzip-compressed or not."""
    prefix = "train" if train else "t10k"
    images = _idx(folder, f"{prefix}-images-idx3-ubyte", 3)
    labels = _idx(folder, f"{prefix}-labels-idx1-ubyte", 1)
    return Read(rgb(images), labels.astype(np.int64), len(labels))


def _idx(folder: Path, name: str, dimensions: int) -> NDArray[np.uint8]:
    content = unpacked(folder / name)
    start = 4 + 4 * dimensions
    if content[:4] != bytes((0, 0, 8, dimensions)) or len(content) < start:
        raise ValueError(f"{name} is not an IDX file of bytes in {dimensions} dimensions")
    shape = np.frombuffer(content, ">u4", dimensions, offset=4).astype(np.int64)
    if len(content) - start != shape.prod():
        raise ValueError(f"{name} has {len(content) - start} bytes of {shape.prod()}")
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


def unpacked(path: Path) -> bytes:
    """Return what a file holds, or what the file of that name with .gz holds when unpacked."""
    packed = path.with_name(f"{path.name}.gz")
    content = gzip.decompress(packed.read_bytes()) if packed.exists() else b""
    return content or path.read_bytes()


def cifar(files: Mapping[bool, Sequence[str]], key: str) -> Reader:
    """Return the reader of CIFAR's "python version"; `key` holds the labels in its batches."""

    def read(folder: Path, train: bool, size: int) -> Read:
        pixels, labels = [], []
        for file in files[train]:
            with (folder / file).open("rb") as stream:
                batch = _ArraysOnly(stream, encoding="latin1").load()
            pixels.append(np.asarray(batch["data"], np.uint8))
            labels.append(np.asarray(batch[key], np.int64))
        images = np.concatenate(pixels).reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
        return Read(np.ascontiguousarray(images), np.concatenate(labels), len(images))

    return read


class _ArraysOnly(pickle.Unpickler):
    """Unpickles dicts, lists, numbers, strings and NumPy arrays, and calls nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in (("numpy", "ndarray"), ("numpy", "dtype")):
            return getattr(np, name)
        if name == "_reconstruct" and module in ("numpy.core.multiarray", "numpy._core.multiarray"):
            return np.empty(0).__reduce__()[0]
        raise pickle.UnpicklingError(f"{module}.{name} has no place in a file of images")


def svhn(folder: Path, train: bool, size: int) -> Read:
    """Read SVHN's cropped digits from MATLAB files, where digit 0 has label 10."""
    from scipy.io import loadmat

    content = loadmat(folder / f"{'train' if train else 'test'}_32x32.mat")
    labels = content["y"].astype(np.int64).ravel() % 10
    return Read(np.ascontiguousarray(content["X"].transpose(3, 0, 1, 2)), labels, len(labels))
