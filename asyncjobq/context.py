"""What a handler is given of the job that it runs, and what it may do in its name."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NamedTuple, ParamSpec, Protocol, TypeVar

import anyio.from_thread
from sqlalchemy import Connection
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
from sqlalchemy.orm import Session

from asyncjobq import codec
from asyncjobq.codec import Encoded
from asyncjobq.job import Job
from asyncjobq.limits import MOST
from asyncjobq.options import JobSpec, check_number
from asyncjobq.progress import Progress

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


class Services(Protocol):
    """What the scheduler does for a handler."""

    def session(self) -> AsyncSession:
        """Return a new session on the application's connections."""
        ...

    async def enqueue(self, job: JobSpec[Any] | str, *args: Any, **options: Any) -> Job[Any]:
        """Enqueue an independent job."""
        ...

    async def add_child(
        self, lease: LeaseRef, job: JobSpec[Any] | str, args: Any, key: str | None, session: Any
    ) -> Job[Any]:
        """Add a child to the leased job."""
        ...

    async def set_cost(self, lease: LeaseRef, cost: float) -> None:
        """Correct what the leased job costs."""
        ...

    async def checkpoint(
        self, lease: LeaseRef, value: Any, session: Any, note: Callable[[str], None]
    ) -> None:
        """Store a checkpoint under the lease, and say when it is committed."""
        ...

    def checkpoint_in(
        self, lease: LeaseRef, value: Any, session: Any, note: Callable[[str], None]
    ) -> None:
        """Store a checkpoint in the transaction of a synchronous session."""
        ...

    async def complete(self, lease: LeaseRef, session: Any, result: Any, last: LastWords) -> None:
        """End the leased job in the transaction of a session."""
        ...

    def complete_in(self, lease: LeaseRef, session: Any, result: Any, last: LastWords) -> None:
        """End the leased job in the transaction of a synchronous session."""
        ...

    async def upstreams_of(self, job_id: int) -> list[Job[Any]]:
        """Return the jobs that this one depends on."""
        ...


class LeaseRef(NamedTuple):
    """The lease under which a handler writes."""

    job_id: int
    owner: str
    token: int


@dataclass(frozen=True)
class LastWords:
    """What an attempt that completes its job knows of it."""

    has_children: bool
    """Whether it has added children, which an old snapshot may not show."""
    progress: Encoded | None
    """What has been reported and is not stored yet."""


