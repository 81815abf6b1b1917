"""Ctrl-C during a sweep: once ends it in order, twice at once; both say how to go on."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from rich.console import Console

STOPPED = 130
"""Exit status of a sweep that was stopped, as shells have it for SIGINT."""


class Stop:
    """What Ctrl-C does to a sweep.

    Tune ends in order at SIGUSR1 as it does at SIGINT (its own handler is off): trials end after
    the round they are in, and the state of a search is written. Everything committed stays.
    """

    def __init__(self, console: Console) -> None:
        self.console, self.asked = console, False

    @contextmanager
    def in_order(self) -> Iterator[None]:
        """Let a first Ctrl-C end Tune's run that goes on inside, and a second the process."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = [(s, signal.getsignal(s)) for s in (signal.SIGINT, signal.SIGUSR1)]
        os.environ["TUNE_DISABLE_SIGINT_HANDLER"] = "1"
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        signal.signal(signal.SIGINT, self._first)
        try:
            yield
        finally:
            for number, handler in before:
                signal.signal(number, handler)

    def _first(self, number: int, frame: FrameType | None) -> None:
        if self.asked:  # Tune puts this handler back when it takes the first one
            raise KeyboardInterrupt
        self.asked = True
        if signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN:  # Tune has not begun
            raise KeyboardInterrupt
        self.console.print("stopping in order (Ctrl-C again stops at once) ...")
        signal.raise_signal(signal.SIGUSR1)


def resume_command() -> str:
    """Return the command that goes on with the sweep that this process runs."""
    words = [word for word in sys.argv if word not in ("--resume", "--fresh")]
    return shlex.join(["python", *words, "--resume"])
