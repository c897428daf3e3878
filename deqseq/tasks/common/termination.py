"""Ends a program on SIGTERM: by an exception or, if the program hangs, by an alarm."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import cache
from typing import Any

_TIME_TO_END = 25  # seconds; torchrun kills a process 30 seconds after it has sent SIGTERM
_AGAIN = 0.01  # seconds until a signal is sent again
_STOP = 0  # tells the watching thread to stop; no signal has this number


class Terminated(KeyboardInterrupt):
    """Raised when the process receives SIGTERM."""


@contextmanager
def terminable() -> Iterator[None]:
    """A context in which SIGTERM raises :class:`Terminated`.

    Python drops exceptions in some places, such as a ``__del__`` method. If SIGTERM or Ctrl-C arrives there,
    it is sent again.

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

    several = int(os.environ.get("WORLD_SIZE") or 1) > 1
    former = signal.signal(signal.SIGTERM, terminate)
    try:
        with _sent_again(), _alarmed() if several else nullcontext():
            yield
    finally:
        signal.signal(signal.SIGTERM, former)


@contextmanager
def _sent_again() -> Iterator[None]:
    """A context in which SIGTERM and SIGINT are sent again if Python drops the exception that they raise."""
    former, timers = sys.unraisablehook, list[threading.Timer]()

    def hook(dropped: Any) -> None:
        if not issubclass(dropped.exc_type, KeyboardInterrupt):
            return former(dropped)
        number = signal.SIGTERM if issubclass(dropped.exc_type, Terminated) else signal.SIGINT
        timers.append(threading.Timer(_AGAIN, os.kill, (os.getpid(), number)))
        timers[-1].start()

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = former
        for timer in timers:
            timer.cancel()
            timer.join()


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
