"""Tiny datasets in the true on-disk formats of the public ones."""

import gzip
import struct
from pathlib import Path

import numpy as np


def mnist(folder: Path, per_class: int = 2, seed: int = 0, packed: bool = True) -> dict:
    """Write MNIST's four IDX files; return {train: (gray images, labels)}."""
    folder.mkdir(parents=True, exist_ok=True)
    rng, content = np.random.default_rng(seed), {}
    for train, prefix in ((True, "train"), (False, "t10k")):
        labels = rng.permutation(np.repeat(np.arange(10), per_class)).astype(np.uint8)
        images = rng.integers(0, 256, (len(labels), 28, 28), dtype=np.uint8)
        content[train] = images, labels
        blobs = {
            "images-idx3": struct.pack(">IIII", 0x803, len(labels), 28, 28) + images.tobytes(),
            "labels-idx1": struct.pack(">II", 0x801, len(labels)) + labels.tobytes(),
        }
        for kind, blob in blobs.items():
            path = folder / f"{prefix}-{kind}-ubyte{'.gz' if packed else ''}"
            path.write_bytes(gzip.compress(blob) if packed else blob)
    return content


def _text(value: bytes) -> bytes:
    return b"U" + bytes([len(value)]) + value


def _numbers(values) -> bytes:
    return b"](" + b"".join(b"K" + bytes([value]) for value in values) + b"e"


def _array(array: np.ndarray) -> bytes:
    shape = b"".join(b"J" + struct.pack("<i", side) for side in array.shape)
    unknown = b"J" + struct.pack("<i", -1)
    return (
        b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + _text(b"b") + b"\x87R"
        b"(K\x01" + shape + b"\x86"
        b"cnumpy\ndtype\n" + _text(b"u1") + b"K\x00K\x01\x87R"
        b"(K\x03" + _text(b"|") + b"NNN" + unknown + unknown + b"K\x00tb"
        b"\x89T" + struct.pack("<i", array.nbytes) + array.tobytes() + b"tb"
    )


def _python2_pickle(items: dict[bytes, bytes]) -> bytes:
    body = b"".join(_text(key) + value for key, value in items.items())
    return b"\x80\x02}(" + body + b"u."


def cifar(folder: Path, classes: int = 10, per_batch: int = 20) -> dict:
    """Write CIFAR's batches as Python 2 pickled them; return {train: (images NHWC, labels)}."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(classes)
    if classes == 10:
        files = {True: [f"data_batch_{n}" for n in range(1, 6)], False: ["test_batch"]}
    else:
        files = {True: ["train"], False: ["test"]}
    content = {}
    for train, names in files.items():
        images, labels = [], []
        for name in names:
            targets = rng.permutation(np.arange(per_batch) % classes)
            rows = rng.integers(0, 256, (per_batch, 3072), dtype=np.uint8)
            items = {b"batch_label": _text(b"a batch")}
            if classes == 10:
                items[b"labels"] = _numbers(targets)
            else:
                items |= {b"coarse_labels": _numbers(targets // 5)}
                items |= {b"fine_labels": _numbers(targets)}
            (folder / name).write_bytes(_python2_pickle({**items, b"data": _array(rows)}))
            images.append(rows.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
            labels.append(targets)
        content[train] = np.concatenate(images), np.concatenate(labels)
    return content


def svhn(folder: Path, per_class: int = 2) -> dict:
    """Write SVHN's MATLAB files, digit 0 as label 10; return {train: (images, labels)}."""
    from scipy.io import savemat

    folder.mkdir(parents=True, exist_ok=True)
    rng, content = np.random.default_rng(1), {}
    for train, name in ((True, "train"), (False, "test")):
        labels = rng.permutation(np.repeat(np.arange(10), per_class)).astype(np.uint8)
        images = rng.integers(0, 256, (len(labels), 32, 32, 3), dtype=np.uint8)
        stored = np.where(labels == 0, 10, labels)[:, None].astype(np.uint8)
        savemat(folder / f"{name}_32x32.mat", {"X": images.transpose(1, 2, 3, 0), "y": stored})
        content[train] = images, labels
    return content


def notmnist(folder: Path, per_class: int = 20) -> dict[str, np.ndarray]:
    """Write class folders A-J of PNG files, one of A's being empty; return {name: pixels}."""
    from PIL import Image

    rng, content = np.random.default_rng(2), {}
    for letter in "ABCDEFGHIJ":
        (folder / letter).mkdir(parents=True, exist_ok=True)
        for number in range(per_class):
            pixels = rng.integers(0, 256, (28, 28), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / letter / f"{number:03}.png")
            content[f"{letter}/{number:03}.png"] = pixels
    (folder / "A" / "broken.png").write_bytes(b"")
    return content
