"""A reference model of the graph: what is known of each job, and what settling may make of it.

Whether a job may run is computed from facts alone: which edges are open, what is due, who holds a
lease, what has ended. There is no `blocked`, `ready` or `scheduled` in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from asyncjobq import State

BAD = (State.FAILED, State.CANCELLED)


@dataclass(frozen=True)
class Item:
    """A job or container. `edges` are the open ones: upstream and rule."""

    id: int
    parent: int | None = None
    container: bool = False
    fail_fast: bool = False
    edges: frozenset[tuple[int, str]] = frozenset()
    due: float = 0.0
    attempts_left: int = 5
    max_attempts: int = 5
    token: int = 0
    expires: float | None = None
    """When its lease runs out; None: nobody holds one."""
    over: State | None = None
    """How its own work ended; it may still wait for children."""
    ended: State | None = None
    cause: int | None = None
    cancelling: bool = False

    @property
    def leased(self) -> bool:
        return self.expires is not None

    @property
    def waits(self) -> bool:
        """Whether it is a job whose own work is over, and whose children are not."""
        return self.ended is None and self.over is not None and not self.container

    @property
    def started(self) -> bool:
        return self.ended is not None or self.leased or self.over is not None

    @property
    def facts(self) -> tuple[Any, ...]:
        """What a row of the database shows of it."""
        place = self.ended or ("leased" if self.leased else "waits" if self.waits else "in line")
        return (place, self.cause, self.cancelling and self.ended is None, self.edges)


Change = dict[int, Item]


@dataclass
class Model:
    """All jobs, at a time that is moved by hand."""

    items: dict[int, Item] = field(default_factory=dict)
    now: float = 0.0

    def put(self, change: Change) -> None:
        self.items.update(change)

    def children(self, item_id: int) -> list[Item]:
        return [item for item in self.items.values() if item.parent == item_id]

    def open_child(self, item_id: int) -> bool:
        return any(child.ended is None for child in self.children(item_id))

    # -- the oracle -----------------------------------------------------------------------------

    def held(self, item: Item) -> bool:
        """Whether an upstream of its own, or of a container above it, is open."""
        parent = self.items[item.parent] if item.parent else None
        above = parent is not None and parent.container and self.held(parent)
        return bool(item.edges) or above

    def state(self, item: Item) -> State:
        """Return the state when everything is settled; `leased` stands for `running` too."""
        if item.ended or item.leased:
            return item.ended or State.LEASED
        if item.over:
            return State.WAITING
        if self.held(item):
            return State.BLOCKED
        if item.container:
            return State.WAITING
        return State.SCHEDULED if item.due > self.now else State.READY

    # -- what people and workers do -------------------------------------------------------------

    def end(self, item: Item, state: State, cause: int | None = None) -> Change:
        """End an item's own work; with open children it waits for them."""
        ended = None if self.open_child(item.id) else state
        cancelling = item.cancelling or state is State.CANCELLED
        if ended in (None, State.CANCELLED):
            cause = cause or item.cause  # why it was asked to
        changed = replace(item, over=state, ended=ended, cause=cause, expires=None)
        return {item.id: replace(changed, cancelling=cancelling)}

    def give_back(self, item: Item, delay: float, *, costs: bool) -> Change:
        """Put a leased job back into the line."""
        if item.cancelling:
            return self.end(item, State.CANCELLED)
        due = self.now + delay if delay else item.due
        left = item.attempts_left + (0 if costs else 1)
        return {item.id: replace(item, expires=None, due=due, attempts_left=left)}

    def reclaim(self, item: Item) -> Change:
        """Take back a lease that ran out."""
        if not item.cancelling and item.attempts_left <= 0:
            return self.end(item, State.FAILED)
        return self.give_back(item, 0, costs=True)

    def retry(self, item: Item) -> Change:
        """Open an ended item again; a container with all that did not succeed in it."""
        change = self._reopened(item)
        below = [item] if item.container else []
        while below:
            below = [c for up in below for c in self.children(up.id) if c.ended in BAD]
            change |= {child.id: _as_new(child) for child in below}
        return change

    def _reopened(self, item: Item) -> Change:
        change = {item.id: _as_new(item)}
        parent = self.items[item.parent] if item.parent else None
        while parent is not None and parent.ended:
            # A job keeps its own end, and waits for its children again.
            failed = State.FAILED if parent.over in BAD else parent.over
            over = None if parent.container else failed
            opened = replace(parent, over=over, ended=None, cause=None, cancelling=False)
            change[parent.id] = opened
            parent = self.items[parent.parent] if parent.parent else None
        return change

    # -- what settling does ---------------------------------------------------------------------

    def possible(self, item: Item) -> Iterator[Change]:
        """Yield each change that settling may make of an item, as things stand."""
        if item.ended:
            cause = self.items[item.cause] if item.ended is State.CANCELLED and item.cause else None
            if cause is not None and not cause.ended and not cause.cancelling:
                yield self._reopened(item)
            return
        yield from self._edges(item)
        if not (item.started or item.cancelling):
            yield from (self.end(item, State.CANCELLED, cause) for cause in self._in_vain(item))
            if self.circle(item):
                yield self.end(item, State.CANCELLED)
        yield from self._hurried(item)
        yield from self._closed(item)

    def _edges(self, item: Item) -> Iterator[Change]:
        for edge in item.edges:
            upstream, rule = self.items[edge[0]], edge[1]
            if upstream.ended is State.DONE or (upstream.ended and rule == "run"):
                yield {item.id: replace(item, edges=item.edges - {edge})}

    def _in_vain(self, item: Item) -> Iterator[int]:
        """Yield why an item that has not started never will."""
        for upstream, rule in item.edges:
            if rule == "cancel" and self.items[upstream].ended in BAD:
                yield upstream
        if item.parent and (self.items[item.parent].ended or self.items[item.parent].cancelling):
            yield item.parent

    def _hurried(self, item: Item) -> Iterator[Change]:
        """Yield the request to cancel what has started."""
        if item.cancelling:
            return
        above = item.parent is not None and self.items[item.parent].cancelling
        failed = any(child.ended is State.FAILED for child in self.children(item.id))
        fast = item.fail_fast and failed and self.open_child(item.id) and not self.held(item)
        if above and (item.started or item.container):
            asked = replace(item, cancelling=True, cause=item.parent)
            yield {item.id: asked}
            yield from self._closed(asked)
        if fast:
            yield {item.id: replace(item, cancelling=True)}

    def _closed(self, item: Item) -> Iterator[Change]:
        if self.open_child(item.id):
            return
        if not item.container:
            if item.over:
                ended = State.CANCELLED if item.cancelling else item.over
                yield {item.id: replace(item, ended=ended)}
        elif item.cancelling or not self.held(item):
            yield {item.id: self._sum(item)}

    def _sum(self, item: Item) -> Item:
        """Return a container as it ends: done if all in it is, cancelled if that was asked."""
        ends = {child.id: child.ended for child in self.children(item.id)}
        failed = min((c for c, end in ends.items() if end is State.FAILED), default=None)
        cancelled = min((c for c, end in ends.items() if end is State.CANCELLED), default=None)
        if item.cancelling and not (item.fail_fast and failed):
            return replace(item, ended=State.CANCELLED)
        if failed or cancelled:
            return replace(item, ended=State.FAILED, cause=failed or cancelled)
        return replace(item, ended=State.DONE, cause=None)

    def settle(self) -> None:
        """Apply what is possible until nothing is."""
        while change := next(self.possible_changes(), None):
            self.put(change)

    def possible_changes(self) -> Iterator[Change]:
        """Yield what settling may still do; nothing if everything is settled."""
        for item in self.items.values():
            yield from self.possible(item)

    # -- circles --------------------------------------------------------------------------------

    def circle(self, item: Item) -> bool:
        """Tell whether an open item waits for itself."""
        seen: set[tuple[int, str]] = set()
        left = list(self._waits((item.id, "begin"))) if item.edges else []
        while left:
            place = left.pop()
            if place == (item.id, "end"):
                return True
            if place not in seen:
                seen.add(place)
                left += self._waits(place)
        return False

    def _waits(self, place: tuple[int, str]) -> Iterator[tuple[int, str]]:
        """Yield what the begin or the end of an item waits for."""
        item = self.items[place[0]]
        if item.ended:
            return
        if place[1] == "end":
            yield (item.id, "begin")
            yield from ((child.id, "end") for child in self.children(item.id))
        elif not item.started:
            yield from ((upstream, "end") for upstream, _ in item.edges)
            if item.parent:
                yield (item.parent, "begin")


def _as_new(item: Item) -> Item:
    fresh = replace(item, over=None, ended=None, cause=None, cancelling=False)
    return replace(fresh, attempts_left=item.max_attempts)
