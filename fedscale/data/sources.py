"""Public datasets as files: where they may lie, and how they are fetched.

Searched in this order: `$FEDSCALE_DATA`, the system's folders, the user's cache. A missing one
is downloaded once per machine, from the addresses and with the checksums that torchvision keeps:
under a file lock, into a temporary folder that gets its name only when every checksum held.
`python -m fedscale.data.sources NAME ...` does only that.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shlex
import shutil
import sys
import tarfile
import tempfile
import urllib.request
import zlib
from dataclasses import dataclass
from pathlib import Path

from fedscale.data import formats
from fedscale.data.formats import LETTERS, Images, Labels, Reader

log = logging.getLogger(__name__)

LOCK_SECONDS = 1800.0
ANSWER_SECONDS = 20.0


class DataUnavailable(RuntimeError):
    """Images that cannot be had here; the message is one line that says how to get them."""


@dataclass(frozen=True)
class Source:
    """One dataset on disk.

    Attributes:
        folders: where it may lie below a root; the first is where it is downloaded to.
        files: what a folder must hold; a file whose name ends in .gz may be unpacked.
        read: see formats.py.
        torchvision: the class that keeps its addresses and checksums, or "".
        system: other folders to look in.
        command: what fetches it, when that is not this module; {root} stands for the root.
    """

    folders: tuple[str, ...]
    files: tuple[str, ...]
    read: Reader
    torchvision: str = ""
    system: tuple[str, ...] = ()
    command: str = ""


_IDX = tuple(
    f"{split}-{content}-ubyte.gz"
    for split in ("train", "t10k")
    for content in ("images-idx3", "labels-idx1")
)
_CIFAR10 = {True: [f"data_batch_{number}" for number in range(1, 6)], False: ["test_batch"]}
_CIFAR100 = {True: ["train"], False: ["test"]}

SOURCES: dict[str, Source] = {
    "mnist": Source(("mnist", "MNIST/raw"), _IDX, formats.mnist, "MNIST"),
    "fmnist": Source(
        ("fmnist", "fashion-mnist", "FashionMNIST/raw"),
        _IDX,
        formats.mnist,
        "FashionMNIST",
        system=("/usr/share/datasets/fashion-mnist",),
        command="sudo apt-get install dataset-fashion-mnist",
    ),
    "cifar10": Source(
        ("cifar10", "cifar-10-batches-py"),
        (*_CIFAR10[True], *_CIFAR10[False]),
        formats.cifar(_CIFAR10, "labels"),
        "CIFAR10",
    ),
    "cifar100": Source(
        ("cifar100", "cifar-100-python"),
        (*_CIFAR100[True], *_CIFAR100[False]),
        formats.cifar(_CIFAR100, "fine_labels"),
        "CIFAR100",
    ),
    "svhn": Source(("svhn", "SVHN"), ("train_32x32.mat", "test_32x32.mat"), formats.svhn, "SVHN"),
    "notmnist": Source(
        ("notmnist", "notMNIST_large", "notMNIST_small"),
        tuple(LETTERS),
        formats.class_folders,
        command="mkdir -p {root} && curl -L https://commondatastorage.googleapis.com/books1000/"
        "notMNIST_large.tar.gz | tar xz -C {root}",
    ),
}


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
    except MemoryError:
        raise
    except Exception as error:  # parsers raise anything on damaged files
        raise DataUnavailable(
            f"{name}: the files in {folder} are damaged ({_line(error)}); "
            f"remove them, then {how_to_get(name)}"
        ) from error


def find(name: str) -> Path | None:
    """Return the folder that holds all files of a source, or None; downloads nothing."""
    return next((path for path in _places(name) if not _lacking(name, path)), None)


def how_to_get(name: str) -> str:
    """Say in one line where a source's files go and which command fetches them."""
    source, root = SOURCES[name], _roots()[0]
    command = (
        source.command.format(root=shlex.quote(str(root)))
        or f"python -m fedscale.data.sources {name}"
    )
    files = f"{', '.join(source.files[:-1])} and {source.files[-1]}"
    if name == "notmnist":
        files = f"folders A to J of PNG files ({name})"
    return f"put {files} into {root / source.folders[0]}, or run `{command}`"


