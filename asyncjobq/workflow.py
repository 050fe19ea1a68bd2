"""Describes a graph of jobs and containers; the scheduler writes it in one go."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeVar, Unpack

from asyncjobq.drafts import Draft
from asyncjobq.errors import InvalidJobError, SchedulerStateError
from asyncjobq.job import JobRef, Node, Upstream
from asyncjobq.options import JobOptionArgs, JobOptions, JobSpec, OnConflict
from asyncjobq.states import Kind, UniqueWhile

R = TypeVar("R")

CONTAINER: Final = "container"
"""The type of containers, which no handler runs."""


@dataclass
class Plan:
    """What is to be written, until it is."""

    drafts: list[Draft] = field(default_factory=list)
    over: bool = False

    def add(self, draft: Draft) -> None:
        """Take one more; raises SchedulerStateError when the block of the workflow is over."""
        if self.over:
            raise SchedulerStateError(
                "The block of this workflow is over: enqueue what comes later, with parent= while "
                "the workflow is open, or with depends_on=."
            )
        self.drafts.append(draft)


class Planned(Node[R]):
    """A job of a workflow."""

    def __init__(self, label: str) -> None:
        super().__init__()
        self._label = label

    def __repr__(self) -> str:
        return f"<job {self._label!r} of a workflow>"


class Container(Node[None]):
    """Holds jobs and containers; ends when the last of them has ended.

    What is in it waits for what it depends on. It is done if all in it is done.
    """

    def __init__(self, name: str, plan: Plan) -> None:
        super().__init__()
        self.name = name
        self._plan = plan

    def add(self, job: JobSpec[R], /, **options: Unpack[JobOptionArgs]) -> Node[R]:
        """Put a job into this container; returns what others can depend on."""
        if not isinstance(job, JobSpec):
            raise InvalidJobError(f"{job!r} is not a job; make one with handler.job(...).")
        spec = job.options(**options) if options else job
        if spec.chosen.parent is not None:
            raise InvalidJobError("parent= is the container that add() is called on; leave it out.")
        node: Planned[R] = Planned(spec.chosen.name or spec.type)
        self._plan.add(Draft(below(spec, self), node=node))
        return node

    def container(
        self,
        name: str,
        /,
        *,
        depends_on: Iterable[JobRef | Upstream] = (),
        fail_fast: bool = False,
        meta: dict[str, Any] | None = None,
    ) -> Container:
        """Put a container into this one.

        With `fail_fast`, the first failure in it cancels what is left of it.
        """
        inner = Container(name, self._plan)
        chosen = JobOptions(name=name, depends_on=depends_on, meta=meta)
        spec = below(JobSpec[None](CONTAINER, {}, chosen), self)
        self._plan.add(Draft(spec, Kind.CONTAINER, inner, fail_fast=fail_fast))
        return inner

    def __repr__(self) -> str:
        return f"<container {self.name!r}>"


class Workflow(Container):
    """The outermost container, with the drafts of all that is in it."""

    def __init__(self, name: str, chosen: JobOptions, *, fail_fast: bool = False) -> None:
        super().__init__(name, Plan())
        if chosen.unique_key is not None and (
            chosen.on_conflict != OnConflict.RAISE or chosen.unique_while != UniqueWhile.LIVE
        ):
            raise InvalidJobError(
                'A workflow\'s unique_key needs on_conflict="raise", and is held while it is live '
                "or for a period: there is no other workflow whose jobs could stand for these."
            )
        spec = JobSpec[None](CONTAINER, {}, chosen)
        self._plan.add(Draft(spec, Kind.CONTAINER, self, fail_fast=fail_fast))

    @property
    def drafts(self) -> list[Draft]:
        """What is to be written, the workflow itself first."""
        return self._plan.drafts

    def close(self) -> None:
        """Take nothing more: what is added from now on would not be written."""
        self._plan.over = True


def below(spec: JobSpec[R], parent: JobRef) -> JobSpec[R]:
    """Return the job as a child of this parent."""
    return replace(spec, chosen=replace(spec.chosen, parent=parent))
