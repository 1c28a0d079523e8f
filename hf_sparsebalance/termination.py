"""SIGTERM asks a training to save and leave: clusters send it before they take a machine away."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType

EXIT_STATUS = 128 + signal.SIGTERM


class TerminationRequest:
    """While it is entered, SIGTERM no longer ends the process but is remembered; elsewhere than in the main thread,
    where Python allows no handlers, nothing changes.

    Attributes:
        received: whether the signal came.
    """

    def __init__(self) -> None:
        self.received = False

    def __enter__(self) -> TerminationRequest:
        self._handles = threading.current_thread() is threading.main_thread()
        if self._handles:
            self._previous = signal.signal(signal.SIGTERM, self._remember)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._handles:
            signal.signal(signal.SIGTERM, self._previous)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.received = True
