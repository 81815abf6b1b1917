"""Datasets by name: what they hold, whether they are here, and their arrays.

Images stay uint8 at native resolution, one array per domain because domains differ in size;
labels are offset by domain, so that a composite of four ten-class domains has 40 classes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedscale.data import offline, sources
from fedscale.data.formats import Read
from fedscale.data.layouts import SOURCES
from fedscale.data.shares import balanced
from fedscale.data.sources import DataUnavailable

__all__ = ["CATALOGUE", "DataUnavailable", "Dataset", "Domain", "Split", "available", "load"]

log = logging.getLogger(__name__)

_KEYS = {True: "train_size", False: "test_size"}
_KINDS = {True: "training", False: "test"}


@dataclass(frozen=True)
class Domain:
    """One source of images at the size a dataset uses it; `source` is for people.

    Attributes:
        whole: whether the sizes are all the images there are; else they are balanced subsets.
    """

    name: str
    classes: int
    train_size: int
    test_size: int
    source: str
    whole: bool = True

    def size(self, train: bool, asked: int = 0) -> int:
        """Return how many images are used when `asked` are asked for (0: the catalogue's size).

        A subset has the same number of each class, so the rest of a division is left out.

        Raises:
            ValueError: a size that leaves a class without an image.
        """
        key, most = _KEYS[train], self.train_size if train else self.test_size
        if asked < 0 or 0 < asked < self.classes:
            raise ValueError(
                f"data.{key}={asked}: {self.name} has {self.classes} classes; allowed: 0 (the "
                f"catalogue's {most:,}) or at least {self.classes}"
            )
        size = min(asked or most, most)
        return size if self.whole and size == most else size - size % self.classes


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


def _whole(name: str) -> Domain:
    source = SOURCES[name]
    return Domain(name, source.classes, *source.published, source.about)


def _subset(name: str, train_size: int, test_size: int) -> Domain:
    source = SOURCES[name]
    return Domain(name, source.classes, train_size, test_size, source.about, whole=False)


CATALOGUE: dict[str, tuple[Domain, ...]] = {
    "offline": (
        Domain("fashion", 10, 6_000, 1_000, "Fashion-MNIST, a balanced subset that is shipped"),
        Domain("digits", 10, 1_400, 397, "scikit-learn's optical digits, upscaled"),
        Domain("digits_m", 10, 1_400, 397, "the same digits over scikit-learn's photographs"),
        Domain("glyphs", 10, 2_000, 500, "letters A-J in the fonts of matplotlib"),
    ),
    "five": tuple(
        _subset(name, 20_000, 2_000) for name in ("cifar10", "mnist", "fmnist", "svhn", "notmnist")
    ),
    "four": tuple(
        _subset(name, 30_000, 2_500) for name in ("mnist_m", "fmnist", "cinic10", "mmafedb")
    ),
    "fashion": (Domain("fashion", 10, 6_000, 1_000, "Fashion-MNIST, the subset that is shipped"),),
    **{name: (_whole(name),) for name in ("mnist", "fmnist", "cifar10", "cifar100", "svhn", "dtd")},
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
            f"lacks {', '.join(missing)}: `fedscale data fetch {name}` fetches each or says where "
            "its files go"
        )
    return True, ", ".join(dict.fromkeys(str(sources.find(source)) for source in wanted))


def _domains(name: str) -> tuple[Domain, ...]:
    if name not in CATALOGUE:
        raise ValueError(f"data.name={name!r} is unknown; allowed: {', '.join(CATALOGUE)}")
    return CATALOGUE[name]


def read(domain: Domain, train: bool, size: int = 0) -> Read:
    """Return a domain's images; `size`: at least how many, balanced (0: all that are there).

    Raises:
        DataUnavailable: the images cannot be had on this machine.
    """
    if domain.name in _OFFLINE:
        images, labels = _OFFLINE[domain.name](train)
        return Read(images, labels, len(labels))
    return sources.read(domain.name, train, size)


def shortage(domain: Domain, train: bool, size: int, found: Read) -> str:
    """Say in one line what is there and what is needed where a size cannot be had, else "".

    A class with fewer than its share gives all it has, as the balanced rule has it, as long as
    all classes together have `size` images and none is empty.
    """
    counts = np.bincount(found.labels, minlength=domain.classes)
    empty = np.flatnonzero(counts == 0)
    if found.there >= size and not len(empty):
        return ""
    without = f", none of {len(empty)} of its {domain.classes} classes" if len(empty) else ""
    return f"holds {found.there:,} {_KINDS[train]} images{without}; {size:,} are needed"


def uneven(domain: Domain, train: bool, size: int, found: Read) -> str:
    """Say what a balanced subset has where classes have less than their share, else ""."""
    share = size // domain.classes
    counts = np.bincount(found.labels, minlength=domain.classes)
    short = [f"{counts[label]:,} of class {label}" for label in np.flatnonzero(counts < share)]
    if not short or (domain.whole and size == domain.size(train)):
        return ""
    kept = int(np.minimum(counts, share).sum())
    return (
        f"{kept:,} of {size:,} {_KINDS[train]} images, there being only {', '.join(short)} "
        f"({share:,} wanted)"
    )


def _domain(domain: Domain, train: bool, asked: int) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    size = domain.size(train, asked)
    found = read(domain, train, size)
    if text := shortage(domain, train, size, found):
        raise DataUnavailable(
            f"{domain.name}: {sources.find(domain.name)} {text}; lower data.{_KEYS[train]}, or "
            f"complete the files: {sources.how_to_get(domain.name)}"
        )
    if text := uneven(domain, train, size, found):
        log.warning("%s: the balanced subset has %s", domain.name, text)
    images, labels, _ = found
    if domain.whole and len(labels) == size:
        return images, labels
    chosen = balanced(labels, size)
    return (images, labels) if len(chosen) == len(labels) else (images[chosen], labels[chosen])