@dataclass
class JobContext:
    """The running job; taken by a handler as its first positional parameter.

    From a `def` handler, which runs in a thread, call the asynchronous methods through
    `ctx.await_(ctx.enqueue, ...)`.
    """

    job_id: int
    type: str
    attempt: int
    max_attempts: int
    deadline: datetime | None
    """When the job times out, in UTC by the database's clock; None: never."""
    stored_args: str = field(repr=False)
    lease: LeaseRef = field(repr=False)
    services: Services = field(repr=False)
    cancel_requested: bool = False
    """Set when the job is told to stop; for `def` handlers, which cannot be interrupted."""
    queue: str = "default"
    group_key: str = ""
    stored_meta: str | None = field(default=None, repr=False)
    stored_checkpoint: str | None = field(default=None, repr=False)
    reported: Progress = field(default_factory=Progress, repr=False)
    completing: bool = field(default=False, repr=False)
    """Whether the handler has begun to end the job itself."""
    has_children: bool = field(default=False, repr=False)
    """Whether this attempt has added children."""

    @property
    def args(self) -> dict[str, Any]:
        """The arguments as they are stored: JSON values by the parameters' names."""
        stored: dict[str, Any] = codec.decode(self.stored_args)
        return stored

    @property
    def meta(self) -> dict[str, Any]:
        """What was stored beside the arguments when the job was enqueued, such as a trace id."""
        stored: dict[str, Any] = {} if self.stored_meta is None else codec.decode(self.stored_meta)
        return stored

    @property
    def checkpointed(self) -> Any:
        """What `checkpoint` has stored last, in this attempt or an earlier one; None at first.

        Only what is committed: a checkpoint in a session counts from its commit on.
        """
        return None if self.stored_checkpoint is None else codec.decode(self.stored_checkpoint)

    def session(self) -> AsyncSession:
        """Return a new session on the application's connections: `async with ctx.session() as s`.

        It is the handler's own: nothing commits it, and its transaction is not the job's.
        """
        return self.services.session()

    async def enqueue(self, job: JobSpec[Any] | str, *args: Any, **options: Any) -> Job[Any]:
        """Enqueue an independent job; takes what `Scheduler.enqueue` takes."""
        return await self.services.enqueue(job, *args, **options)

    async def add_child(
        self,
        job: JobSpec[R] | str,
        args: dict[str, Any] | None = None,
        /,
        *,
        key: str | None = None,
        session: AsyncSession | None = None,
    ) -> Job[R]:
        """Add a job that this one waits for after its handler has returned.

        With a `key`, the same call in a later attempt returns the child that is there already, so
        that a job that is run again does not double its children. Raises ParentError when the
        lease is lost.
        """
        self.has_children = True
        return await self.services.add_child(self.lease, job, args, key, session)

    def progress(self, done: float, total: float | None = None, message: str | None = None) -> None:
        """Say how far the job is, for others to read in `Job.progress`; from any thread.

        Returns at once and may be called at any rate: the last report is written about once a
        second, with the renewal of the lease, and when the handler has ended.
        """
        self.reported.report(done, total, message)

    async def checkpoint(
        self, value: Any, session: AsyncSession | AsyncConnection | None = None
    ) -> None:
        """Store a JSON value from which an attempt that comes after a crash can go on.

        Without a session it is committed when this returns. With one it is part of the session's
        transaction, together with what the handler writes there; it locks the job's row, so do it
        last and commit soon: the lease cannot be renewed meanwhile. Raises LeaseLostError when the
        job is another worker's by now, and ResultError for what is not JSON.
        """
        await self.services.checkpoint(self.lease, value, session, self._note_checkpoint)

    def checkpoint_sync(self, value: Any, session: Session | Connection | None = None) -> None:
        """Do what `checkpoint` does, from a `def` handler and with a synchronous session."""
        if session is None:
            self.await_(self.checkpoint, value)
        else:
            self.services.checkpoint_in(self.lease, value, session, self._note_checkpoint)

    async def complete(self, session: AsyncSession | AsyncConnection, result: Any = None) -> None:
        """End the job as done in the session's transaction: its writes there happen exactly once.

        When that is committed the job has ended, whatever its handler does afterwards: what it
        returns or raises is ignored (and an error logged). If it is rolled back, nothing has
        happened, and the handler's end decides as usual. It locks the job's row, so do it last
        and commit soon. A job with open children waits for them and keeps this result. Raises
        LeaseLostError when the job is another worker's by now, ResultError for a result that
        cannot be stored, and on PostgreSQL ConfigurationError above READ COMMITTED.
        """
        await self.services.complete(self.lease, session, result, self._last_words())

    def complete_sync(self, session: Session | Connection, result: Any = None) -> None:
        """Do what `complete` does, from a `def` handler and with a synchronous session."""
        self.services.complete_in(self.lease, session, result, self._last_words())

    async def upstreams(self) -> list[Job[Any]]:
        """Return the jobs that this one depends on, in id order, with their states and results.

        `handler.result_of(job)` rebuilds a result that is a model or a dataclass.
        """
        return await self.services.upstreams_of(self.job_id)

    async def set_cost(self, cost: float) -> None:
        """Say what the job really costs, once that is known: its budgets are corrected by it.

        Raises LeaseLostError when the lease is lost.
        """
        check_number("cost", cost, low=0, high=MOST)
        await self.services.set_cost(self.lease, cost)

    def await_(
        self, function: Callable[P, Coroutine[Any, Any, T]], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Run an asynchronous function on the scheduler's loop, from a handler's thread."""
        return anyio.from_thread.run(lambda: function(*args, **kwargs))

    def _last_words(self) -> LastWords:
        self.completing = True
        return LastWords(self.has_children, self.reported.pending)

    def _note_checkpoint(self, stored: str) -> None:
        self.stored_checkpoint = stored
