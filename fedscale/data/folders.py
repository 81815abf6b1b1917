"""Readers of datasets that lie as folders of picture files (PNG or JPEG).

Each takes (folder, train, size) and gives a `Read`; only the files of the balanced subset of
`size` images are opened (0: all). Names are sorted before any draw, so that the subset does not
depend on the file system. Hidden files and files of other kinds are not looked at.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedscale import seeds
from fedscale.data.formats import LETTERS, Images, Labels, Read, Reader, rgb
from fedscale.data.shares import balanced

log = logging.getLogger(__name__)

PICTURES = (".png", ".jpg", ".jpeg")
DTD_CLASSES = 47
_HELD_OUT = 3  # key of the random streams, see offline.py for the others


def picture(path: Path, side: int = 0) -> Images:
    """Open one picture in colour: uint8 (H, W, 3), or (side, side, 3).

    With a side given, the largest centred square is cut out and resized (bicubic): the usual
    preparation of pictures of mixed sizes, which keeps their proportions.

    Raises:
        ValueError: not a picture, or cut short; names the file.
    """
    from PIL import Image, ImageOps

    try:
        with Image.open(path) as image:
            colour = image.convert("RGB")
    except MemoryError:
        raise
    except Exception as error:  # decoders raise OSError, SyntaxError, struct.error, ...
        raise ValueError(f"{path.parent.name}/{path.name} is not a whole picture") from error
    if side and colour.size != (side, side):
        colour = ImageOps.fit(colour, (side, side), Image.Resampling.BICUBIC)
    return np.asarray(colour)


def pictures(paths: Sequence[Path], side: int = 0) -> Images:
    """Open pictures, which must be of one size unless a side is given: uint8 (N, H, W, 3)."""
    if not paths:
        raise ValueError("its folders hold no pictures")
    first = picture(paths[0], side)
    images = np.empty((len(paths), *first.shape), np.uint8)
    for index, path in enumerate(paths):
        image = first if index == 0 else picture(path, side)
        if image.shape != first.shape:
            raise ValueError(
                f"{path.parent.name}/{path.name} is {image.shape[1]}x{image.shape[0]}, "
                f"{paths[0].name} {first.shape[1]}x{first.shape[0]}"
            )
        images[index] = image
    return images


def names(folder: Path, endings: tuple[str, ...] = PICTURES) -> list[str]:
    """Return the sorted names of a folder's files with these endings."""
    with os.scandir(folder) as entries:
        return sorted(
            entry.name
            for entry in entries
            if entry.name.lower().endswith(endings) and not entry.name.startswith(".")
        )


def chosen(paths: Sequence[Path], labels: Labels, size: int, side: int = 0) -> Read:
    """Open the balanced subset of `size` pictures (0, or as many as there are: all)."""
    indices = balanced(labels, size) if 0 < size < len(labels) else np.arange(len(labels))
    return Read(pictures([paths[i] for i in indices], side), labels[indices], len(labels))


def class_folders(classes: Sequence[str], side: int = 0) -> Reader:
    """Return the reader of train/<class>/ and test/<class>/; `side`: see `picture`."""

    def read(folder: Path, train: bool, size: int) -> Read:
        split = folder / ("train" if train else "test")
        paths = [[split / name / file for file in names(split / name)] for name in classes]
        labels = np.repeat(np.arange(len(classes), dtype=np.int64), [len(files) for files in paths])
        return chosen([path for files in paths for path in files], labels, size, side)

    return read


def dtd(side: int) -> Reader:
    """Return the reader of the Describable Textures Dataset, images/<class>/ and labels/*.txt.

    Of its ten partitions the first is read, as torchvision does: train1 and val1 for training,
    test1 for testing. The pictures differ in size, so a side is needed (see `picture`).
    """

    def read(folder: Path, train: bool, size: int) -> Read:
        listed = {
            name: [_two_parts(line) for line in lines(folder / "labels" / f"{name}.txt")]
            for name in ("train1", "val1", "test1")
        }
        classes = sorted({line[0] for lines in listed.values() for line in lines})
        if len(classes) != DTD_CLASSES:
            raise ValueError(f"labels/ names {len(classes)} classes, not {DTD_CLASSES}")
        number = {name: label for label, name in enumerate(classes)}
        mine = [*listed["train1"], *listed["val1"]] if train else listed["test1"]
        labels = np.array([number[name] for name, _ in mine], np.int64)
        return chosen([folder / "images" / name / file for name, file in mine], labels, size, side)

    return read


def letters(folder: Path, train: bool, size: int) -> Read:
    """Read notMNIST: PNG files in folders A-J; of each, a seeded nine tenths are for training.

    At most size // 10 images of each letter are opened (size 0: all); files that are no images,
    of which the published archives hold a few, are skipped.
    """
    images, labels, there = [], [], 0
    for label, letter in enumerate(LETTERS):
        files = np.array(names(folder / letter, (".png",)))
        seeds.stream(0, "images", round=_HELD_OUT, client=label).shuffle(files)
        border = len(files) * 9 // 10
        files = files[:border] if train else files[border:]
        there += len(files)
        wanted = size // len(LETTERS) if size else len(files)
        for file in files:
            if wanted == 0:
                break
            try:
                images.append(picture(folder / letter / file)[..., 0])
            except ValueError as error:
                log.info("%s, skipped", error)
                continue
            labels.append(label)
            wanted -= 1
    if not images:
        raise ValueError(f"its folders hold no PNG files for {'training' if train else 'testing'}")
    return Read(rgb(np.stack(images)), np.array(labels, np.int64), there)


def lines(file: Path) -> list[str]:
    """Return a text file's lines, without the empty ones."""
    return [line.strip() for line in file.read_text("utf-8").splitlines() if line.strip()]


def _two_parts(line: str) -> tuple[str, str]:
    parts = line.split("/")
    if len(parts) != 2 or not all(parts) or ".." in parts:
        raise ValueError(f"{line[:80]!r} is not <class>/<file>")
    return parts[0], parts[1]
