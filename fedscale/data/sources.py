"""Public datasets as files: where they may lie, how they are read, how they are fetched.

Searched in this order: `$FEDSCALE_DATA`, the system's folders, the user's cache. A missing one
is downloaded once per machine, from the addresses and with the checksums that torchvision keeps:
under a file lock, into a temporary folder that gets its name only when every checksum held.
`python -m fedscale.data.sources NAME ...` does only that.
"""

from __future__ import annotations

import gzip
import hashlib
import logging
import os
import pickle
import shutil
import sys
import tarfile
import tempfile
import urllib.request
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedscale import seeds

Images = NDArray[np.uint8]
Labels = NDArray[np.int64]
log = logging.getLogger(__name__)

LOCK_SECONDS = 1800
CONNECT_SECONDS = 20
_HELD_OUT = 3  # key of the random streams that split notMNIST


class DataUnavailable(RuntimeError):
    """Images that cannot be had here; the message is one line that says how to get them."""


@dataclass(frozen=True)
class Source:
    """One dataset on disk: folders (below a root) it may lie in, its files, their reader.

    `read(folder, train, size)` may give more than `size` images; only notMNIST reads by size.
    """

    folders: tuple[str, ...]
    files: tuple[str, ...]
    read: Callable[[Path, bool, int], tuple[Images, Labels]]
    system: tuple[str, ...] = ()
    command: str = ""


def load(name: str, train: bool, size: int = 0) -> tuple[Images, Labels]:
    """Return images uint8 (N, H, W, 3) and labels int64 (N,); downloads what is missing.

    Args:
        name: a key of `SOURCES`.
        train: training or test images.
        size: how many are wanted (0 = all); more may come, unless there are fewer.

    Raises:
        DataUnavailable: not here and not to be had, or damaged.
    """
    folder = find(name) or fetch(name)
    try:
        return SOURCES[name].read(folder, train, size)
    except (OSError, EOFError, zlib.error, ValueError, KeyError, pickle.UnpicklingError) as error:
        raise DataUnavailable(
            f"{name}: {folder} is damaged ({_line(error)}); remove it, then: {how_to_get(name)}"
        ) from error


def find(name: str) -> Path | None:
    """Return the folder that holds all files of a source, or None; downloads nothing."""
    return next((path for path in _places(name) if not _lacking(name, path)), None)


def how_to_get(name: str) -> str:
    """Say in one line where a source's files go and which command fetches them."""
    source = SOURCES[name]
    target = _download_root() / source.folders[0]
    command = source.command or f"python -m fedscale.data.sources {name}"
    return f"{name}: put {_listing(source.files)} into {target}, or run `{command}`"


def fetch(name: str) -> Path:
    """Download a source unless it is here, and return its folder.

    Raises:
        DataUnavailable: no address answered, a checksum failed, or the folder cannot be written.
    """
    from filelock import FileLock, Timeout

    source = SOURCES[name]
    looked = ", ".join(str(path) for path in _places(name))
    root = _download_root()
    target = root / source.folders[0]
    try:
        root.mkdir(parents=True, exist_ok=True)
        with FileLock(root / f".{name}.lock", timeout=LOCK_SECONDS):
            if here := find(name):
                return here
            if target.exists():
                raise OSError(f"{target} lacks {_listing(_lacking(name, target))}")
            with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=root) as scratch:
                folder = Path(scratch) / "complete"
                folder.mkdir()
                for file, addresses, digest in remote(name):
                    log.info("downloading %s", file)
                    _download(Path(scratch) / file, addresses, digest)
                    _unpack(Path(scratch) / file, folder, source.files)
                os.rename(folder, target)
    except (OSError, EOFError, zlib.error, tarfile.TarError, KeyError, Timeout) as error:
        raise DataUnavailable(
            f"{name} is not here: looked in {looked}; download failed ({_line(error)}); "
            f"{how_to_get(name)} where there is a network"
        ) from error
    return target


