"""What a scan of lanes reads: it follows the lanes that it finds, not those it passes over."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any, Final

import pytest
from sqlalchemy import Connection, and_, select, text

from asyncjobq.backends.base import Backend, Lane
from asyncjobq.codec import encode
from asyncjobq.models import LANE
from asyncjobq.pauses import Closed
from asyncjobq.ready import LaneCursor, Skipped
from conformance.kit import Jobs
from conformance.steps import Step

pytestmark = pytest.mark.asyncio(loop_scope="module")

FULL: Final = bool(os.environ.get("ASYNCJOBQ_TEST_FULL"))
FEW: Final = 400
MANY: Final = 300_000 if FULL else 4000

KEY: Final = "tenant=acme"


async def insert(jobs: Jobs, count: int, **columns: Any) -> None:
    """Make ready jobs, each with a group of its own where none is given."""
    now = datetime.now(UTC)
    same: dict[str, Any] = {
        "queue": "default", "kind": "job", "args": encode({}), "state": "ready", "settled": True,
        "limit_key": "", "created_at": now, "updated_at": now, **columns,
    }  # fmt: skip
    first = [{"group_key": f"group {n:03}", **same} for n in range(min(count, 250))]
    made = len(first)
    table = jobs.tables.jobs
    ids = await jobs.do(lambda c, b: b.insert_jobs(c, first))
    names = [*same, *({"group_key"} - columns.keys())]
    while made < count:  # each time as many as there are, in the database itself
        group = (table.c.group_key + f" {made}").label("group_key")
        picked = [group if n == "group_key" and n not in columns else table.c[n] for n in names]
        these = and_(table.c.id >= ids[0], *(table.c[n] == same[n] for n in LANE if n in same))
        some = select(*picked).where(these).order_by(table.c.id).limit(count - made)
        added = table.insert().from_select(names, some)
        made += await jobs.do(lambda c, _, added=added: c.execute(added).rowcount)


async def analyze(jobs: Jobs) -> None:
    """Let the planner know what there is, as it would in the long run."""
    statement = "ANALYZE TABLE jobs" if jobs.backend_name in ("mysql", "mariadb") else "ANALYZE"
    await jobs.do(lambda c, _: c.execute(text(statement)).close())


def reading(step: Step[Any], backend_name: str) -> Step[tuple[Any, int]]:
    """Take a step and count what the database reads for it."""
    counting = _COUNTERS[backend_name]
    return lambda connection, backend: counting(connection, lambda: step(connection, backend))


def _count_steps(connection: Connection, work: Callable[[], Any]) -> tuple[Any, int]:
    """Count the steps of SQLite's machine, in hundreds."""
    raw: Any = connection.connection.driver_connection
    hundreds = 0

    def note() -> int:
        nonlocal hundreds
        hundreds += 1
        return 0

    raw.set_progress_handler(note, 100)
    try:
        return work(), hundreds
    finally:
        raw.set_progress_handler(None, 0)


def _count_rows(connection: Connection, work: Callable[[], Any]) -> tuple[Any, int]:
    """Count the rows and index entries that PostgreSQL fetched in this transaction."""
    query = text(
        "SELECT coalesce(sum(seq_tup_read + coalesce(idx_tup_fetch, 0)), 0) "
        "FROM pg_stat_xact_user_tables"
    )
    before = int(connection.execute(query).scalar_one())
    result = work()
    return result, int(connection.execute(query).scalar_one()) - before


def _count_handler_reads(connection: Connection, work: Callable[[], Any]) -> tuple[Any, int]:
    """Count the rows and index entries that InnoDB was asked for."""

    def total() -> int:
        rows = connection.execute(text("SHOW SESSION STATUS LIKE 'Handler_read%'"))
        return sum(int(row[1]) for row in rows)

    before = total()
    result = work()
    return result, total() - before


_COUNTERS: Final = {
    "sqlite": _count_steps,
    "postgresql": _count_rows,
    "mysql": _count_handler_reads,
    "mariadb": _count_handler_reads,
}


def scanning(cursor: LaneCursor, skipped: Skipped) -> Step[list[Lane]]:
    """Scan once, on a connection that has done so before."""

    def step(connection: Connection, backend: Backend) -> list[Lane]:
        return cursor.scan_once(connection, backend, None, skipped)

    return step


async def cost_of(
    jobs: Jobs,
    cursor: LaneCursor,
    skipped: Skipped = Skipped(),  # noqa: B008  frozen
) -> tuple[list[Lane], int]:
    """Return what the next scan finds, and what it reads for that."""
    step = reading(scanning(cursor, skipped), jobs.backend_name)
    found, cost = jobs.elsewhere(step)
    print(f"{jobs.backend_name}: {len(found)} lanes for {cost}")
    return found, cost


