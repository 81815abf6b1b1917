"""One writer per sweep in an object store, which has no locks: a mark that its holder renews.

A mark is a file `<sweep>/_writer-…`. Who starts writes his own, then looks for others: of two that
start at once at least one sees the other, so two never go on. A mark that is not renewed is that of
a dead process. Times are the store's own.
"""

from __future__ import annotations

import contextlib
import threading
import uuid
from collections.abc import Iterator

from pyarrow import fs

from fedscale import files

RENEW_S = 10.0
"""Seconds between two renewals of a mark."""
DEAD_S = 40.0
"""Seconds without renewal after which a mark counts for nothing."""


class Claimed(files.StoreError):
    """Another process writes there."""


@contextlib.contextmanager
def claimed(place: files.Place) -> Iterator[None]:
    """Hold the mark of a sweep's folder while inside.

    Raises:
        Claimed: another process holds it.
        StoreError: the mark cannot be written.
    """
    system, folder = files.locate(place)
    mine = f"{folder}/_writer-{uuid.uuid4().hex}"
    files.put(system, mine, b"")
    try:
        ages = _ages(system, folder, mine)
        living = [age for age in ages.values() if age < DEAD_S]
        if living:
            raise Claimed(
                f"another sweep is writing to {files.shown(place)} (its last sign: "
                f"{max(0.0, min(living)):.0f} s ago); wait for it or choose another folder; if it "
                f"was killed, its mark is void after {DEAD_S:.0f} s"
            )
        for dead in ages:
            with contextlib.suppress(OSError):
                system.delete_file(dead)
        with _renewed(system, mine):
            yield
    finally:
        with contextlib.suppress(OSError):
            system.delete_file(mine)


def _ages(system: fs.FileSystem, folder: str, mine: str) -> dict[str, float]:
    """Return the seconds since each mark but mine was renewed, seen from when mine was written."""
    with files.named(folder):
        found = system.get_file_info(fs.FileSelector(folder))
    times = {info.path: info.mtime for info in found if info.base_name.startswith("_writer-")}
    now = times.pop(mine)
    return {path: (now - written).total_seconds() for path, written in times.items()}


@contextlib.contextmanager
def _renewed(system: fs.FileSystem, mine: str) -> Iterator[None]:
    over = threading.Event()

    def renew() -> None:
        while not over.wait(RENEW_S):
            with contextlib.suppress(files.StoreError):  # the store may be back the next time
                files.put(system, mine, b"")

    thread = threading.Thread(target=renew, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
