"""One leased job: call its handler under its deadline and say how it ended. No SQL, never raises.

The handler runs in a task of its own, inside of its middleware and of its resources. This one
waits for it, and is told from outside by `stop` why it should end early. What the handler raises,
whatever it is, becomes an outcome.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import threading
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import replace
from enum import Enum
from functools import partial
from typing import Any

import anyio.to_thread
from anyio import CapacityLimiter

from asyncjobq import codec
from asyncjobq.clock import monotonic, seconds
from asyncjobq.context import JobContext
from asyncjobq.ends import AttemptEnd, Cancel, Fail, Retry, Snooze
from asyncjobq.error_texts import described, summary
from asyncjobq.errors import ArgumentsError, ResultError
from asyncjobq.forks import InOneProcess
from asyncjobq.handlers import AnyHandler
from asyncjobq.injection import Resources
from asyncjobq.lease import Claimed
from asyncjobq.middleware import Middleware, surrounded
from asyncjobq.options import LONGEST
from asyncjobq.outcomes import Ending, Failure, Outcome
from asyncjobq.processes import HandlerProcesses
from asyncjobq.threads import HandlerThread

logger = logging.getLogger("asyncjobq.run")


class Stop(Enum):
    """Why a job is ended from outside."""

    TIMED_OUT = "timed out"
    CANCELLED = "cancelled on request"
    INTERRUPTED = "interrupted by shutdown"
    LEASE_LOST = "lease lost"


_RUNNING: ContextVar[JobRun] = ContextVar("asyncjobq run")


class JobRun:
    """One attempt of one job in this process."""

    def __init__(
        self,
        claimed: Claimed,
        handler: AnyHandler,
        context: JobContext,
        threads: CapacityLimiter,
        grace: float,
        max_result_bytes: int = codec.MAX_BYTES,
        around: Sequence[Middleware] = (),
        resources: Resources | None = None,
        processes: HandlerProcesses | None = None,
    ) -> None:
        """`grace` seconds are left for cleaning up, before the outcome is written without it."""
        self.on_start: Callable[[], None] = lambda: None
        self.claimed = claimed
        self.handler = handler
        self.context = context
        self.threads = threads
        self._grace = grace
        self._max_result_bytes = max_result_bytes
        self._around = (*around, *handler.around)
        self._resources = resources or Resources()
        self._processes = processes
        self._thread = HandlerThread()
        self.deadline = monotonic() + claimed.timeout if claimed.timeout else None
        self.stopped: Stop | None = None
        self.over = False
        """Whether the handler has ended, and its outcome is being written."""
        self._task: asyncio.Task[Any] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()
        self._timer: asyncio.TimerHandle | None = None
        self._ended: Callable[[Outcome], None] = lambda outcome: None

    @property
    def overdue(self) -> bool:
        """Whether the job's deadline is past, after which its lease is not renewed."""
        return self.deadline is not None and monotonic() >= self.deadline

    def stop(self, reason: Stop) -> None:
        """Ask the handler to end; the first reason counts. From any thread."""
        with self._lock:
            if self.stopped is not None:
                return
            self.stopped = reason
        self.context.cancel_requested = True  # a thread sees it also while the loop is blocked
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop is closed, and the handler gone with it
                self._loop.call_soon_threadsafe(self._halt)

    def is_at_work_in(self, task: asyncio.Task[Any]) -> bool:
        """Tell whether a task is the handler's own, or (from Python 3.12 on) was made by it."""
        if task is self._task:
            return True
        context = getattr(task, "get_context", contextvars.Context)()
        return context.get(_RUNNING) is self

    def begin(self, ended: Callable[[Outcome], None]) -> None:
        """Call the handler, and say how it ended; once, on this loop, at the latest `grace` after
        it was stopped or its time was over.

        By callbacks: a task that waits for the handler's would cost more than a short job itself.
        """
        self._loop, self._ended = asyncio.get_running_loop(), ended
        if self.stopped is not None:
            return self._end(self._stopped_outcome())
        try:
            arguments = self.handler.decode(codec.decode(self.claimed.args))
        except ArgumentsError as error:
            return self._end(_failed(str(error), error))
        except Exception as error:
            reason = f"The stored arguments cannot be read: {error!r}"
            return self._end(_failed(reason, error))
        self._task = self._loop.create_task(
            self._contained(arguments),
            name=f"asyncjobq job {self.claimed.lease.job_id} ({self.claimed.type})",
            context=contextvars.Context(),  # nothing of whoever started the worker
        )
        self._task.add_done_callback(self._conclude)
        if self.deadline is not None:
            self._call_later(self.deadline - monotonic(), self._time_is_up)
        return self.on_start()

    def _time_is_up(self) -> None:
        self.stop(Stop.TIMED_OUT)

    def _halt(self) -> None:
        """Cancel the handler, and give it up if it does not end."""
        task = self._task
        if task is None or self.over:
            return
        if self._thread.bar():  # one that is at work can only be asked
            task.cancel()
        self._call_later(self._grace, partial(self._conclude, task))

    def _conclude(self, task: asyncio.Task[Any]) -> None:
        if not self.over:
            self._end(self._concluded(task))

    def _end(self, outcome: Outcome) -> None:
        self.over = True
        self._call_no_more()
        self._ended(outcome)

    def _call_later(self, delay: float, call: Callable[[], object]) -> None:
        """Call this after a time, and not what was to be called before."""
        self._call_no_more()
        if self._loop is not None:
            self._timer = self._loop.call_later(delay, call)

    def _call_no_more(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    async def _contained(self, arguments: dict[str, Any]) -> tuple[Any, BaseException | None]:
        """Call the handler; its errors are values, so that none of them can reach the loop."""
        _RUNNING.set(self)
        try:
            return await InOneProcess(self._made(arguments)), None
        except BaseException as error:
            return None, error

    def _made(self, arguments: dict[str, Any]) -> Coroutine[Any, Any, Any]:
        """Return the call of the handler, inside of what surrounds it."""
        if not self._around and not self.handler.injected:
            return self._call(arguments, {})
        call = partial(self._call_with_resources, arguments)
        return surrounded(self._around, self.context, call)

    async def _call_with_resources(self, arguments: dict[str, Any]) -> Any:
        call = partial(self._call, arguments)
        return await self._resources.call(self.handler.injected, self.context, call)

    async def _call(self, arguments: dict[str, Any], injected: dict[str, Any]) -> Any:
        if self.handler.runs_in_process and self._processes is not None:
            args, most = self.claimed.args, self._max_result_bytes
            return await self._processes.run(self.handler, args, most)
        positional = (self.context,) if self.handler.takes_context else ()
        function = partial(self.handler.function, *positional, **arguments, **injected)
        if self.handler.is_async:
            return await function()
        try:
            return await anyio.to_thread.run_sync(
                self._thread.run, function, abandon_on_cancel=True, limiter=self.threads
            )
        finally:
            self._thread.at_work = False

    @property
    def left_behind(self) -> asyncio.Task[Any] | None:
        """The handler's task, if that goes on although the job has ended."""
        return self._task if self._task is not None and not self._task.done() else None

    def _concluded(self, task: asyncio.Task[Any]) -> Outcome:
        if not task.done():
            return self._left_behind()
        if task.cancelled():  # before its first step
            return self._stopped_outcome()
        value, error = task.result()
        too_late = self.stopped in (Stop.TIMED_OUT, Stop.LEASE_LOST)
        # Whatever it made of its cancellation, unless it says itself how the attempt ends.
        gave_way = error is not None and not isinstance(error, AttemptEnd)
        if too_late or (self.stopped is not None and gave_way):
            self._log_own_way(error)
            return self._stopped_outcome()
        return self._succeeded(value) if error is None else self._raised(error)

    def _log_own_way(self, error: BaseException | None) -> None:
        if error is not None and not isinstance(error, asyncio.CancelledError):
            job_id, job_type = self.claimed.lease.job_id, self.claimed.type
            logger.info(
                "Job %s (%s) was stopped (%s), and raised %s.",
                job_id,
                job_type,
                self.stopped,
                summary(error),
            )

    def _left_behind(self) -> Outcome:
        """Give up on a handler that does not end when it is cancelled."""
        logger.error(
            "Job %s (%s) does not end although it was cancelled (%s); it goes on without its slot.",
            self.claimed.lease.job_id,
            self.claimed.type,
            self.stopped,
        )
        if self.stopped is Stop.INTERRUPTED:  # it may still do its work: let its lease run out
            return Outcome(Ending.LEASE_LOST)
        return self._stopped_outcome()

    def _succeeded(self, value: Any) -> Outcome:
        try:
            result = codec.encode(self.handler.encode_result(value))
            codec.check_size(result, self._max_result_bytes)
            return Outcome(Ending.SUCCEEDED, result=result)
        except (ResultError, ValueError) as error:
            reason = f"The handler succeeded, but its result cannot be stored: {error}"
            return _failed(reason, error)
        except Exception as error:
            reason = f"The handler succeeded, but turning its result into JSON raised {error!r}"
            return _failed(reason, error)

    def _stopped_outcome(self) -> Outcome:
        match self.stopped:
            case Stop.LEASE_LOST:
                return Outcome(Ending.LEASE_LOST)
            case Stop.INTERRUPTED:
                return Outcome(Ending.INTERRUPTED, retry_after=0.0)
            case Stop.CANCELLED:
                return Outcome(Ending.CANCELLED, error=Stop.CANCELLED.value)
            case _:
                late = TimeoutError(f"timed out after {self.claimed.timeout:g} s")
                return self._retried(_timed_out(late), late)

    def _raised(self, error: BaseException) -> Outcome:
        if isinstance(error, Snooze):
            return Outcome(Ending.SNOOZED, retry_after=_bounded(error.after))
        text = described(error)
        failure = Failure.of(error, text)
        ended = Outcome(Ending.FAILED, error=text, summary=summary(error), failure=failure)
        match error:
            case Cancel():
                return replace(ended, ending=Ending.CANCELLED)
            case Fail():
                return ended
            case Retry():
                return self._retried(ended, error, error.after)
            case _:
                return self._retried(ended, error)

    def _retried(self, ended: Outcome, error: BaseException, after: float | None = None) -> Outcome:
        """Return the end of an attempt as it is, or with the delay of the next one."""
        attempt, rules = self.claimed.attempt, self.handler.options.rules
        if ended.ending is Ending.TIMED_OUT:
            allowed = rules.allow_timeouts
        else:
            allowed = isinstance(error, Retry) or rules.allow(error)
        if not allowed or attempt >= self.claimed.max_attempts:
            return ended
        try:
            delay = rules.policy(attempt, error) if after is None else after
            bounded = None if delay is None else _bounded(seconds(delay, "Its answer"))
        except BaseException as broken:
            told = f"The retry policy failed in its turn:\n{described(broken)}"
            return replace(ended, error=f"{ended.error}\n\n{told}", summary=None)
        return replace(ended, retry_after=bounded)


def _timed_out(late: TimeoutError) -> Outcome:
    return Outcome(
        Ending.TIMED_OUT, error=str(late), summary=summary(late), failure=Failure.of(late)
    )


def _failed(reason: str, error: BaseException) -> Outcome:
    return Outcome(Ending.FAILED, error=codec.printable(reason), failure=Failure.of(error))


def _bounded(delay: float) -> float:
    return min(max(0.0, delay), LONGEST)