def remote(name: str) -> list[tuple[str, list[str], str]]:
    """Return (file, addresses to try in turn, MD5) of what is downloaded for a source."""
    if name not in ("mnist", "fmnist", "cifar10", "cifar100", "svhn"):
        raise OSError("it has no address that is kept up")
    from torchvision import datasets

    if name in ("mnist", "fmnist"):
        kind = {"mnist": datasets.MNIST, "fmnist": datasets.FashionMNIST}[name]
        return [(file, [m + file for m in kind.mirrors], md5) for file, md5 in kind.resources]
    if name == "svhn":
        splits = datasets.SVHN.split_list
        return [(splits[s][1], [splits[s][0]], splits[s][2]) for s in ("train", "test")]
    cifar = {"cifar10": datasets.CIFAR10, "cifar100": datasets.CIFAR100}[name]
    return [(cifar.filename, [cifar.url], cifar.tgz_md5)]


def _download(path: Path, addresses: list[str], digest: str) -> None:
    failures = []
    for address in addresses:
        request = urllib.request.Request(address, headers={"User-Agent": "fedscale"})
        md5 = hashlib.md5(usedforsecurity=False)
        try:
            with (
                urllib.request.urlopen(request, timeout=CONNECT_SECONDS) as answer,
                path.open("wb") as out,
            ):
                while block := answer.read(1 << 20):
                    md5.update(block)
                    out.write(block)
        except OSError as error:
            failures.append(f"{address}: {_line(error)}")
            continue
        if md5.hexdigest() == digest:
            return
        failures.append(f"{address}: MD5 is {md5.hexdigest()}, expected {digest}")
    raise OSError("; ".join(failures))


def _unpack(path: Path, folder: Path, files: tuple[str, ...]) -> None:
    if not path.name.endswith(".tar.gz"):
        os.rename(path, folder / path.name)
        return
    with tarfile.open(path) as archive:
        # Only the files that are read, by name: nothing else of an archive reaches the disk.
        for member in archive:
            name = Path(member.name).name
            if name in files and (content := archive.extractfile(member)):
                with content, (folder / name).open("wb") as out:
                    shutil.copyfileobj(content, out)


def _download_root() -> Path:
    if given := os.environ.get("FEDSCALE_DATA"):
        return Path(given).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "fedscale"


def _places(name: str) -> list[Path]:
    source = SOURCES[name]
    system = [Path(path) for path in source.system]
    own = [_download_root() / folder for folder in source.folders]
    return own + system if os.environ.get("FEDSCALE_DATA") else system + own


def _lacking(name: str, folder: Path) -> tuple[str, ...]:
    def here(file: str) -> bool:
        return any((folder / variant).exists() for variant in (file, file.removesuffix(".gz")))

    return tuple(file for file in SOURCES[name].files if not here(file))


def _listing(files: tuple[str, ...]) -> str:
    return files[0] if len(files) == 1 else f"{', '.join(files[:-1])} and {files[-1]}"


def _line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def _rgb(gray: Images) -> Images:
    return np.repeat(gray[..., None], 3, axis=-1)


def _idx(folder: Path, name: str) -> Images:
    packed, plain = folder / f"{name}.gz", folder / name
    content = gzip.decompress(packed.read_bytes()) if packed.exists() else plain.read_bytes()
    kind, dimensions = content[2:3], content[3] if len(content) > 3 else 0
    shape = np.frombuffer(content, ">u4", dimensions, offset=4) if dimensions else np.array([0])
    start = 4 + 4 * dimensions
    if kind != b"\x08" or len(content) - start != int(np.prod(shape, dtype=np.int64)):
        raise ValueError(f"{name} is not a whole IDX file of bytes")
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape.astype(int))


def _read_mnist(folder: Path, train: bool, size: int) -> tuple[Images, Labels]:
    prefix = "train" if train else "t10k"
    images = _idx(folder, f"{prefix}-images-idx3-ubyte")
    labels = _idx(folder, f"{prefix}-labels-idx1-ubyte")
    if images.ndim != 3 or labels.shape != images.shape[:1]:
        raise ValueError(f"images {images.shape} and labels {labels.shape} do not match")
    return _rgb(images), labels.astype(np.int64)


class _ArraysOnly(pickle.Unpickler):
    """Reads CIFAR's pickles, which came over a network: dicts, lists, numbers, NumPy arrays."""

    def find_class(self, module: str, name: str) -> Any:
        if name == "_reconstruct" and module in (
            "numpy.core.multiarray",
            "numpy._core.multiarray",
        ):
            return np.empty(0).__reduce__()[0]
        if (module, name) in (("numpy", "ndarray"), ("numpy", "dtype")):
            return getattr(np, name)
        raise pickle.UnpicklingError(f"{module}.{name} is not allowed in a dataset")


