"""Handle signals even while the main thread hangs in a device call.

Python runs signal handlers on the main thread only, between two bytecode instructions. The byte that the interpreter
writes to the wake-up file descriptor arrives at once, and another thread can read it.
"""

import signal
import socket
from collections.abc import Callable, Iterable


class SignalPipe:
    """Turns signals into calls on the thread that polls `fileno()`. Construct it on the main thread."""

    def __init__(self, signals: Iterable[signal.Signals], on_signal: Callable[[signal.Signals], None]) -> None:
        self._on_signal = on_signal
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        signal.set_wakeup_fd(self._writer.fileno())
        for number in signals:
            signal.signal(number, lambda *_: None)

    def fileno(self) -> int:
        return self._reader.fileno()

    def read(self) -> None:
        """Call `on_signal` for each signal that has arrived."""
        for number in self._reader.recv(64):
            self._on_signal(signal.Signals(number))
