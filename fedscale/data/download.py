"""Where the public datasets' files are fetched from, and what they must sum up to."""

from __future__ import annotations

import hashlib
import http.client
import os
import shutil
import tarfile
import urllib.request
from collections.abc import Callable, Iterable
from pathlib import Path

ANSWER_SECONDS = 20.0

Listing = list[tuple[str, list[str], str]]

_ELSEWHERE: dict[str, Listing] = {
    "cinic10": [
        (
            "CINIC-10.tar.gz",
            [
                "https://datashare.ed.ac.uk/bitstream/handle/10283/3192/CINIC-10.tar.gz",
                "https://datashare.ed.ac.uk/server/api/core/bitstreams/"
                "e8e186cc-2688-48f1-aa5a-3fda1a43f8b6/content",
            ],
            "6ee4d0c996905fe93221de577967a372",
        )
    ],
    "mnist_m": [
        (file, [f"https://github.com/liyxi/mnist-m/releases/download/data/{file}"], digest)
        for file, digest in (
            ("mnist_m_train.pt.tar.gz", "191ed53db9933bd85cc9700558847391"),
            ("mnist_m_test.pt.tar.gz", "e11cb4d7fff76d7ec588b1134907db59"),
        )
    ],
}

# Of the unpacked files: Debian's package holds the same images, packed anew.
_UNPACKED = {
    "MNIST": {
        "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
        "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
        "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
        "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
    },
    "FashionMNIST": {
        "train-images-idx3-ubyte": "f4a8712d7a061bf5bd6d2ca38dc4d50a",
        "train-labels-idx1-ubyte": "9018921c3c673c538a1fc5bad174d6f9",
        "t10k-images-idx3-ubyte": "8181f5470baa50b63fa0f6fddb340f0a",
        "t10k-labels-idx1-ubyte": "15d484375f8d13e6eb1aabb0c3f46965",
    },
}


def remote(kind: str) -> Listing:
    """Return (file, addresses to try in turn, MD5) of what is fetched for a dataset.

    `kind` is the name of a class of torchvision.datasets, which keeps both, or a key of the
    table above.
    """
    if kind in _ELSEWHERE:
        return _ELSEWHERE[kind]
    from torchvision import datasets

    keeper = getattr(datasets, kind)
    if kind in ("MNIST", "FashionMNIST"):
        return [(file, [m + file for m in keeper.mirrors], md5) for file, md5 in keeper.resources]
    if kind == "SVHN":
        splits = [keeper.split_list[split] for split in ("train", "test")]
        return [(file, [address], md5) for address, file, md5 in splits]
    if kind == "DTD":
        return [(keeper._URL.rpartition("/")[2], [keeper._URL], keeper._MD5)]
    return [(keeper.filename, [keeper.url], keeper.tgz_md5)]


def checksums(kind: str) -> dict[str, str]:
    """Return {file: MD5 when unpacked} of a dataset's files on disk, {} where none is known."""
    if kind in _UNPACKED:
        return _UNPACKED[kind]
    if kind == "SVHN":
        return {file: md5 for file, _, md5 in remote(kind)}
    if kind in ("CIFAR10", "CIFAR100"):
        from torchvision import datasets

        keeper = getattr(datasets, kind)
        return {file: md5 for file, md5 in (*keeper.train_list, *keeper.test_list)}
    return {}


def download(path: Path, addresses: list[str], digest: str, tell: Callable[[str], None]) -> None:
    """Write to `path` what the first address gives that answers with the right MD5.

    Raises:
        OSError: none did; one line that says of each why.
    """
    failures = []
    for address in addresses:
        request = urllib.request.Request(address, headers={"User-Agent": "fedscale"})
        md5 = hashlib.md5(usedforsecurity=False)
        try:
            with (
                urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as answer,
                path.open("wb") as out,
            ):
                length = answer.headers.get("Content-Length") or ""
                size = f" ({int(length) / 2**20:,.1f} MiB)" if length.isdecimal() else ""
                tell(f"downloading {path.name}{size}")
                while block := answer.read(1 << 20):
                    md5.update(block)
                    out.write(block)
        # A connection that breaks off is no OSError where the answer comes in chunks.
        except (OSError, http.client.HTTPException) as error:
            failures.append(f"{address}: {' '.join(f'{type(error).__name__}: {error}'.split())}")
            continue
        if md5.hexdigest() == digest:
            return
        failures.append(f"{address}: MD5 is {md5.hexdigest()}, expected {digest}")
    raise OSError("; ".join(failures))


def unpack(path: Path, folder: Path, files: Iterable[str]) -> None:
    """Move a download into a folder; of a .tar.gz, only the files that are read.

    Args:
        path: what was downloaded.
        folder: where it goes.
        files: paths relative to the dataset's top folder, wherever that lies in the archive; one
            that ends in "/" stands for all below it.
    """
    if not path.name.endswith(".tar.gz"):
        os.rename(path, folder / path.name)
        return
    wanted = frozenset(files)
    with tarfile.open(path) as archive:
        for member in archive:
            place = _place(member.name, wanted) if member.isfile() else ""
            if place and (content := archive.extractfile(member)):
                target = folder / place
                target.parent.mkdir(parents=True, exist_ok=True)
                with content, target.open("wb") as out:
                    shutil.copyfileobj(content, out)


def _place(name: str, wanted: frozenset[str]) -> str:
    """Where a member of an archive goes, "" for nowhere: only ever below the wanted paths."""
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if not parts or any(part.startswith(".") for part in parts):
        return ""
    for start in range(len(parts)):
        if "/".join(parts[start:]) in wanted:
            return "/".join(parts[start:])
        for end in range(start + 1, len(parts)):
            if "/".join(parts[start:end]) + "/" in wanted:
                return "/".join(parts[start:])
    return ""
