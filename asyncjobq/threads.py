"""The threads of `def` handlers, which cannot be interrupted but can be kept from starting."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from typing import Any

from asyncjobq.forks import end_if_forked


class HandlerThread:
    """Whether a `def` handler's thread is at work, which cannot be interrupted."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.at_work = False
        self._barred = False

    def run(self, function: Callable[[], Any]) -> Any:
        """Call the handler; in its thread."""
        with self._lock:
            if self._barred:  # while it waited for a thread that was free
                raise asyncio.CancelledError
            self.at_work = True
        pid = os.getpid()
        try:
            value = function()
        except BaseException as error:
            end_if_forked(pid, error)
            raise
        end_if_forked(pid)
        return value

    def bar(self) -> bool:
        """Keep the handler from being called in a thread from now on; False if one is at work."""
        with self._lock:
            self._barred = not self.at_work
            return self._barred
