"""Ends a program on SIGTERM: by an exception or, if the program hangs, by an alarm."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

_TIME_TO_END = 25  # seconds; torchrun kills a process 30 seconds after it has sent SIGTERM
_STOP = 0  # tells the watching thread to stop; no signal has this number


class Terminated(KeyboardInterrupt):
    """Raised when the process receives SIGTERM."""


@contextmanager
def terminable() -> Iterator[None]:
    """A context in which SIGTERM raises :class:`Terminated`.

    If ``WORLD_SIZE`` is above 1, SIGTERM also sets an alarm, which ends the process 25 seconds later. The
    reason is that Python cannot raise the exception while the process waits for a GPU, and the GPU may wait
    for a process that is gone. The alarm stays set after :class:`Terminated`, so the program must end.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def terminate(*_: Any) -> None:
        # Remove DataLoader's SIGCHLD handler: it raises an error if SIGTERM has also ended its workers.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        raise Terminated

    former = signal.signal(signal.SIGTERM, terminate)
    try:
        if int(os.environ.get("WORLD_SIZE") or 1) == 1:
            yield
        else:
            with _alarmed():
                yield
    finally:
        signal.signal(signal.SIGTERM, former)


@contextmanager
def _alarmed() -> Iterator[None]:
    """A context in which SIGTERM sets an alarm."""
    # Python writes the number of a signal to the pipe at once, also while the main thread waits in C.
    read, write = os.pipe()
    os.set_blocking(write, False)
    _no_signals_from_children()
    former = signal.set_wakeup_fd(write, warn_on_full_buffer=False)

    def watch() -> None:
        while (number := os.read(read, 1)[0]) != _STOP:
            if number == signal.SIGTERM:
                signal.setitimer(signal.ITIMER_REAL, _TIME_TO_END)

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


@cache
def _no_signals_from_children() -> None:
    """Make forked children close their end of the pipe: a signal to a child is none to this process."""

    def close() -> None:
        with suppress(ValueError):  # raised in a thread other than the main thread
            signal.set_wakeup_fd(-1)

    os.register_at_fork(after_in_child=close)
