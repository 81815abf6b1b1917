"""Datasets by name: what they hold, whether they are here, and their arrays.

Images stay uint8 at native resolution, one array per domain because domains differ in size;
labels are offset by domain, so that a composite of four ten-class domains has 40 classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedscale.data import offline, sources
from fedscale.data.shares import balanced
from fedscale.data.sources import DataUnavailable

__all__ = ["CATALOGUE", "DataUnavailable", "Dataset", "Domain", "Split", "available", "load"]


@dataclass(frozen=True)
class Domain:
    """One source of images at the size a dataset uses it; `source` is for people."""

    name: str
    classes: int
    train_size: int
    test_size: int
    source: str


@dataclass(frozen=True, eq=False)
class Split:
    """Images and labels in the order of the domains: all of domain 0, then all of domain 1, ...

    Attributes:
        images: per domain, uint8 (N_d, H_d, W_d, 3).
        labels: int64 (N,), offset by the classes of the domains before.
        domains: int64 (N,), the number of each image's domain.
    """

    images: tuple[NDArray[np.uint8], ...]
    labels: NDArray[np.int64]
    domains: NDArray[np.int64]

    def __len__(self) -> int:
        """Return the number of images N."""
        return len(self.labels)

    def groups(
        self, indices: NDArray[np.integer]
    ) -> Iterator[tuple[NDArray[np.intp], NDArray[np.uint8]]]:
        """Yield, per domain present, the positions in `indices` and their images.

        Concatenated over the groups the positions are a permutation of 0..len(indices)-1.
        """
        indices = np.asarray(indices, dtype=np.int64)
        start = 0
        for images in self.images:
            positions = np.flatnonzero((indices >= start) & (indices < start + len(images)))
            if len(positions):
                yield positions, images[indices[positions] - start]
            start += len(images)


@dataclass(frozen=True, eq=False)
class Dataset:
    """A loaded dataset: domain names, classes of each, and the two splits."""

    name: str
    domains: tuple[str, ...]
    classes: tuple[int, ...]
    train: Split
    test: Split

    @property
    def num_classes(self) -> int:
        """Classes over all domains, i.e. rows of a classifier's head."""
        return sum(self.classes)


_SOURCES = {
    "mnist": Domain("mnist", 10, 60_000, 10_000, "MNIST"),
    "fmnist": Domain("fmnist", 10, 60_000, 10_000, "Fashion-MNIST"),
    "cifar10": Domain("cifar10", 10, 50_000, 10_000, "CIFAR-10"),
    "cifar100": Domain("cifar100", 100, 50_000, 10_000, "CIFAR-100, fine labels"),
    "svhn": Domain("svhn", 10, 73_257, 26_032, "SVHN, cropped digits"),
}


def _five(name: str, source: str) -> Domain:
    return Domain(name, 10, 20_000, 2_000, source)


CATALOGUE: dict[str, tuple[Domain, ...]] = {
    "offline": (
        Domain("fashion", 10, 6_000, 1_000, "Fashion-MNIST, a balanced subset that is shipped"),
        Domain("digits", 10, 1_400, 397, "scikit-learn's optical digits, upscaled"),
        Domain("digits_m", 10, 1_400, 397, "the same digits over scikit-learn's photographs"),
        Domain("glyphs", 10, 2_000, 500, "letters A-J in the fonts of matplotlib"),
    ),
    "five": (
        _five("cifar10", "CIFAR-10"),
        _five("mnist", "MNIST"),
        _five("fmnist", "Fashion-MNIST"),
        _five("svhn", "SVHN, cropped digits"),
        _five("notmnist", "notMNIST, from a folder"),
    ),
    "fashion": (Domain("fashion", 10, 6_000, 1_000, "Fashion-MNIST, the subset that is shipped"),),
    **{name: (domain,) for name, domain in _SOURCES.items()},
}
"""Every dataset's domains with the sizes that `load` gives by default."""

_OFFLINE: dict[str, Callable[[bool], tuple[NDArray[np.uint8], NDArray[np.int64]]]] = {
    "fashion": offline.fashion,
    "digits": offline.digits,
    "digits_m": offline.digits_m,
    "glyphs": offline.glyphs,
}


def load(name: str, train_size: int = 0, test_size: int = 0) -> Dataset:
    """Load a dataset, at most `train_size` and `test_size` images per domain, balanced.

    Size 0 is the catalogue's. A smaller size takes size // K images of each of a domain's K
    classes, the same ones every time (see `shares.balanced`).

    Raises:
        ValueError: unknown name, or a size that leaves a class without an image.
        DataUnavailable: the images cannot be had on this machine.
    """
    domains = _domains(name)
    splits = []
    for train, size in ((True, train_size), (False, test_size)):
        images, labels = [], []
        offset = 0
        for domain in domains:
            ours, theirs = _domain(domain, train, size)
            images.append(ours)
            labels.append(theirs + offset)
            offset += domain.classes
        owner = np.repeat(np.arange(len(domains)), [len(part) for part in images])
        splits.append(Split(tuple(images), np.concatenate(labels), owner))
    names = tuple(domain.name for domain in domains)
    return Dataset(name, names, tuple(domain.classes for domain in domains), *splits)


def available(name: str) -> tuple[bool, str]:
    """Say whether a dataset is on this machine, and where, or how to get it, in one line.

    Downloads nothing.

    Raises:
        ValueError: unknown name.
    """
    wanted = [domain.name for domain in _domains(name) if domain.name not in _OFFLINE]
    if not wanted:
        return True, "ships with fedscale and the packages it depends on"
    missing = [source for source in wanted if sources.find(source) is None]
    if len(missing) == 1:
        return False, sources.how_to_get(missing[0])
    if missing:
        return False, (
            f"lacks {', '.join(missing)}: run `python -m fedscale.data.sources "
            f"{' '.join(missing)}`, which says for each where it lies or how to get it"
        )
    return True, ", ".join(dict.fromkeys(str(sources.find(source)) for source in wanted))


def _domains(name: str) -> tuple[Domain, ...]:
    if name not in CATALOGUE:
        raise ValueError(f"data.name={name!r} is unknown; allowed: {', '.join(CATALOGUE)}")
    return CATALOGUE[name]


def _domain(domain: Domain, train: bool, size: int) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    key, default = ("train_size", domain.train_size) if train else ("test_size", domain.test_size)
    if size < 0 or 0 < size < domain.classes:
        raise ValueError(
            f"data.{key}={size}: {domain.name} has {domain.classes} classes; allowed: 0 (the "
            f"catalogue's {default:,}) or at least {domain.classes}"
        )
    size = size - size % domain.classes if 0 < size < default else default
    if domain.name in _OFFLINE:
        images, labels = _OFFLINE[domain.name](train)
    else:
        images, labels = sources.load(domain.name, train, size)
    if len(labels) < size:
        raise DataUnavailable(
            f"{domain.name}: {sources.find(domain.name)} holds {len(labels):,} "
            f"{'training' if train else 'test'} images, data.{key} asks for {size:,}; "
            f"lower it, or complete the files: {sources.how_to_get(domain.name)}"
        )
    if len(labels) > size:
        chosen = balanced(labels, size)
        images, labels = images[chosen], labels[chosen]
    return images, labels
