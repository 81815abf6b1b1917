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


def pictures(folder: Path, count: int, rng, size=(32, 32), gray=False, ending="png") -> list:
    """Write noise pictures 0000.png, ...; return their pixels (PNG: as they will be read)."""
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    pixels = []
    for number in range(count):
        shape = (size[1], size[0]) if gray else (size[1], size[0], 3)
        image = rng.integers(0, 256, shape, dtype=np.uint8)
        Image.fromarray(image).save(folder / f"{number:04}.{ending}")
        pixels.append(np.repeat(image[..., None], 3, axis=-1) if gray else image)
    return pixels


CINIC10 = [
    *("airplane", "automobile", "bird", "cat", "deer"),
    *("dog", "frog", "horse", "ship", "truck"),
]
EMOTIONS = ["angry", "disgust", "fear", "happy", "neutral", "sad", "surprise"]


def cinic10(folder: Path, per_class: int = 3) -> dict:
    """Write CINIC-10's train|valid|test/<class>/*.png; return {train: (images, labels)}."""
    rng, content = np.random.default_rng(3), {}
    for split in ("train", "valid", "test"):
        files = [pictures(folder / split / name, per_class, rng) for name in CINIC10]
        images = np.stack([image for group in files for image in group])
        content[split] = images, np.repeat(np.arange(10), per_class)
    return {True: content["train"], False: content["test"]}


def mmafedb(folder: Path, per_class: int = 6, rare: int = 6) -> dict:
    """Write MMAFEDB's train|valid|test/<emotion>/*.jpg, gray and in colour; return the counts."""
    rng = np.random.default_rng(4)
    counts = {name: rare if name == "disgust" else per_class for name in EMOTIONS}
    for split in ("train", "valid", "test"):
        for number, (name, count) in enumerate(counts.items()):
            gray = split == "train" and number % 2 == 0
            size = (48, 48) if number else (60, 80)
            pictures(folder / split / name, count, rng, size, gray, "jpg")
    return counts


DTD = [f"texture{number:02}" for number in range(46)] + ["polka-dotted"]


def dtd(folder: Path, sizes=((30, 40), (64, 48))) -> dict:
    """Write DTD's images/<class>/*.jpg, two of each class per list, and the lists of two splits."""
    rng = np.random.default_rng(5)
    (folder / "labels").mkdir(parents=True, exist_ok=True)
    lists = {f"{kind}{split}": [] for kind in ("train", "val", "test") for split in (1, 2)}
    for name in DTD:
        pictures(folder / "images" / name, 6, rng, sizes[0], ending="jpg")
        pictures(folder / "images" / name, 3, rng, sizes[1], ending="jpg")
        for number in range(6):
            kind = ("train", "val", "test")[number % 3]
            lists[f"{kind}1"].append(f"{name}/{number:04}.jpg")
            lists[f"{kind}2"].append(f"{name}/{(number + 1) % 6:04}.jpg")
    for kind, lines in lists.items():
        (folder / "labels" / f"{kind}.txt").write_text("\n".join(lines) + "\n")
    return lists


def mnist_m(folder: Path, per_class: int = 3) -> dict:
    """Write MNIST-M's mnist_m_<split>/*.png and mnist_m_<split>_labels.txt."""
    rng, content = np.random.default_rng(6), {}
    for train, split in ((True, "train"), (False, "test")):
        labels = rng.permutation(np.repeat(np.arange(10), per_class))
        images = pictures(folder / f"mnist_m_{split}", len(labels), rng)
        lines = [f"{number:04}.png {label}" for number, label in enumerate(labels)]
        (folder / f"mnist_m_{split}_labels.txt").write_text("\n".join(lines) + "\n")
        content[train] = np.stack(images), labels
    return content


def mnist_m_tensors(folder: Path, per_class: int = 3, zipped: bool = True) -> dict:
    """Write MNIST-M's pairs of tensors mnist_m_<split>.pt, as torch saves now or saved once."""
    import torch

    folder.mkdir(parents=True, exist_ok=True)
    rng, content = np.random.default_rng(7), {}
    for train, split in ((True, "train"), (False, "test")):
        labels = rng.permutation(np.repeat(np.arange(10), per_class))
        images = rng.integers(0, 256, (len(labels), 28, 28, 3), dtype=np.uint8)
        pair = torch.from_numpy(images), torch.from_numpy(labels)
        path = folder / f"mnist_m_{split}.pt"
        torch.save(pair, path, _use_new_zipfile_serialization=zipped)
        content[train] = images, labels
    return content
