"""What a handler is given of the job that it runs, and what it may do in its name."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, ParamSpec, Protocol, TypeVar

import anyio.from_thread
from sqlalchemy.ext.asyncio import AsyncSession

from asyncjobq import codec
from asyncjobq.job import Job
from asyncjobq.options import JobSpec

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

    async def upstreams_of(self, job_id: int) -> list[Job[Any]]:
        """Return the jobs that this one depends on."""
        ...


@dataclass(frozen=True)
class LeaseRef:
    """The lease under which a handler writes."""

    job_id: int
    owner: str
    token: int


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
        return await self.services.add_child(self.lease, job, args, key, session)

    async def upstreams(self) -> list[Job[Any]]:
        """Return the jobs that this one depends on, in id order, with their states and results."""
        return await self.services.upstreams_of(self.job_id)

    def await_(
        self, function: Callable[P, Coroutine[Any, Any, T]], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Run an asynchronous function on the scheduler's loop, from a handler's thread."""
        return anyio.from_thread.run(lambda: function(*args, **kwargs))