def _read_cifar(files: dict[bool, list[str]], key: str) -> Callable[..., tuple[Images, Labels]]:
    def read(folder: Path, train: bool, size: int) -> tuple[Images, Labels]:
        pixels, labels = [], []
        for file in files[train]:
            with (folder / file).open("rb") as stream:
                batch = _ArraysOnly(stream, encoding="latin1").load()
            pixels.append(batch["data"])
            labels.append(np.asarray(batch[key], np.int64))
        images = np.concatenate(pixels).reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
        return np.ascontiguousarray(images, dtype=np.uint8), np.concatenate(labels)

    return read


def _read_svhn(folder: Path, train: bool, size: int) -> tuple[Images, Labels]:
    from scipy.io import loadmat

    content = loadmat(folder / f"{'train' if train else 'test'}_32x32.mat")
    labels = content["y"].astype(np.int64).ravel() % 10  # the digit 0 is stored as 10
    return np.ascontiguousarray(content["X"].transpose(3, 0, 1, 2)), labels


def _read_notmnist(folder: Path, train: bool, size: int) -> tuple[Images, Labels]:
    """Read class folders A-J; of each, after a seeded shuffle, nine tenths are for training."""
    from PIL import Image

    images, labels = [], []
    for label, letter in enumerate(LETTERS):
        names = np.array(sorted(path.name for path in (folder / letter).glob("*.png")))
        seeds.stream(0, "images", round=_HELD_OUT, client=label).shuffle(names)
        border = len(names) * 9 // 10
        wanted, found = size // len(LETTERS) or len(names), 0
        for name in names[:border] if train else names[border:]:
            if found == wanted:
                break
            try:
                with Image.open(folder / letter / name) as image:
                    images.append(np.asarray(image.convert("L")))
            except OSError:  # the published archives hold a few files that are no images
                log.info("notmnist: %s/%s is not an image, skipped", letter, name)
                continue
            labels.append(label)
            found += 1
    if not images:
        raise ValueError("no PNG files in its folders")
    return _rgb(np.stack(images)), np.array(labels, np.int64)


LETTERS = "ABCDEFGHIJ"
_IDX = tuple(
    f"{split}-{content}-ubyte.gz"
    for split in ("train", "t10k")
    for content in ("images-idx3", "labels-idx1")
)
_CIFAR10 = {True: [f"data_batch_{number}" for number in range(1, 6)], False: ["test_batch"]}
_CIFAR100 = {True: ["train"], False: ["test"]}

SOURCES: dict[str, Source] = {
    "mnist": Source(("mnist", "MNIST/raw"), _IDX, _read_mnist),
    "fmnist": Source(
        ("fmnist", "fashion-mnist", "FashionMNIST/raw"),
        _IDX,
        _read_mnist,
        system=("/usr/share/datasets/fashion-mnist",),
        command="sudo apt-get install dataset-fashion-mnist",
    ),
    "cifar10": Source(
        ("cifar10", "cifar-10-batches-py"),
        (*_CIFAR10[True], *_CIFAR10[False]),
        _read_cifar(_CIFAR10, "labels"),
    ),
    "cifar100": Source(
        ("cifar100", "cifar-100-python"),
        (*_CIFAR100[True], *_CIFAR100[False]),
        _read_cifar(_CIFAR100, "fine_labels"),
    ),
    "svhn": Source(("svhn", "SVHN"), ("train_32x32.mat", "test_32x32.mat"), _read_svhn),
    "notmnist": Source(
        ("notmnist", "notMNIST_large", "notMNIST_small"),
        tuple(LETTERS),
        _read_notmnist,
        command="curl -L https://commondatastorage.googleapis.com/books1000/"
        "notMNIST_large.tar.gz | tar xz -C DIR",
    ),
}


def main(names: list[str]) -> int:
    """Fetch sources by name; print where each lies, or on stderr why it cannot be had."""
    if not names or any(name not in SOURCES for name in names):
        print(f"usage: python -m fedscale.data.sources {'|'.join(SOURCES)} ...", file=sys.stderr)
        return 2
    failed = False
    for name in names:
        try:
            print(f"{name}: {find(name) or fetch(name)}")
        except DataUnavailable as error:
            failed = True
            print(error, file=sys.stderr)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
