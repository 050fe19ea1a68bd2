"""Runs jobs as soon as a session of the application has committed them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from sqlalchemy.util.concurrency import await_only, in_greenlet

from asyncjobq.wake import Listener


class AtCommit(Listener):
    """Is told of each commit that may have brought jobs, in the middle of its call."""

    def __init__(self, run: Callable[[], Awaitable[None]]) -> None:
        self._run = run
        super().__init__()

    def ring(self, delay: float = 0.0) -> None:
        """Run the jobs now, where an AsyncSession has committed and its caller can wait.

        A synchronous session has nobody who could await them, and a connection tells of its commit
        only before it (with a delay): what these bring is run later.
        """
        if delay == 0.0 and in_greenlet():
            await_only(self._run())
