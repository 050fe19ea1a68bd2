"""What callers get back: a `Job`; how they name one, and how they say to wait for it."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from datetime import datetime
from typing import Any, Final, Generic, Self, TypeVar

from sqlalchemy import Row

from asyncjobq.errors import InvalidJobError
from asyncjobq.models import DEFAULT_PRIORITY
from asyncjobq.states import TERMINAL, Kind, State, Word

R = TypeVar("R", covariant=True)


@dataclass(frozen=True)
class Job(Generic[R]):
    """A job as it was when it was read: plain values, no database behind them."""

    id: int
    queue: str
    type: str
    kind: Kind
    state: State
    args: dict[str, Any]
    name: str | None = None
    result: Any = None
    error: str | None = None
    cause: int | None = None
    parent_id: int | None = None
    group_key: str = ""
    weight: float = 1.0
    priority: int = DEFAULT_PRIORITY
    limit_key: str = ""
    cost: float | None = None
    run_after: datetime | None = None
    timeout: float | None = None
    max_attempts: int | None = None
    attempt: int = 0
    lease_owner: str | None = None
    lease_expires: datetime | None = None
    heartbeat_at: datetime | None = None
    cancel_requested: bool = False
    progress: Any = None
    checkpoint: Any = None
    meta: dict[str, Any] | None = None
    unique_key: str | None = None
    created_at: datetime | None = None
    updated_at: datetime | None = None
    started_at: datetime | None = None
    finished_at: datetime | None = None
    existing: bool = field(default=False, compare=False)
    """Of what an enqueue returns: whether the job was there before, under its key."""

    @property
    def ended(self) -> bool:
        """Whether the job is done, failed or cancelled."""
        return self.state in TERMINAL

    @classmethod
    def from_row(cls, row: Row[Any]) -> Self:
        """Make a job of a row that has (at least) the columns named like the fields."""
        values = {name: getattr(row, name) for name in COLUMNS}
        return cls(**{**values, "kind": Kind(row.kind), "state": State(row.state)})


COLUMNS: Final = tuple(one.name for one in fields(Job) if one.name != "existing")


class Node(Generic[R]):
    """A job or container of a workflow that is being described; it has an id once it is written."""

    def __init__(self) -> None:
        self._id: int | None = None

    @property
    def id(self) -> int:
        """The job's id; raises InvalidJobError while the workflow's block is still open."""
        if self._id is None:
            raise InvalidJobError(
                f"{self!r} has no id yet: a workflow is written when its `async with` block ends."
            )
        return self._id

    @property
    def written(self) -> bool:
        """Whether it has an id."""
        return self._id is not None

    def write(self, job_id: int) -> None:
        """Take the id that the database gave."""
        self._id = job_id


JobRef = Job[Any] | Node[Any] | int
"""How calls name a job: itself, its node in a workflow, or its id."""


def id_of(job: JobRef) -> int:
    """Return a job's id, refusing what is neither a job nor an id."""
    if isinstance(job, Job | Node):
        return job.id
    if isinstance(job, int) and not isinstance(job, bool) and abs(job) < 2**63:
        return job
    raise InvalidJobError(f"A job is named by itself or its integer id, not by {job!r}.")


class OnFailure(Word):
    """What becomes of a job when one that it depends on fails or is cancelled."""

    CANCEL = "cancel"
    RUN = "run"


@dataclass(frozen=True)
class Upstream:
    """A job that another depends on, and the rule for its failure; made by `after`."""

    job: JobRef
    on_failure: OnFailure = OnFailure.CANCEL


def after(job: JobRef, *, on_failure: OnFailure | str = OnFailure.CANCEL) -> Upstream:
    """Depend on a job, with a rule: "run" starts the dependant also when the job failed."""
    try:
        return Upstream(job, OnFailure(on_failure))
    except ValueError as error:
        rules = " or ".join(repr(str(rule)) for rule in OnFailure)
        raise InvalidJobError(f"on_failure is {rules}, not {on_failure!r}.") from error
