"""Ends a program on SIGTERM: in order if it can, at once if it hangs."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from deqseq.tasks.common import processes

_PATIENCE = 10  # seconds in which Python must notice the signal; torchrun kills processes after 30
_STOP = 0  # no signal has this number


class Terminated(KeyboardInterrupt):
    """Raised when the process receives SIGTERM."""


@contextmanager
def terminable(last_words: str) -> Iterator[None]:
    """A context in which SIGTERM raises :class:`Terminated`.

    In a run of several processes, a process hangs if it waits for the device while another process of the run
    is gone. Python then cannot raise the exception, and this context ends the process.

    Args:
        last_words: what a process that hangs prints before it ends.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    noticed = threading.Event()

    def terminate(*_: Any) -> None:
        noticed.set()
        # Remove DataLoader's SIGCHLD handler. This handler would raise an error if SIGTERM also ended the
        # workers of a DataLoader.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        raise Terminated

    former = signal.signal(signal.SIGTERM, terminate)
    try:
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            yield
        else:
            with _watched(noticed, last_words):
                yield
    finally:
        signal.signal(signal.SIGTERM, former)


@contextmanager
def _watched(noticed: threading.Event, last_words: str) -> Iterator[None]:
    """A context in which a thread ends the process, if SIGTERM arrives and ``noticed`` is not set soon."""
    # Python writes the number of a signal to the pipe as soon as it arrives, also while Python code waits.
    read, write = os.pipe()
    os.set_blocking(write, False)
    former = signal.set_wakeup_fd(write, warn_on_full_buffer=False)

    def watch() -> None:
        while (number := os.read(read, 1)[0]) != _STOP:
            if number == signal.SIGTERM and not noticed.wait(_PATIENCE):
                processes.record(last_words)
                print(f"{processes.name()}{last_words}", file=sys.stderr, flush=True)
                os._exit(128 + signal.SIGTERM)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(former)
        os.write(write, bytes([_STOP]))
        watcher.join()
        os.close(write)
        os.close(read)
