"""What may happen to a graph, as values: drawn by hypothesis, taken on tables and model alike.

Numbers choose among what there is at that moment, so that each list of operations makes sense and
can be made shorter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Final, TypeVar

from sqlalchemy import Connection

from asyncjobq import (
    Cancelled,
    CycleError,
    InvalidJobError,
    Job,
    JobOptions,
    ParentError,
    State,
    UnknownUpstreamError,
    Workflow,
    after,
)
from asyncjobq.backends.base import Backend
from asyncjobq.children import add_child
from asyncjobq.control import cancel_job, retry_job
from asyncjobq.enqueue import insert_drafts, insert_jobs
from asyncjobq.lease import renew_once
from asyncjobq.outcomes import Ending, Outcome
from conformance.steps import failed, spec, succeeded
from graphs.model import BAD, Item, Model
from graphs.world import World

T = TypeVar("T")


class Short:
    """Shows only what differs from the default, as a call."""

    def __repr__(self) -> str:
        changed = {f.name: getattr(self, f.name) for f in fields(self)}  # type: ignore[arg-type]
        defaults = {f.name: f.default for f in fields(self)}  # type: ignore[arg-type]
        given = (f"{k}={v!r}" for k, v in changed.items() if v != defaults[k])
        return f"{type(self).__name__}({', '.join(given)})"


Edges = tuple[tuple[int, str], ...]

DELAY: Final = 5000.0
SHORT, LONG = 1000.0, 10.0**8
CIRCLE: Final = 30
"""The number of an upstream that makes a circle, with the container that a new job is in."""
OUTCOMES: Final = {
    "done": succeeded(1),
    "failed": failed(),
    "again": failed(retry_after=0.0),
    "later": failed(retry_after=DELAY),
    "snoozed": Outcome(Ending.SNOOZED, retry_after=DELAY),
    "cancelled": Outcome(Ending.CANCELLED, error="it said so"),
}


@dataclass(frozen=True, repr=False)
class Plan(Short):
    """One job or container to be written; `edges` choose upstreams and say the rules."""

    edges: Edges = ()
    inside: int = 0
    container: bool = False
    fail_fast: bool = False
    delayed: bool = False
    once: bool = False

    @property
    def options(self) -> dict[str, Any]:
        return {
            "run_after": DELAY if self.delayed else None,
            "max_attempts": 1 if self.once else 3,
        }


@dataclass(frozen=True, repr=False)
class WriteWorkflow(Short):
    """Write a workflow; the first plan is the workflow itself, below one that exists or not."""

    plans: tuple[Plan, ...]
    below: int | None = None

    def take(self, world: World) -> None:
        root, *others = self.plans
        root = replace(root, container=True)
        known = sorted(world.model.items)
        parent = _container(world, self.below)
        upstreams = _upstreams(root.edges, known)
        chosen = JobOptions.of({"parent": parent, "depends_on": upstreams})
        workflow = Workflow("workflow", chosen, fail_fast=root.fail_fast)
        nodes: list[Any] = [workflow]
        wishes = [(root, parent, _edges(upstreams))]
        containers = [workflow]
        for plan in others:
            above: Any = _picked(plan.inside, containers)
            pool = [node for node in nodes if node is not above and node is not workflow]
            upstreams = _upstreams(plan.edges, pool + known, above)
            wishes.append((plan, above, _edges(upstreams)))
            nodes.append(_add(above, plan, upstreams))
            if plan.container:
                containers.append(nodes[-1])

        def write(connection: Connection, backend: Backend) -> list[Job[Any]]:
            return insert_drafts(connection, backend, workflow.drafts)

        self._write(world, write, wishes, nodes)

    def _write(self, world: World, write: Any, wishes: Any, nodes: Sequence[Any]) -> None:
        numbers = {node: -1 - place for place, node in enumerate(nodes)}
        draft = [
            _item(world, numbers[node], plan, numbers.get(above, above), edges, numbers)
            for node, (plan, above, edges) in zip(nodes, wishes, strict=True)
        ]
        _enqueue(world, write, draft)


@dataclass(frozen=True, repr=False)
class Enqueue(Short):
    """Enqueue jobs together, each in a container that exists, or in none."""

    plans: tuple[Plan, ...]

    def take(self, world: World) -> None:
        known = sorted(world.model.items)
        specs, items = [], []
        for place, plan in enumerate(self.plans):
            parent = _container(world, plan.inside or None)
            upstreams = _upstreams(plan.edges, known)
            specs.append(spec(parent=parent, depends_on=upstreams, **plan.options))
            plan = replace(plan, container=False)
            items.append(_item(world, -1 - place, plan, parent, _edges(upstreams), {}))
        _enqueue(world, lambda c, b: insert_jobs(c, b, specs), items)


@dataclass(frozen=True, repr=False)
class EnqueueAfterUnknown(Short):
    """Depend on what does not exist."""

    def take(self, world: World) -> None:
        unknown = spec(depends_on=[max(world.model.items, default=0) + 1000])
        _refused(world, lambda c, b: insert_jobs(c, b, [unknown]), UnknownUpstreamError)


@dataclass(frozen=True, repr=False)
class AddChild(Short):
    """Add a child to a leased job, as its handler does."""

    to: int
    plan: Plan

    def take(self, world: World) -> None:
        leased = [item for item in world.model.items.values() if item.leased]
        if not leased:
            return
        parent = _picked(self.to, leased)
        upstreams = _upstreams(self.plan.edges, sorted(world.model.items))
        plan = replace(self.plan, container=False)
        child = spec(depends_on=upstreams, **plan.options)
        item = _item(world, -1, plan, parent.id, _edges(upstreams), {})

        def write(connection: Connection, backend: Backend) -> list[Job[Any]]:
            return [add_child(connection, backend, world.lease(parent), child, None)]

        _enqueue(world, write, [item])


@dataclass(frozen=True, repr=False)
class Claim(Short):
    """Lease what may run; a short lease runs out when time passes."""

    count: int = 1
    short: bool = False

    def take(self, world: World) -> None:
        world.claim(self.count, SHORT if self.short else LONG)


@dataclass(frozen=True, repr=False)
class Renew(Short):
    """Renew all leases, which says that the jobs run and which are to be cancelled."""

    def take(self, world: World) -> None:
        model = world.model
        leased = [item for item in model.items.values() if item.leased]
        leases = [world.lease(item) for item in leased]
        renewal = world.take(lambda c, b: renew_once(c, b, leases, LONG))
        assert renewal.renewed == set(leases)
        asked = {lease.job_id for lease in renewal.cancel_requested}
        assert asked == {item.id for item in leased if item.cancelling}
        world.change({item.id: replace(item, expires=model.now + LONG) for item in leased})


@dataclass(frozen=True, repr=False)
class Finish(Short):
    """End an attempt, one of `OUTCOMES`."""

    which: int
    how: str = "done"

    def take(self, world: World) -> None:
        leased = [item for item in world.model.items.values() if item.leased]
        if leased:
            world.finish(_picked(self.which, leased), OUTCOMES[self.how])


@dataclass(frozen=True, repr=False)
class Run(Short):
    """Lease what may run, and end it at once, one way or another."""

    count: int = 1
    how: str = "done"

    def take(self, world: World) -> None:
        for number in world.claim(self.count, LONG):
            world.finish(world.model.items[number], OUTCOMES[self.how])


@dataclass(frozen=True, repr=False)
class Cancel(Short):
    """Cancel anything."""

    which: int

    def take(self, world: World) -> None:
        model = world.model
        if not model.items:
            return
        item = _picked(self.which, list(model.items.values()))
        state = world.states[item.id]
        answer = world.take(lambda c, b: cancel_job(c, b, item.id))
        if item.ended:
            assert answer is Cancelled.ENDED
            world.change({})
            return
        unstarted = state in (State.BLOCKED, State.READY, State.SCHEDULED)
        at_once = unstarted and not model.open_child(item.id)
        assert answer is (Cancelled.CANCELLED if at_once else Cancelled.REQUESTED)
        asked = {item.id: replace(item, cancelling=True)}
        world.change(model.end(item, State.CANCELLED) if unstarted else asked)


@dataclass(frozen=True, repr=False)
class Retry(Short):
    """Run again what failed or was cancelled; refused for all else."""

    which: int

    def take(self, world: World) -> None:
        model = world.model
        ended = [item for item in model.items.values() if item.ended in BAD]
        if not ended:
            return
        item = _picked(self.which, ended)
        world.take(lambda c, b: retry_job(c, b, item.id))
        world.change(model.retry(item))


@dataclass(frozen=True, repr=False)
class RetryWhatIsNotOver(Short):
    """Retry what is done or open, which is refused."""

    which: int

    def take(self, world: World) -> None:
        items = [item for item in world.model.items.values() if item.ended not in BAD]
        if items:
            number = _picked(self.which, items).id
            _refused(world, lambda c, b: retry_job(c, b, number), InvalidJobError)


@dataclass(frozen=True, repr=False)
class PassTime(Short):
    """Let delays and short leases run out, and take these leases back."""

    def take(self, world: World) -> None:
        world.pass_time(DELAY + 1000)
        world.reclaim()


@dataclass(frozen=True, repr=False)
class SettleOnce(Short):
    """Settle a few rows, after some id; the process may die at one of its statements."""

    limit: int = 200
    followers: int = 2000
    after: int = 0
    crash_after: int | None = None

    def take(self, world: World) -> None:
        ids = sorted(world.model.items)
        start = _picked(self.after, ids) if self.after and ids else 0
        world.settle_once(self.limit, self.followers, start, self.crash_after)


@dataclass(frozen=True, repr=False)
class SettleAll(Short):
    """Settle all that can be, and compare with the oracle."""

    limit: int = 200
    followers: int = 2000

    def take(self, world: World) -> None:
        world.settle(self.limit, self.followers)


def _picked(number: int, candidates: Sequence[T]) -> T:
    return candidates[number % len(candidates)]


def _container(world: World, number: int | None) -> int | None:
    containers = [item.id for item in world.model.items.values() if item.container]
    return _picked(number, containers) if number is not None and containers else None


def _upstreams(edges: Edges, pool: Sequence[Any], above: Any = None) -> list[Any]:
    """Choose upstreams; seldom that which the new one is to be in, which makes a circle."""
    found = []
    for number, rule in edges:
        if above is not None and number == CIRCLE:
            found.append(after(above, on_failure=rule))
        elif pool:
            found.append(after(_picked(number, pool), on_failure=rule))
    return found


def _edges(upstreams: Sequence[Any]) -> list[tuple[Any, str]]:
    """Return each upstream once, under the stricter of its rules."""
    rules: dict[Any, str] = {}
    for upstream in upstreams:
        if rules.get(upstream.job) != "cancel":
            rules[upstream.job] = str(upstream.on_failure)
    return list(rules.items())


def _add(above: Any, plan: Plan, upstreams: Sequence[Any]) -> Any:
    if plan.container:
        return above.container("container", depends_on=upstreams, fail_fast=plan.fail_fast)
    return above.add(spec(depends_on=upstreams, **plan.options))


def _item(
    world: World, number: int, plan: Plan, parent: Any, edges: Sequence[Any], numbers: Any
) -> Item:
    attempts = plan.options["max_attempts"]
    return Item(
        number,
        parent,
        container=plan.container,
        fail_fast=plan.fail_fast and plan.container,
        edges=frozenset((numbers.get(upstream, upstream), rule) for upstream, rule in edges),
        due=world.model.now + DELAY if plan.delayed and not plan.container else 0.0,
        attempts_left=attempts,
        max_attempts=attempts,
    )


def _enqueue(world: World, write: Any, drafts: Sequence[Item]) -> None:
    """Write jobs whose ids are negative until they are written, or see them refused."""
    model = world.model
    parents = [model.items[item.parent] for item in drafts if item.parent and item.parent > 0]
    later = Model(model.items | {item.id: item for item in drafts}, model.now)
    circle = any(later.circle(item) for item in drafts)
    if any(parent.ended or parent.cancelling for parent in parents):
        _refused(world, write, ParentError, CycleError)
    elif circle:
        _refused(world, write, CycleError)
    else:
        jobs = world.take(write)
        ids = {item.id: job.id for item, job in zip(drafts, jobs, strict=True)}
        world.written(jobs, [_renumbered(item, ids) for item in drafts])


def _renumbered(item: Item, ids: dict[int, int]) -> Item:
    edges = frozenset((ids.get(upstream, upstream), rule) for upstream, rule in item.edges)
    parent = None if item.parent is None else ids.get(item.parent, item.parent)
    return replace(item, id=ids[item.id], parent=parent, edges=edges)


def _refused(world: World, write: Any, *errors: type[Exception]) -> None:
    """See a step refused, with nothing changed and the transaction still usable."""

    def step(connection: Connection, backend: Backend) -> str:
        try:
            write(connection, backend)
        except errors as error:
            return type(error).__name__
        raise AssertionError(f"not refused: {errors}")

    world.take(step)
    world.change({})


Operation = (
    WriteWorkflow
    | Enqueue
    | EnqueueAfterUnknown
    | AddChild
    | Claim
    | Renew
    | Finish
    | Run
    | Cancel
    | Retry
    | RetryWhatIsNotOver
    | PassTime
    | SettleOnce
    | SettleAll
)
