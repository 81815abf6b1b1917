"""Whether the files of datasets are here, whole and readable."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedscale.data import catalogue, sources
from fedscale.data.catalogue import CATALOGUE, Domain
from fedscale.data.download import checksums
from fedscale.data.formats import Read, unpacked
from fedscale.data.layouts import SOURCES

NAMES = (*CATALOGUE, *(name for name in SOURCES if name not in CATALOGUE))
"""What can be fetched and checked: every dataset, and the sources that only composites use."""


@dataclass(frozen=True)
class Finding:
    """What was found of one domain: `name` as dataset/domain, and one line of text."""

    name: str
    ok: bool
    text: str


def domains(names: Sequence[str]) -> list[tuple[str, Domain]]:
    """Return (label, domain) of every domain of these datasets and sources.

    Raises:
        ValueError: an unknown name; lists the known ones.
    """
    found = []
    for name in names:
        if name not in NAMES:
            raise ValueError(f"NAME={name}: unknown; allowed: {', '.join(NAMES)}")
        if name in CATALOGUE:
            composite = len(CATALOGUE[name]) > 1
            found += [(f"{name}/{d.name}" if composite else name, d) for d in CATALOGUE[name]]
        else:
            source = SOURCES[name]
            found.append((name, Domain(name, source.classes, 0, 0, source.about)))
    return found


def check(names: Sequence[str]) -> Iterator[Finding]:
    """Open every image of these datasets and sources, a finding per domain; downloads nothing.

    Checked are the number of images (published, and needed by the dataset), that no class is
    empty, and the MD5 of the files where it is known. A split is held in memory at a time: about
    1.2 GB for the large notMNIST, less for the others.

    Raises:
        ValueError: an unknown name.
    """
    for label, domain in domains(names):
        yield _finding(label, domain)


def _finding(label: str, domain: Domain) -> Finding:
    shipped = domain.name not in SOURCES
    folder = None if shipped else sources.find(domain.name)
    if not shipped and folder is None:
        return Finding(label, False, f"missing: {sources.how_to_get(domain.name)}")
    faults, splits = [], []
    for train in (True, False):
        try:
            found = catalogue.read(domain, train)
        except catalogue.DataUnavailable as error:
            return Finding(label, False, str(error))
        size = domain.size(train)
        text, more = _split(domain, train, found)
        splits.append(text)
        faults += [*more, *filter(None, [catalogue.shortage(domain, train, size, found)])]
        if not more and (note := catalogue.uneven(domain, train, size, found)):
            splits[-1] += f", of which a balanced subset has {note}"
    text = f"{', '.join(splits)}; "
    if folder is None:
        text += "ships with fedscale and the packages it depends on"
    else:
        known, wrong = _sums(domain.name, folder)
        faults += [f"{file} is not as published (MD5)" for file in wrong]
        text += f"{'MD5 as published, ' if known and not wrong else ''}in {folder}"
    return Finding(label, not faults, f"{'; '.join(faults)}: {text}" if faults else f"ok: {text}")


def _split(domain: Domain, train: bool, found: Read) -> tuple[str, list[str]]:
    """Describe a split, and what it lacks of what is published."""
    images, labels, there = found
    kind = "train" if train else "test"
    counts = np.bincount(labels, minlength=domain.classes)
    low, high = int(counts.min()), int(counts.max())
    each = f"{low:,}" if low == high else f"{low:,} to {high:,}"
    text = (
        f"{kind} {len(labels):,} ({images.shape[2]}x{images.shape[1]}, {domain.classes} classes of "
        f"{each})"
    )
    if there > len(labels):
        text += f" beside {there - len(labels)} unreadable files"
    published = SOURCES[domain.name].published[not train] if domain.name in SOURCES else 0
    lacks = published - len(labels)
    return text, [f"{kind} lacks {lacks:,} of {published:,} images"] if lacks > 0 else []


def _sums(name: str, folder: Path) -> tuple[bool, list[str]]:
    """Whether checksums of a source's files are known, and the files that differ."""
    known = checksums(SOURCES[name].kind)
    return bool(known), [
        file
        for file, digest in known.items()
        if hashlib.md5(unpacked(folder / file), usedforsecurity=False).hexdigest() != digest
    ]
