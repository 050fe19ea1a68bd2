"""What people do to jobs that are there, through the scheduler."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from sqlalchemy import Connection

from asyncjobq import control, control_many, pauses
from asyncjobq.backends.base import Backend
from asyncjobq.callers import AsyncCaller
from asyncjobq.control import Cancelled, cancel_job, retry_job
from asyncjobq.emitter import Told
from asyncjobq.inspection import Filter, States, check_count
from asyncjobq.job import JobRef, id_of
from asyncjobq.pauses import Pause
from asyncjobq.prune import begin_in_callers
from asyncjobq.retention import InCallers, Pruning, ages_of
from asyncjobq.scheduler.access import Access
from asyncjobq.settings import Duration
from asyncjobq.states import State
from asyncjobq.waiting import Waiters


class Controls(Access):
    """Cancels jobs and runs them again, holds lanes back, and clears away what is old."""

    _waiters: Waiters

    async def cancel(self, job: JobRef, /, *, session: AsyncCaller | None = None) -> Cancelled:
        """Cancel a job, or a container with all that is in it, also what is added meanwhile.

        Answers what happened: see `Cancelled`. The handler of one that runs is cancelled at once
        where there are notifications, else at its worker's next poll.
        """
        job_id = id_of(job)

        def work(connection: Connection, backend: Backend) -> _Done:
            answers = {job_id: cancel_job(connection, backend, job_id)}
            return _Done(answers, self._look_up(connection, backend, answers))

        done = await self._write(work, session, self._tell_cancelled)
        return done.answers[job_id]

    def _look_up(
        self, connection: Connection, backend: Backend, answers: Mapping[int, Cancelled]
    ) -> Told:
        ended = [job_id for job_id, answer in answers.items() if answer is Cancelled.CANCELLED]
        return self._emitter.look_up(connection, backend, ended)

    def _tell_cancelled(self, done: _Done) -> None:
        """Tell subscribers, and those who wait, of what is cancelled and committed."""
        self._emitter.cancelled(done.told, control.ON_REQUEST)
        for job_id, answer in done.answers.items():
            if answer is Cancelled.CANCELLED:
                self._waiters.tell(job_id)

    async def cancel_many(
        self,
        *,
        state: States | None = None,
        type: str | None = None,  # noqa: A002  the word of all calls
        queue: str | None = None,
        group_key: str | None = None,
        session: AsyncCaller | None = None,
    ) -> dict[Cancelled, int]:
        """Cancel all jobs that match, as `cancel` does; at least one filter must be given.

        In short transactions one after the other, or all in the caller's. Returns how many were
        cancelled, and how many were asked to end.
        """
        wanted = Filter(state=state, type=type, queue=queue, group_key=group_key)
        series, counts = control_many.to_cancel(wanted), Counter[Cancelled]()

        def step(connection: Connection, backend: Backend) -> tuple[_Done, control_many.Series]:
            answers, following = control_many.cancel_once(connection, backend, series)
            return _Done(answers, self._look_up(connection, backend, answers)), following

        while not series.over:
            done, series = await self._write(step, session, lambda d: self._tell_cancelled(d[0]))
            counts.update(done.answers.values())
        return {answer: counts[answer] for answer in (Cancelled.CANCELLED, Cancelled.REQUESTED)}

    async def retry(self, job: JobRef, /, *, session: AsyncCaller | None = None) -> None:
        """Run a failed or cancelled job again, and what its end had cancelled.

        A container is opened again, and what did not succeed in it is run again.
        """
        job_id = id_of(job)
        await self._write(lambda c, b: retry_job(c, b, job_id), session)

    async def retry_many(
        self,
        *,
        state: States = State.FAILED,
        type: str | None = None,  # noqa: A002
        queue: str | None = None,
        group_key: str | None = None,
        session: AsyncCaller | None = None,
    ) -> int:
        """Run all jobs again that failed and match, and what their ends had cancelled.

        With `state`, cancelled ones. Containers open again with what is in them. In short
        transactions one after the other, or all in the caller's. Returns how many jobs matched.
        """
        wanted = Filter(state=state, type=type, queue=queue, group_key=group_key)
        series, done = control_many.to_retry(wanted), 0
        while not series.over:
            step = partial(control_many.retry_once, series=series)
            retried, series = await self._write(step, session)
            done += retried
        return done

    async def pause(
        self,
        *,
        queue: str | None = None,
        type: str | None = None,  # noqa: A002
        session: AsyncCaller | None = None,
    ) -> None:
        """Start no more jobs of this queue, or of this type, until `resume`; running ones go on.

        No claim that begins after this has returned, or the caller's transaction has committed,
        takes one, whichever worker it is.
        """
        kind, name = pauses.named(queue, type)
        await self._write(lambda c, b: control.pause(c, b, kind, name), session)

    async def resume(
        self,
        *,
        queue: str | None = None,
        type: str | None = None,  # noqa: A002
        session: AsyncCaller | None = None,
    ) -> bool:
        """Start jobs of this queue, or of this type, again; tell whether it was paused."""
        kind, name = pauses.named(queue, type)
        return await self._write(lambda c, b: control.resume(c, b, kind, name), session)

    async def paused(self, *, session: AsyncCaller | None = None) -> list[Pause]:
        """Return what is paused."""
        return await self._read(pauses.list_pauses, session)

    async def prune(
        self,
        *,
        older_than: Duration,
        states: States = (State.DONE, State.FAILED, State.CANCELLED),
        limit: int | None = None,
        session: AsyncCaller | None = None,
    ) -> int:
        """Delete jobs that ended longer ago than that, in one of these states.

        A family (a container or job with all that is below it) goes as a whole, when the topmost
        of it is old enough; and nothing goes that a job which may still run depends on. In short
        transactions one after the other, or all in the caller's, which has to be at READ COMMITTED
        and keeps what is deleted locked until it ends: give a `limit` then. With it, this ends
        once so many are deleted. Returns how many were.
        """
        ages = ages_of(older_than, states)
        if limit is not None:
            check_count("limit", limit)
        if session is None:
            return await Pruning(self._database, ages).run(limit)
        await self._write(begin_in_callers, session)
        return await Pruning(InCallers(self._database.backend, session), ages).run(limit)


@dataclass(frozen=True)
class _Done:
    """What was cancelled, how, and what events say of it."""

    answers: Mapping[int, Cancelled]
    told: Told