def types_of(lanes: list[Lane]) -> set[str]:
    return {lane.type for lane in lanes}


TYPES: Final = ("closed", "open", "work")


class TestWhatIsClosed:
    """Each time with few lanes of it, and with many."""

    async def costs(
        self, jobs: Jobs, rows: Callable[[int], Awaitable[None]], skipped: Skipped,
        types: tuple[str, ...] = TYPES, closed: Closed = Closed(),  # noqa: B008
    ) -> tuple[int, int]:  # fmt: skip
        """Return what a scan costs with few closed lanes, and with many."""
        await insert(jobs, 3, type="open")
        costs: list[int] = []
        for count in (FEW, MANY):
            await rows(count)
            await analyze(jobs)
            cursor = LaneCursor(("default",), types)
            cursor.close(closed)
            found, cost = await cost_of(jobs, cursor, skipped)
            assert types_of(found) - {"closed"} == {"open"}
            assert not cursor.cut
            costs.append(cost)
        return costs[0], costs[1]

    async def test_a_type_without_room(self, jobs: Jobs) -> None:
        skipped = Skipped(kinds=frozenset({("default", "closed")}))
        few, many = await self.costs(jobs, lambda n: insert(jobs, n, type="closed"), skipped)
        assert many <= 2 * few + 20

    async def test_a_type_that_is_paused(self, jobs: Jobs) -> None:
        paused = Closed(types=frozenset({"closed"}))
        few, many = await self.costs(
            jobs, lambda n: insert(jobs, n, type="closed"), Skipped(), closed=paused
        )
        assert many <= 2 * few + 20

    async def test_a_type_without_a_handler(self, jobs: Jobs) -> None:
        few, many = await self.costs(
            jobs, lambda n: insert(jobs, n, type="closed"), Skipped(), types=("open", "work")
        )
        assert many <= 2 * few + 20

    @pytest.mark.parametrize("where", ["first", "middle", "last"])
    async def test_keys_without_room(self, jobs: Jobs, where: str) -> None:
        """Two keys side by side, at the beginning, between others, or at the end of their type."""
        others = {"first": ["tenant=b"], "middle": ["tenant=a", "tenant=b"], "last": ["tenant=a"]}
        closed = [KEY, f"{KEY}2"]
        for key in others[where]:
            await insert(jobs, 2, type="open", limit_key=key)

        async def rows(count: int) -> None:
            for key in closed:
                await insert(jobs, count // 2, type="open", limit_key=key)

        skipped = Skipped(keys=frozenset(("default", "open", key) for key in closed))
        await insert(jobs, 3, type="open")
        costs: list[int] = []
        for count in (FEW, MANY):
            await rows(count)
            await analyze(jobs)
            cursor = LaneCursor(("default",), TYPES)
            found, cost = await cost_of(jobs, cursor, skipped)
            assert {lane.limit_key for lane in found} - set(closed) == {"", *others[where]}
            assert len([lane for lane in found if lane.limit_key in closed]) <= 2
            assert not cursor.cut
            costs.append(cost)
        assert costs[1] <= 2 * costs[0] + 20


class TestWhatIsOpen:
    async def test_a_long_backlog(self, jobs: Jobs) -> None:
        """A page costs what its lanes do, however many jobs they have and others are done."""
        await insert(jobs, 20, type="open")
        await insert(jobs, 20, type="work")
        _, few = await cost_of(jobs, LaneCursor(("default",), TYPES))
        await insert(jobs, MANY, type="open", group_key="group 003")
        await insert(jobs, MANY, type="work", state="done")
        await insert(jobs, MANY, type="other")
        await analyze(jobs)
        found, many = await cost_of(jobs, LaneCursor(("default",), TYPES))
        assert len(found) == 40
        assert many <= 2 * few + 1000

    @pytest.mark.parametrize(
        ("queues", "types"),
        [
            (("default",), ("open",)),
            (("default",), TYPES),
            (("default", "media"), ("open",)),
            (("default", "media"), TYPES),
        ],
    )
    async def test_many_groups_a_page_at_a_time(
        self, jobs: Jobs, queues: tuple[str, ...], types: tuple[str, ...]
    ) -> None:
        await insert(jobs, FEW, type="open")
        _, few = await cost_of(jobs, LaneCursor(queues, types))
        await insert(jobs, MANY, type="open", queue="media")
        await insert(jobs, MANY, type="open", limit_key="tenant=b")
        await insert(jobs, FEW, type="work")
        await analyze(jobs)
        cursor = LaneCursor(queues, types)
        for _ in range(4):
            found, many = await cost_of(jobs, cursor)
            assert len(found) >= 128
            assert many <= 2 * few + 1000
