"""The columns of the small tables beside `jobs` and `job_deps`."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import BigInteger, Double, Index, Integer, String
from sqlalchemy.orm import Mapped, declared_attr, mapped_column

from asyncjobq.column_types import JsonText, Key, LongText, UtcDateTime
from asyncjobq.ddl import MYSQL, Flag, JobId


class SchemaVersionColumns:
    """One row: which version of these tables this is; its table also marks them as ours."""

    id: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    version: Mapped[int] = mapped_column(Integer)

    __table_args__ = (MYSQL,)


class AttemptColumns:
    """One attempt that did not succeed; a job's rows go when the job goes."""

    __tablename__: str

    id: Mapped[int] = mapped_column(JobId, primary_key=True, autoincrement=True)
    job_id: Mapped[int] = mapped_column(BigInteger)
    attempt: Mapped[int] = mapped_column(Integer)
    ending: Mapped[str] = mapped_column(Key(16))
    error_type: Mapped[str | None] = mapped_column(String(255))
    message: Mapped[str | None] = mapped_column(LongText)
    traceback: Mapped[str | None] = mapped_column(LongText)
    worker: Mapped[str | None] = mapped_column(Key(255))
    started_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    finished_at: Mapped[datetime] = mapped_column(UtcDateTime)

    @declared_attr.directive
    @classmethod
    def __table_args__(cls) -> tuple[Any, ...]:
        return (
            # The attempts of a job, in order (inspection.py).
            Index(f"{cls.__tablename__}_job", "job_id", "id"),
            {"sqlite_autoincrement": True, **MYSQL},
        )


class ScheduleColumns:
    """One recurring job; `declared` ones stand in code and are fired by workers that have it."""

    __tablename__: str

    name: Mapped[str] = mapped_column(Key(255), primary_key=True)
    cron: Mapped[str | None] = mapped_column(String(255))
    every: Mapped[float | None] = mapped_column(Double)
    timezone: Mapped[str] = mapped_column(String(64), server_default="UTC")
    catch_up: Mapped[str] = mapped_column(Key(16))
    overlap: Mapped[bool] = mapped_column(Flag)
    declared: Mapped[bool] = mapped_column(Flag)
    type: Mapped[str] = mapped_column(Key(128))
    args: Mapped[Any] = mapped_column(JsonText)
    options: Mapped[Any] = mapped_column(JsonText)
    paused: Mapped[bool] = mapped_column(Flag)
    # What intervals are counted from.
    anchor: Mapped[datetime] = mapped_column(UtcDateTime)
    # NULL while paused.
    next_fire: Mapped[datetime | None] = mapped_column(UtcDateTime)
    last_fire: Mapped[datetime | None] = mapped_column(UtcDateTime)
    last_job_id: Mapped[int | None] = mapped_column(BigInteger)
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)
    updated_at: Mapped[datetime] = mapped_column(UtcDateTime)

    @declared_attr.directive
    @classmethod
    def __table_args__(cls) -> tuple[Any, ...]:
        return (
            # Which fires next (ready.py) of those that any worker fires; the others go by name.
            Index(f"{cls.__tablename__}_next_fire", "declared", "next_fire"),
            MYSQL,
        )


class PauseColumns:
    """A queue or a type of which no job is started."""

    __tablename__: str

    kind: Mapped[str] = mapped_column(Key(16), primary_key=True)
    name: Mapped[str] = mapped_column(Key(128), primary_key=True)
    paused_at: Mapped[datetime] = mapped_column(UtcDateTime)

    __table_args__ = (MYSQL,)


class LimitColumns:
    """The level of one limit for one value of its key, and what was set at runtime."""

    __tablename__: str

    id: Mapped[int] = mapped_column(JobId, primary_key=True, autoincrement=True)
    name: Mapped[str] = mapped_column(Key(64))
    value: Mapped[str] = mapped_column(Key(255))
    # Tokens left, or cost spent in the window that began at `moment`.
    level: Mapped[float | None] = mapped_column(Double)
    moment: Mapped[datetime | None] = mapped_column(UtcDateTime)
    # What `set_limit` said, in the row whose value is ''; NULL: as in the code.
    amount: Mapped[float | None] = mapped_column(Double)
    per: Mapped[float | None] = mapped_column(Double)
    burst: Mapped[int | None] = mapped_column(Integer)

    @declared_attr.directive
    @classmethod
    def __table_args__(cls) -> tuple[Any, ...]:
        return (
            # The rows of the limits of a claim (permits.py).
            Index(f"{cls.__tablename__}_name", "name", "value", unique=True),
            MYSQL,
        )


class PermitColumns:
    """One job that runs under a limit of concurrency; it is over when the job's lease is."""

    __tablename__: str

    limit_id: Mapped[int] = mapped_column(JobId, primary_key=True, autoincrement=False)
    job_id: Mapped[int] = mapped_column(JobId, primary_key=True, autoincrement=False)
    token: Mapped[int] = mapped_column(BigInteger)

    __table_args__ = (MYSQL,)


class GroupColumns:
    """The weight of a group, as it was set at runtime."""

    __tablename__: str

    group_key: Mapped[str] = mapped_column(Key(255), primary_key=True)
    weight: Mapped[float] = mapped_column(Double)

    __table_args__ = (MYSQL,)


class KeyColumns:
    """A unique key and the job that holds it, where an index of `jobs` must not say so (ddl.py)."""

    held: Mapped[str] = mapped_column(Key(255), primary_key=True)
    job_id: Mapped[int] = mapped_column(BigInteger)

    __table_args__ = (MYSQL,)


class KeyLockColumns:
    """One of a fixed number of rows; those that ask for a unique key lock the one of its hash."""

    slot: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)

    __table_args__ = (MYSQL,)


class WorkerColumns:
    """A worker that serves, or did a moment ago; it writes its row anew from time to time."""

    __tablename__: str

    worker_id: Mapped[str] = mapped_column(Key(255), primary_key=True)
    host: Mapped[str] = mapped_column(String(255))
    pid: Mapped[int] = mapped_column(BigInteger)
    # Slots by queue, and the types that it has handlers for; NULL: too many to be named.
    queues: Mapped[Any] = mapped_column(JsonText)
    types: Mapped[Any | None] = mapped_column(JsonText)
    concurrency: Mapped[int] = mapped_column(Integer)
    stopping: Mapped[bool] = mapped_column(Flag)
    started_at: Mapped[datetime] = mapped_column(UtcDateTime)
    seen_at: Mapped[datetime] = mapped_column(UtcDateTime)
    # Seconds since seen_at after which it counts as gone.
    lost_after: Mapped[float] = mapped_column(Double)

    __table_args__ = (MYSQL,)
