"""Whole files on any filesystem: a reader sees the old bytes or the new ones, never a part.

A place is a local path or any URI that pyarrow knows (s3://, gs://, abfs://, fsspec+…://).
Locally a file is written beside under a name that starts with ".", brought to the disk and
renamed; in an object store it appears when its upload is complete.
"""

from __future__ import annotations

import contextlib
import os
import re
import uuid
from collections.abc import Iterator
from typing import TypeAlias
from urllib.parse import quote

import pyarrow as pa
from pyarrow import fs

Place: TypeAlias = "str | os.PathLike[str]"

ATTEMPTS = 6
"""Times that S3 is asked: some 25 s in all if it is silent (pyarrow's own retries: 100 s)."""
GIVE_UP_S = 20
"""Seconds after which Google's store is given up (its own: 15 minutes)."""


class StoreError(RuntimeError):
    """Something cannot be written or read; one line naming the place and the reason."""


class NotThere(StoreError):
    """A file that would be read does not exist."""


def join(place: Place, *names: str) -> str:
    """Append path parts to a path or URI (before the URI's query, where there is one)."""
    text = os.fspath(place)
    base, mark, query = text.partition("?") if "://" in text else (text, "", "")
    return "/".join([base.rstrip("/"), *names]) + mark + query


def locate(place: Place) -> tuple[fs.FileSystem, str]:
    """Return the filesystem of a place and the path in it.

    In a URI "%20" is a space; in a plain path it stays "%20". An object store that does not answer
    is given up within half a minute.

    Raises:
        StoreError: not a URI, or a filesystem that pyarrow does not know.
    """
    text = os.fspath(place)
    if "://" not in text:
        return fs.LocalFileSystem(), os.path.abspath(os.path.expanduser(text))
    uri = quote(text, safe="%/:?&=+,;@#~!$'()*[]")
    if uri.startswith(("gs://", "gcs://")) and "retry_limit_seconds=" not in uri:
        uri += f"{'&' if '?' in uri else '?'}retry_limit_seconds={GIVE_UP_S}"
    try:
        files, path = fs.FileSystem.from_uri(uri)
        if files.type_name == "s3":
            # A URI cannot say how often to try; the form in which pyarrow pickles it can.
            rebuild, (options,) = files.__reduce__()
            retries = fs.AwsStandardS3RetryStrategy(max_attempts=ATTEMPTS)
            files = rebuild({**options, "retry_strategy": retries})
    except (pa.ArrowException, OSError, ImportError) as error:
        raise StoreError(f"{shown(text)}: {one_line(error)}") from None
    return files, path.rstrip("/")


def shown(place: Place) -> str:
    """Return a place as it may be printed: without the user and the key of a URI."""
    return re.sub(r"://[^/?#]*@", "://", os.fspath(place))


def put(files: fs.FileSystem, path: str, data: bytes) -> None:
    """Write a file atomically and durably, with the folders above it.

    Raises:
        StoreError: it cannot be written.
    """
    with named(path):
        if files.type_name != "local":
            with files.open_output_stream(path) as sink:
                sink.write(data)
            return
        folder, name = os.path.split(path)
        _make_folder(folder)
        partial = os.path.join(folder, f".{name}.{uuid.uuid4().hex}.tmp")
        try:
            with open(partial, "xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(partial)
            raise
        _sync_folder(folder)


def write_bytes(root: Place, name: str, data: bytes) -> str:
    """Write the file `name` below `root` atomically; return where it is.

    Raises:
        StoreError: it cannot be written.
    """
    files, folder = locate(root)
    put(files, f"{folder}/{name}", data)
    return join(root, name)


def read_bytes(root: Place, name: str) -> bytes | None:
    """Return the content of the file `name` below `root`, or None where there is none.

    Raises:
        StoreError: it cannot be read.
    """
    files, folder = locate(root)
    path = f"{folder}/{name}"
    try:
        with named(path), files.open_input_file(path) as source:
            return bytes(source.read())
    except NotThere:
        return None


def check_writable(root: Place) -> None:
    """Try to write below `root` and leave nothing behind, not even `root` if it was not there.

    Raises:
        StoreError: nothing can be written there, and why.
    """
    files, folder = locate(root)
    probe = f"{folder}/.writable-{uuid.uuid4().hex}"
    missing = []
    above = folder if files.type_name == "local" else ""
    while above and not os.path.lexists(above):
        missing.append(above)
        above = os.path.dirname(above)
    try:
        put(files, probe, b"")
        with named(probe):
            files.delete_file(probe)
    except StoreError as error:
        reason = str(error).removeprefix(f"{probe}: ")
        raise StoreError(f"{shown(root)}: cannot be written to: {reason}") from None
    finally:
        for path in missing:
            with contextlib.suppress(OSError):
                os.rmdir(path)


@contextlib.contextmanager
def named(path: str) -> Iterator[None]:
    """Turn an error of the system or the object store into a StoreError that names the path."""
    try:
        yield
    except (OSError, pa.ArrowException) as error:
        number = getattr(error, "errno", None)
        kind = NotThere if isinstance(error, FileNotFoundError) else StoreError
        raise kind(f"{path}: {os.strerror(number) if number else one_line(error)}") from None


def one_line(error: BaseException) -> str:
    """Return an error's text as one line of at most 300 characters."""
    return " ".join(str(error).split())[:300]


def _make_folder(folder: str) -> None:
    if os.path.isdir(folder):
        return
    parent = os.path.dirname(folder)
    _make_folder(parent)
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder)
    _sync_folder(parent)


def _sync_folder(folder: str) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
