"""Jobs in: the methods of the scheduler that enqueue."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar, Unpack, overload

from asyncjobq.callers import AsyncCaller, SyncCaller, in_sync_transaction_of
from asyncjobq.drafts import Draft
from asyncjobq.enqueue import insert_drafts, insert_jobs
from asyncjobq.errors import InvalidJobError
from asyncjobq.job import Job
from asyncjobq.lifetime import block
from asyncjobq.limit_rules import LimitRules
from asyncjobq.limits import Limit
from asyncjobq.options import JobOptionArgs, JobOptions, JobSpec
from asyncjobq.scheduler.access import Access
from asyncjobq.scheduler.hooks import MetaSource
from asyncjobq.specs import as_spec, checked_args
from asyncjobq.states import Kind
from asyncjobq.workflow import Workflow

R = TypeVar("R")


class Enqueuing(Access):
    """Enqueues jobs, checking their arguments where their handler is known."""

    _meta_sources: list[MetaSource]
    _limits: tuple[Limit, ...]
    _rules: LimitRules | None = None

    @overload
    async def enqueue(
        self,
        job: JobSpec[R],
        /,
        *,
        session: AsyncCaller | None = None,
        **options: Unpack[JobOptionArgs],
    ) -> Job[R]: ...
    @overload
    async def enqueue(
        self,
        job: str,
        args: Mapping[str, Any] | None = None,
        /,
        *,
        session: AsyncCaller | None = None,
        **options: Unpack[JobOptionArgs],
    ) -> Job[Any]: ...
    async def enqueue(
        self,
        job: JobSpec[Any] | str,
        args: Mapping[str, Any] | None = None,
        /,
        *,
        session: AsyncCaller | None = None,
        **options: Unpack[JobOptionArgs],
    ) -> Job[Any]:
        """Enqueue one job: `handler.job(...)`, or a type's name with its arguments as a dict.

        With `session` (an AsyncSession or AsyncConnection) the job is a row of the caller's
        transaction: it exists when that commits, and never if it is rolled back. Without, it is
        committed here. Raises InvalidJobError before anything is written.
        """
        spec = self._spec(job, args, options)
        return (await self._insert([spec], session))[0]

    async def enqueue_many(
        self, jobs: Iterable[JobSpec[R]], /, *, session: AsyncCaller | None = None
    ) -> list[Job[R]]:
        """Enqueue many jobs in one transaction, in order, with few statements."""
        return await self._insert([self._checked(spec) for spec in jobs], session)

    @overload
    def enqueue_sync(
        self, session: SyncCaller, job: JobSpec[R], /, **options: Unpack[JobOptionArgs]
    ) -> Job[R]: ...
    @overload
    def enqueue_sync(
        self,
        session: SyncCaller,
        job: str,
        args: Mapping[str, Any] | None = None,
        /,
        **options: Unpack[JobOptionArgs],
    ) -> Job[Any]: ...
    def enqueue_sync(
        self,
        session: SyncCaller,
        job: JobSpec[Any] | str,
        args: Mapping[str, Any] | None = None,
        /,
        **options: Unpack[JobOptionArgs],
    ) -> Job[Any]:
        """Enqueue one job in the transaction of a synchronous Session or Connection."""
        spec = self._spec(job, args, options)
        work = self._in_callers_terms(lambda c, backend: insert_jobs(c, backend, [spec]))
        return in_sync_transaction_of(session, work, self._tell_enqueued)[0]

    @block
    async def workflow(
        self,
        name: str,
        /,
        *,
        session: AsyncCaller | None = None,
        fail_fast: bool = False,
        **options: Unpack[JobOptionArgs],
    ) -> AsyncIterator[Workflow]:
        """Describe a graph in the block; it is written when the block ends, and not if it raises.

        The workflow is a container: it ends when the last job in it has ended. Nothing is written
        if anything in it is refused.
        """
        workflow = Workflow(name, JobOptions.of({**options, "name": name}), fail_fast=fail_fast)
        try:
            yield workflow
        finally:
            workflow.close()
        drafts = [self._checked_draft(draft) for draft in workflow.drafts]
        jobs = await self._write(
            lambda c, b: insert_drafts(c, b, drafts), session, self._tell_enqueued
        )
        for draft, job in zip(drafts, jobs, strict=True):
            if draft.node is not None:
                draft.node.write(job.id)

    def _checked_draft(self, draft: Draft) -> Draft:
        if draft.kind is Kind.CONTAINER:
            return replace(draft, spec=self._with_meta(draft.spec))
        return replace(draft, spec=self._checked(draft.spec))

    def _spec(
        self, job: JobSpec[Any] | str, args: Mapping[str, Any] | None, options: Mapping[str, Any]
    ) -> JobSpec[Any]:
        return self._checked(as_spec(job, args, options))

    def _checked(self, spec: JobSpec[Any]) -> JobSpec[Any]:
        return self._with_meta(self._bound(spec))

    def _bound(self, spec: JobSpec[Any]) -> JobSpec[Any]:
        """Return a job with what its handler says of it, if that is known here."""
        if not isinstance(spec, JobSpec):
            raise InvalidJobError(f"{spec!r} is not a job; make one with handler.job(...).")
        rules = self._limit_rules()
        handler = self._handlers.find(spec.type)
        if handler is None:
            return replace(spec, args=checked_args(spec, None))
        args = checked_args(spec, handler.encode)
        queued = replace(spec, args=args, default_queue=spec.default_queue or handler.options.queue)
        key = rules.key_of(queued.queue, queued.type, args)
        return replace(queued, limit_key=key) if key else queued

    async def _insert(
        self, specs: Sequence[JobSpec[Any]], session: AsyncCaller | None
    ) -> list[Job[Any]]:
        return await self._write(
            lambda c, b: insert_jobs(c, b, specs), session, self._tell_enqueued
        )

    def _tell_enqueued(self, jobs: Iterable[Job[Any]]) -> None:
        self._emitter.enqueued(jobs)

    def _with_meta(self, spec: JobSpec[Any]) -> JobSpec[Any]:
        """Return a job with what the scheduler's `meta_from` functions add; its own comes first."""
        added = self._added_meta()
        own = spec.chosen.meta or {}
        return spec.options(meta={**added, **own}) if added else spec

    def _added_meta(self) -> dict[str, Any]:
        added: dict[str, Any] = {}
        for source in self._meta_sources:
            added |= source()
        return added

    def _limit_rules(self) -> LimitRules:
        """Return the limits of the jobs, made anew when handlers were added."""
        handlers, known = self._registry(), self._rules
        if known is None or known.revision != handlers.revision:
            known = self._rules = LimitRules(self._limits, handlers)
        return known
