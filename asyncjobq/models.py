"""The tables, as SQLAlchemy declarative models; every index stands beside the query it serves.

The models describe the default names. `tables_for` gives the same tables under another schema or
with a prefix. DDL details that differ between databases are SQLAlchemy's own dialect keywords.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from functools import lru_cache
from typing import Any, Final, cast

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    ColumnElement,
    Double,
    FromClause,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    false,
    literal_column,
    true,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, declared_attr, mapped_column

from asyncjobq.column_types import JsonText, Key, LongText, UtcDateTime
from asyncjobq.ddl import MYSQL, Flag, JobId, partial_index, reference, unique_index
from asyncjobq.errors import ConfigurationError
from asyncjobq.satellites import (
    AttemptColumns,
    GroupColumns,
    KeyColumns,
    KeyLockColumns,
    LimitColumns,
    PauseColumns,
    PermitColumns,
    ScheduleColumns,
    SchemaVersionColumns,
    WorkerColumns,
)
from asyncjobq.states import State

SCHEMA_VERSION: Final = 1
LANE: Final = ("queue", "type", "limit_key", "group_key")
DEFAULT_PRIORITY: Final = 100

_NAMES: Final = {
    "pk": "%(table_name)s_pkey",
    "fk": "%(table_name)s_%(column_0_name)s_fkey",
    "ck": "%(table_name)s_%(constraint_name)s_check",
}


def _quoted(values: type[StrEnum]) -> str:
    return ", ".join(f"'{value}'" for value in values)


class JobColumns:
    """The columns, checks and indexes of a job or container."""

    __tablename__: str

    id: Mapped[int] = mapped_column(JobId, primary_key=True, autoincrement=True)
    queue: Mapped[str] = mapped_column(Key(64))
    type: Mapped[str] = mapped_column(Key(128))
    kind: Mapped[str] = mapped_column(Key(16), server_default="job")
    name: Mapped[str | None] = mapped_column(String(255))
    args: Mapped[Any] = mapped_column(JsonText)
    result: Mapped[Any | None] = mapped_column(JsonText)
    error: Mapped[str | None] = mapped_column(LongText)
    cause: Mapped[int | None] = mapped_column(BigInteger)
    state: Mapped[str] = mapped_column(Key(16))
    parent_id: Mapped[int | None] = mapped_column(JobId)
    child_key: Mapped[str | None] = mapped_column(Key(255))
    group_key: Mapped[str] = mapped_column(Key(255), server_default="")
    weight: Mapped[float] = mapped_column(Double, server_default="1")
    priority: Mapped[int] = mapped_column(Integer, server_default=str(DEFAULT_PRIORITY))
    limit_key: Mapped[str] = mapped_column(Key(128), server_default="")
    run_after: Mapped[datetime | None] = mapped_column(UtcDateTime)
    # NULL: the handler's, filled in by the claim. A timeout of 0 means none.
    cost: Mapped[float | None] = mapped_column(Double)
    timeout: Mapped[float | None] = mapped_column(Double)
    max_attempts: Mapped[int | None] = mapped_column(Integer)
    attempt: Mapped[int] = mapped_column(Integer, server_default="0")
    lease_owner: Mapped[str | None] = mapped_column(Key(255))
    # Raised by every claim and never reset: a token that can come back is no fence.
    lease_token: Mapped[int] = mapped_column(BigInteger, server_default="0")
    lease_expires: Mapped[datetime | None] = mapped_column(UtcDateTime)
    in_flight: Mapped[bool] = mapped_column(Flag, server_default=false())
    heartbeat_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    cancel_requested: Mapped[bool] = mapped_column(Flag, server_default=false())
    fail_fast: Mapped[bool] = mapped_column(Flag, server_default=false())
    # The key asked for, and while what it is held; NULL: for the period up to unique_until.
    unique_key: Mapped[str | None] = mapped_column(Key(255))
    unique_while: Mapped[str | None] = mapped_column(Key(16))
    unique_held: Mapped[str | None] = mapped_column(Key(255))
    unique_until: Mapped[datetime | None] = mapped_column(UtcDateTime)
    progress: Mapped[Any | None] = mapped_column(JsonText)
    checkpoint: Mapped[Any | None] = mapped_column(JsonText)
    meta: Mapped[Any | None] = mapped_column(JsonText)
    settled: Mapped[bool] = mapped_column(Flag, server_default=true())
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)
    updated_at: Mapped[datetime] = mapped_column(UtcDateTime)
    started_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    finished_at: Mapped[datetime | None] = mapped_column(UtcDateTime)

    @declared_attr.directive
    @classmethod
    def __table_args__(cls) -> tuple[Any, ...]:
        name = cls.__tablename__
        return (
            CheckConstraint("in_flight = (state IN ('leased', 'running'))", name="in_flight"),
            CheckConstraint("kind IN ('job', 'container')", name="kind"),
            CheckConstraint("weight > 0", name="weight"),
            CheckConstraint(f"state IN ({_quoted(State)})", name="state"),
            reference("parent_id", f"{name}.id"),
            # The claim and the scan of lanes (ready.py).
            *partial_index(f"{name}_ready", "state = 'ready'", *LANE, "priority", "id"),
            # Promoting what is due (ready.py).
            *partial_index(f"{name}_due", "state = 'scheduled'", "run_after", "id"),
            # The reclaim (lease.py). Without lease_expires, so that a renewal touches no index.
            *partial_index(f"{name}_in_flight", "in_flight", "id"),
            # The outbox (settle.py).
            *partial_index(f"{name}_unsettled", "NOT settled", "id"),
            # The children of a job and their states (settle.py).
            Index(f"{name}_children", "parent_id", "state"),
            # A child that a later attempt of its parent names again (enqueue.py).
            Index(f"{name}_child_key", "parent_id", "child_key", unique=True),
            # What a failure cancelled, when it is retried (settle.py).
            *partial_index(f"{name}_cause", "cause IS NOT NULL", "cause"),
            # Who holds a key (unique.py).
            unique_index(f"{name}_unique_held", "unique_held"),
            {"sqlite_autoincrement": True, **MYSQL},
        )


class JobDepColumns:
    """One edge: `job_id` waits for `depends_on_id`."""

    __tablename__: str
    __jobs__: str

    job_id: Mapped[int] = mapped_column(JobId, primary_key=True, autoincrement=False)
    depends_on_id: Mapped[int] = mapped_column(JobId, primary_key=True, autoincrement=False)
    satisfied: Mapped[bool] = mapped_column(Flag, server_default=false())
    on_failure: Mapped[str] = mapped_column(Key(16), server_default="cancel")

    @declared_attr.directive
    @classmethod
    def __table_args__(cls) -> tuple[Any, ...]:
        return (
            reference("job_id", f"{cls.__jobs__}.id"),
            reference("depends_on_id", f"{cls.__jobs__}.id"),
            # The dependants of a job that ended (settle.py).
            Index(f"{cls.__tablename__}_depends_on", "depends_on_id", "satisfied"),
            MYSQL,
        )


class Base(DeclarativeBase):
    """Registry of the models under their default names."""

    metadata = MetaData(naming_convention=_NAMES)


class JobRow(JobColumns, Base):
    """One job or container."""

    __tablename__ = "jobs"


class JobDepRow(JobDepColumns, Base):
    """One edge between two jobs."""

    __tablename__ = "job_deps"
    __jobs__ = "jobs"


class SchemaVersionRow(SchemaVersionColumns, Base):
    """The version of the tables."""

    __tablename__ = "asyncjobq_schema"


class AttemptRow(AttemptColumns, Base):
    """One attempt that did not succeed."""

    __tablename__ = "job_attempts"


class ScheduleRow(ScheduleColumns, Base):
    """One recurring job."""

    __tablename__ = "job_schedules"


class PauseRow(PauseColumns, Base):
    """One pause of a queue or a type."""

    __tablename__ = "job_pauses"


class LimitRow(LimitColumns, Base):
    """The level of one limit."""

    __tablename__ = "job_limits"


class PermitRow(PermitColumns, Base):
    """One job that runs under a limit of concurrency."""

    __tablename__ = "job_permits"


class GroupRow(GroupColumns, Base):
    """The weight of one group."""

    __tablename__ = "job_groups"


class KeyRow(KeyColumns, Base):
    """One unique key that is held."""

    __tablename__ = "job_keys"


class KeyLockRow(KeyLockColumns, Base):
    """What those lock who ask for the same unique key."""

    __tablename__ = "job_key_locks"


class WorkerRow(WorkerColumns, Base):
    """One worker that serves."""

    __tablename__ = "job_workers"


_MODELS: Final = (
    JobRow,
    JobDepRow,
    SchemaVersionRow,
    AttemptRow,
    ScheduleRow,
    PauseRow,
    LimitRow,
    PermitRow,
    GroupRow,
    KeyRow,
    KeyLockRow,
    WorkerRow,
)


def in_state(jobs: FromClause, state: State) -> ColumnElement[bool]:
    """Return the condition that a job is in this state.

    Written into the statement and not bound: a planner that does not know the value while it
    plans cannot use an index that holds only the rows of one state.
    """
    return jobs.c.state == literal_column(f"'{state}'", Key(16))


@dataclass(frozen=True, eq=False)
class Tables:
    """The tables under one schema and prefix."""

    schema: str | None
    prefix: str
    metadata: MetaData
    jobs: Table
    deps: Table
    version: Table
    attempts: Table
    schedules: Table
    pauses: Table
    limits: Table
    permits: Table
    groups: Table
    keys: Table
    key_locks: Table
    workers: Table

    @property
    def all(self) -> list[Table]:
        """All of them, referenced ones first."""
        return [
            self.version,
            self.jobs,
            self.deps,
            self.attempts,
            self.schedules,
            self.pauses,
            self.limits,
            self.permits,
            self.groups,
            self.keys,
            self.key_locks,
            self.workers,
        ]

    def jobs_as(self, name: str) -> FromClause:
        """Return the jobs under another name in a query; kept, for making one costs 40 columns."""
        return _alias(self.jobs, name)


@lru_cache
def _alias(table: Table, name: str) -> FromClause:
    return table.alias(name)


def tables_for(schema: str | None = None, prefix: str = "") -> Tables:
    """Return the tables under this schema and prefix: the same object for the same names."""
    if not isinstance(prefix, str) or not re.fullmatch("[A-Za-z0-9_]{0,32}", prefix):
        raise ConfigurationError(
            f"table_prefix takes up to 32 letters, digits and underscores, not {prefix!r}."
        )
    if schema is not None and (not isinstance(schema, str) or not 1 <= len(schema) <= 63):
        raise ConfigurationError(f"schema takes a name of 1 to 63 characters, not {schema!r}.")
    return _tables(schema, prefix)


@lru_cache
def _tables(schema: str | None, prefix: str) -> Tables:
    if schema is None and not prefix:
        models: tuple[type[DeclarativeBase], ...] = _MODELS
        metadata = Base.metadata
    else:
        metadata = MetaData(schema=schema, naming_convention=_NAMES)
        models = _models_under(metadata, prefix)
    return Tables(schema, prefix, metadata, *(cast(Table, model.__table__) for model in models))


def _models_under(metadata: MetaData, prefix: str) -> tuple[type[DeclarativeBase], ...]:
    base = type("Base", (DeclarativeBase,), {"metadata": metadata})
    jobs = {"__jobs__": f"{prefix}jobs"}
    return tuple(
        type(
            model.__name__,
            (model.__bases__[0], base),
            {"__tablename__": prefix + model.__tablename__, **jobs},
        )
        for model in _MODELS
    )