def fetch(name: str) -> Path:
    """Download a source unless it is here, and return its folder.

    Raises:
        DataUnavailable: no address answered, a checksum failed, or the folder cannot be written.
    """
    from filelock import FileLock, Timeout

    source, root = SOURCES[name], _roots()[0]
    target = root / source.folders[0]
    absent = f"{name} is not here: looked in {', '.join(str(path) for path in _places(name))}"
    if not source.torchvision:
        raise DataUnavailable(f"{absent}; {how_to_get(name)}")
    try:
        root.mkdir(parents=True, exist_ok=True)
        with FileLock(root / f".{name}.lock", timeout=LOCK_SECONDS):
            if here := find(name):  # another process has just fetched it
                return here
            if target.exists():
                raise OSError(f"{target} exists but lacks {', '.join(_lacking(name, target))}")
            for left_over in root.glob(f".{name}-*"):  # of a process that was killed
                shutil.rmtree(left_over)
            with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=root) as scratch:
                complete = Path(scratch) / "complete"
                complete.mkdir()
                for file, addresses, digest in remote(source.torchvision):
                    log.info("downloading %s", file)
                    _download(Path(scratch) / file, addresses, digest)
                    _unpack(Path(scratch) / file, complete, source.files)
                if lacking := _lacking(name, complete):
                    raise OSError(f"the download lacks {', '.join(lacking)}")
                os.rename(complete, target)
    except (OSError, EOFError, zlib.error, tarfile.TarError, Timeout) as error:
        raise DataUnavailable(
            f"{absent}; download failed ({_line(error)}); "
            f"{how_to_get(name)} where there is a network"
        ) from error
    return target


def remote(kind: str) -> list[tuple[str, list[str], str]]:
    """Return (file, addresses to try in turn, MD5) of a torchvision dataset's downloads."""
    from torchvision import datasets

    keeper = getattr(datasets, kind)
    if kind in ("MNIST", "FashionMNIST"):
        return [(file, [m + file for m in keeper.mirrors], md5) for file, md5 in keeper.resources]
    if kind == "SVHN":
        splits = [keeper.split_list[split] for split in ("train", "test")]
        return [(file, [address], md5) for address, file, md5 in splits]
    return [(keeper.filename, [keeper.url], keeper.tgz_md5)]


def main(names: list[str]) -> int:
    """Fetch sources by name; print where each lies, or on stderr why it cannot be had."""
    if not names or any(name not in SOURCES for name in names):
        print(f"usage: python -m fedscale.data.sources {'|'.join(SOURCES)} ...", file=sys.stderr)
        return 2
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    failed = False
    for name in names:
        try:
            print(f"{name}: {find(name) or fetch(name)}")
        except DataUnavailable as error:
            failed = True
            print(error, file=sys.stderr)
    return int(failed)


def _download(path: Path, addresses: list[str], digest: str) -> None:
    failures = []
    for address in addresses:
        request = urllib.request.Request(address, headers={"User-Agent": "fedscale"})
        md5 = hashlib.md5(usedforsecurity=False)
        try:
            with (
                urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as answer,
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


def _roots() -> list[Path]:
    given = os.environ.get("FEDSCALE_DATA")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "fedscale"
    return [Path(root).expanduser() for root in (given, cache) if root]


def _places(name: str) -> list[Path]:
    source = SOURCES[name]
    below = [[root / folder for folder in source.folders] for root in _roots()]
    return [*(below[0] if len(below) > 1 else []), *map(Path, source.system), *below[-1]]


def _lacking(name: str, folder: Path) -> list[str]:
    def here(file: str) -> bool:
        return (folder / file).exists() or (folder / file.removesuffix(".gz")).exists()

    return [file for file in SOURCES[name].files if not here(file)]


def _line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
