"""Keep freed memory in the process: at every step the same large blocks are asked for again."""

from __future__ import annotations

import ctypes
import platform

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3


def keep_freed_memory(threshold: int = 2**30) -> bool:
    """Tell glibc to serve and keep blocks below `threshold` bytes from its heap.

    By default glibc maps large blocks afresh and returns them to the system, which costs a page
    fault for every 4 KiB of every large tensor at every step. Applies to the whole process.

    Returns:
        Whether the setting was taken; anywhere but on Linux with glibc nothing happens.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    # Older versions take no mapping threshold above half a heap, 32 MiB.
    mapping = mallopt(M_MMAP_THRESHOLD, threshold) or mallopt(M_MMAP_THRESHOLD, 2**25)
    return bool(mapping and mallopt(M_TRIM_THRESHOLD, threshold))
