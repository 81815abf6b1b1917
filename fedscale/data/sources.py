"""Public datasets as files: where they may lie, and how they are fetched.

Searched in this order: `$FEDSCALE_DATA`, the system's folders, the user's cache. A missing one
is downloaded once per machine (`fedscale data fetch NAME`, or the run that needs it): under a file
lock, into a temporary folder that gets its name only when every checksum held.
"""

from __future__ import annotations

import logging
import os
import shlex
import shutil
import tarfile
import tempfile
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

from fedscale.data import mnist_m
from fedscale.data.download import download, remote, unpack
from fedscale.data.formats import Images, Labels, Read
from fedscale.data.layouts import SOURCES

log = logging.getLogger(__name__)

LOCK_SECONDS = 1800.0
_PHOTOGRAPHS = ("photographs", "BSR/BSDS500/data/images", "BSDS500/data/images")


class DataUnavailable(RuntimeError):
    """Images that cannot be had here; the message is one line that says how to get them."""


def load(name: str, train: bool, size: int = 0) -> tuple[Images, Labels]:
    """Return images uint8 (N, H, W, 3) and labels int64 (N,); downloads what is missing.

    Args:
        name: a key of `SOURCES`.
        train: training or test images.
        size: how many are wanted (0 = all); more may come, unless there are fewer.

    Raises:
        DataUnavailable: not here and not to be had, or damaged.
    """
    return read(name, train, size)[:2]


def read(name: str, train: bool, size: int = 0) -> Read:
    """Return what `load` does and how many images are there.

    Raises:
        DataUnavailable: not here and not to be had, or damaged.
    """
    folder = find(name) or fetch(name)
    reader = SOURCES[name].read
    if name == "mnist_m" and _lacking(name, folder):  # then they are photographs
        reader = partial(mnist_m.blended, find("mnist") or fetch("mnist"))
    try:
        return _checked(reader(folder, train, size), SOURCES[name].classes)
    except MemoryError:
        raise
    except Exception as error:  # parsers raise anything on damaged files
        raise DataUnavailable(
            f"{name}: the files in {folder} are damaged ({_line(error)}); "
            f"remove them, then {how_to_get(name)}"
        ) from error


def find(name: str) -> Path | None:
    """Return the folder that holds all files of a source, or None; downloads nothing.

    MNIST-M without files of its own is made from MNIST and photographs: then theirs.
    """
    if here := next((path for path in _places(name) if not _lacking(name, path)), None):
        return here
    return _photographs() if name == "mnist_m" and find("mnist") else None


def how_to_get(name: str) -> str:
    """Say in one line where a source's files go and which command fetches them."""
    source, root = SOURCES[name], _roots()[0]
    files = source.forms[0]
    layout = source.layout or f"{', '.join(files[:-1])} and {files[-1]}"
    command = source.command.format(root=shlex.quote(str(root))) or f"fedscale data fetch {name}"
    made = f"or photographs into {root / _PHOTOGRAPHS[0]}, " if name == "mnist_m" else ""
    return f"put {layout} into {root / source.folders[0]}, {made}or run `{command}`"


def fetch(name: str, tell: Callable[[str], None] = log.info) -> Path:
    """Download a source unless it is here, and return its folder.

    Args:
        name: a key of `SOURCES`.
        tell: is given a line per file that is downloaded.

    Raises:
        DataUnavailable: no address answered, a checksum failed, or the folder cannot be written.
    """
    from filelock import FileLock, Timeout

    if here := find(name):
        return here
    if name == "mnist_m" and (photographs := _photographs()):
        fetch("mnist", tell)
        return photographs
    source, root = SOURCES[name], _roots()[0]
    target = root / source.folders[0]
    absent = f"{name} is not here: looked in {', '.join(str(path) for path in _places(name))}"
    if not source.kind:
        raise DataUnavailable(f"{absent}; {how_to_get(name)}")
    try:
        root.mkdir(parents=True, exist_ok=True)
        with FileLock(root / f".{name}.lock", timeout=LOCK_SECONDS):
            if here := find(name):  # another process has just fetched it
                return here
            if target.exists():
                raise OSError(f"{target} exists but lacks {_few(_lacking(name, target))}")
            for left_over in root.glob(f".{name}-*"):  # of a process that was killed
                shutil.rmtree(left_over)
            with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=root) as scratch:
                complete = Path(scratch) / "complete"
                complete.mkdir()
                for file, addresses, digest in remote(source.kind):
                    download(Path(scratch) / file, addresses, digest, tell)
                    unpack(Path(scratch) / file, complete, source.forms[0])
                if lacking := _lacking(name, complete):
                    raise OSError(f"the download lacks {_few(lacking)}")
                os.rename(complete, target)
    except (OSError, EOFError, zlib.error, tarfile.TarError, Timeout) as error:
        raise DataUnavailable(
            f"{absent}; download failed ({_line(error)}); "
            f"{how_to_get(name)} where there is a network"
        ) from error
    return target


def _checked(found: Read, classes: int) -> Read:
    images, labels, _ = found
    if len(images) != len(labels):
        raise ValueError(f"there are {len(images)} images and {len(labels)} labels")
    if len(labels) and not 0 <= labels.min() <= labels.max() < classes:
        raise ValueError(
            f"labels run from {labels.min()} to {labels.max()}, not 0 to {classes - 1}"
        )
    return found


def _roots() -> list[Path]:
    given = os.environ.get("FEDSCALE_DATA")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "fedscale"
    return [Path(root).expanduser() for root in (given, cache) if root]


def _places(name: str) -> list[Path]:
    source = SOURCES[name]
    below = [[root / folder for folder in source.folders] for root in _roots()]
    return [*(below[0] if len(below) > 1 else []), *map(Path, source.system), *below[-1]]


def _photographs() -> Path | None:
    places = (root / folder for root in _roots() for folder in _PHOTOGRAPHS)
    return next((path for path in places if path.is_dir()), None)


def _lacking(name: str, folder: Path) -> list[str]:
    def here(file: str) -> bool:
        if file.endswith("/"):
            return (folder / file).is_dir()
        return (folder / file).exists() or (folder / file.removesuffix(".gz")).exists()

    forms = [[file for file in form if not here(file)] for form in SOURCES[name].forms]
    return min(forms, key=len)


def _few(files: list[str]) -> str:
    more = f" and {len(files) - 4} more" if len(files) > 4 else ""
    return f"{', '.join(files[:4])}{more}"


def _line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
