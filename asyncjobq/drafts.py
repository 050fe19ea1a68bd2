"""Jobs and containers that are about to be inserted, with what they refer to among themselves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from asyncjobq.errors import CycleError, InvalidJobError
from asyncjobq.job import JobRef, Node, Upstream, id_of
from asyncjobq.options import JobSpec
from asyncjobq.states import Kind


@dataclass(eq=False)
class Draft:
    """One row to be: its job, and the node of the workflow that takes its id."""

    spec: JobSpec[Any]
    kind: Kind = Kind.JOB
    node: Node[Any] | None = None
    child_key: str | None = None
    fail_fast: bool = False

    @property
    def parent(self) -> JobRef | None:
        """The job or container above it."""
        return self.spec.chosen.parent

    @property
    def upstreams(self) -> Sequence[Upstream]:
        """What it waits for."""
        return tuple(item for item in self.spec.chosen.depends_on if isinstance(item, Upstream))

    @property
    def label(self) -> str:
        """How errors call it."""
        return self.spec.chosen.name or self.spec.type


class Batch:
    """Drafts that are inserted together, and which of them refer to which."""

    def __init__(
        self,
        drafts: Sequence[Draft],
        known: Mapping[Node[Any], int] | None = None,
        twins: Mapping[Node[Any], Draft] | None = None,
    ) -> None:
        self.drafts = drafts
        self._known = known or {}
        """The ids of nodes that turned out to be jobs which exist."""
        self.has_twins = bool(known or twins)
        """Whether several nodes and ids may mean one job."""
        self.ids: dict[Draft, int] = {}
        """The ids of those that are inserted."""
        self._by_node = {draft.node: draft for draft in drafts if draft.node is not None}
        self._by_node |= twins or {}
        self._held: dict[Draft, bool] = {}
        self._with_children = {self.parent_of(draft) for draft in drafts}

    def local(self, ref: JobRef | None) -> Draft | None:
        """Return the draft that a reference means, None if it means a job that exists."""
        return self._by_node.get(ref) if self._is_planned(ref) else None

    def parent_of(self, draft: Draft) -> Draft | None:
        """Return the draft of the parent, if that is in this batch."""
        return self.local(draft.parent)

    def id_of(self, ref: JobRef) -> int:
        """Return the id that a reference means; of a draft, once it is inserted."""
        if isinstance(ref, Node) and ref in self._known:
            return self._known[ref]
        local = self.local(ref)
        return id_of(ref) if local is None else self.ids[local]

    def _is_planned(self, ref: JobRef | None) -> TypeGuard[Node[Any]]:
        return isinstance(ref, Node) and not ref.written and ref not in self._known

    def is_held(self, draft: Draft) -> bool:
        """Tell whether a draft has to wait for something when it is inserted."""
        if draft not in self._held:
            parent = self.parent_of(draft)
            below_stranger = draft.parent is not None and parent is None
            below_held = parent is not None and self.is_held(parent)
            self._held[draft] = bool(draft.upstreams) or below_stranger or below_held
        return self._held[draft]

    def is_settled(self, draft: Draft) -> bool:
        """Tell whether nobody has to look at a draft after it is inserted.

        What it waits for in this batch is seen to when that ends or opens, since it cannot have
        done so before they are committed together. What was there before may have; and an empty
        container that is open has to be closed.
        """
        strangers = any(self.local(upstream.job) is None for upstream in draft.upstreams)
        below_stranger = draft.parent is not None and self.parent_of(draft) is None
        empty = draft.kind is Kind.CONTAINER and draft not in self._with_children
        return not (strangers or below_stranger or (empty and not self.is_held(draft)))

    def waves(self) -> Iterator[list[Draft]]:
        """Yield containers level by level, parents first, and at last all jobs."""
        containers = [draft for draft in self.drafts if draft.kind is Kind.CONTAINER]
        above: set[Draft | None] = {None}
        while level := [draft for draft in containers if self.parent_of(draft) in above]:
            yield level
            above = set(level)
        jobs = [draft for draft in self.drafts if draft.kind is Kind.JOB]
        if jobs:
            yield jobs

    def existing_upstreams(self) -> set[int]:
        """Return the ids outside of this batch that something in it depends on."""
        return {
            self.id_of(upstream.job)
            for draft in self.drafts
            for upstream in draft.upstreams
            if self.local(upstream.job) is None
        }

    def existing_parents(self) -> set[int]:
        """Return the ids of containers and jobs outside of this batch that get children by it."""
        return {
            id_of(draft.parent)
            for draft in self.drafts
            if draft.parent is not None and self.parent_of(draft) is None
        }

    def existing_upstreams_below(self) -> dict[int, set[int]]:
        """Return by parent outside of this batch what the drafts below it depend on outside."""
        found: dict[int, set[int]] = {}
        for draft in self.drafts:
            top = draft
            while (parent := self.parent_of(top)) is not None:
                top = parent
            if top.parent is not None:
                strangers = (up.job for up in draft.upstreams if self.local(up.job) is None)
                found.setdefault(id_of(top.parent), set()).update(map(self.id_of, strangers))
        return found

    def refuse_cycles(self) -> None:
        """Raise CycleError if drafts wait for each other in a circle.

        A draft ends after it began; it begins after the ends of its upstreams and the beginning
        of its parent; a container ends after the ends of its children.
        """
        waits = self._waits()
        begun: dict[tuple[Draft, bool], int] = {}
        path: list[tuple[Draft, bool]] = []
        for start in waits:
            stack = [(start, iter(waits[start]))] if start not in begun else []
            while stack:
                place, rest = stack[-1]
                if place not in begun:
                    begun[place] = 1
                    path.append(place)
                follower = next((one for one in rest if begun.get(one) != 2), None)
                if follower is None:
                    begun[place] = 2
                    path.pop()
                    stack.pop()
                elif begun.get(follower) == 1:
                    raise CycleError(_circle(path, follower))
                else:
                    stack.append((follower, iter(waits[follower])))

    def _waits(self) -> dict[tuple[Draft, bool], list[tuple[Draft, bool]]]:
        """Return what each draft's beginning (False) and end (True) wait for."""
        waits: dict[tuple[Draft, bool], list[tuple[Draft, bool]]] = {}
        for draft in self.drafts:
            local = [self.local(upstream.job) for upstream in draft.upstreams]
            waits[draft, False] = [(upstream, True) for upstream in local if upstream is not None]
            waits[draft, True] = [(draft, False)]
        for draft in self.drafts:
            parent = self.parent_of(draft)
            if parent is not None:
                waits[draft, False].append((parent, False))
                waits[parent, True].append((draft, True))
        return waits

    def refuse_strangers(self) -> None:
        """Raise InvalidJobError if a reference means a node that is in no batch."""
        for draft in self.drafts:
            for ref in (draft.parent, *(upstream.job for upstream in draft.upstreams)):
                if self._is_planned(ref) and ref not in self._by_node:
                    raise InvalidJobError(
                        f"{draft.label!r} refers to {ref!r}, which belongs to another workflow "
                        "that is not written yet. Add both to one workflow, or end the other first."
                    )


def _circle(path: Sequence[tuple[Draft, bool]], back_to: tuple[Draft, bool]) -> list[str]:
    around = [draft for draft, _ in path[path.index(back_to) :]] + [back_to[0]]
    return [
        draft.label
        for number, draft in enumerate(around)
        if number == 0 or draft is not around[number - 1]
    ]
