"""Worker clocks that are wrong or are set while running, and servers that live in other zones.

What is due and what has expired is decided by the database's clock. A server has one, and the
workers' own do not matter. SQLite has none but the clock of the process that looks, which all
processes on a file share with their machine. When that is put forward, leases lapse early there:
such a job may run again, and ends once all the same.
"""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from asyncjobq import InvalidJobError, JobRow, Scheduler, enqueue
from cases.faked_clocks import faked_clock, require_faked_clocks
from cases.log import by_label
from cases.workers import POLL, SLACK, Case, MakeEngine, wait_until

LEASE = 1.0
INDIA: dict[str, dict[str, Any]] = {
    "postgresql": {"server_settings": {"timezone": "Asia/Kolkata"}},
    "mysql": {"init_command": "SET time_zone = '+05:30'"},
    "sqlite": {},
}
INDIA["mariadb"] = INDIA["mysql"]
BERLIN = ZoneInfo("Europe/Berlin")


@pytest.fixture
def faked_clocks(request: pytest.FixtureRequest) -> None:
    """Skip the test if the clocks of processes cannot be faked."""
    require_faked_clocks(request)


@pytest.mark.requires("server")
@pytest.mark.usefixtures("faked_clocks")
async def test_workers_ten_minutes_ahead_and_behind(case: Case) -> None:
    """They steal nothing, start nothing early, and find what is lost as soon as any other."""
    lost = case.start_worker("lost", lease_ttl=LEASE)
    ahead = case.start_worker("ahead", environment=faked_clock("+600s"), lease_ttl=LEASE)
    behind = case.start_worker("behind", environment=faked_clock("-600s"), lease_ttl=LEASE)
    await case.up(lost, ahead, behind)
    await case.add_many([f"job {number}" for number in range(9)], seconds=1.5 * LEASE)
    begun, delay = time.monotonic(), 0.8
    await case.add("in a while", run_after=delay)
    await case.add("at a time", run_after=datetime.now(UTC) + timedelta(seconds=delay))
    await case.all_ended(within=15.0)
    starts = by_label(case.log.starts())
    assert {len(found) for found in starts.values()} == {1}
    for label in ("in a while", "at a time"):
        assert delay <= starts[label][0].at - begun < delay + 2 * POLL + SLACK

    orphan = await case.add("orphan", queue=lost.id, seconds=30.0)
    await wait_until(lambda: case.log.starts("orphan"), 5.0, "the job runs")
    lost.kill()
    killed_at = time.monotonic()
    in_flight = select(JobRow.in_flight).where(JobRow.id == orphan.id)
    while await case.rows(in_flight) == [(True,)]:
        assert time.monotonic() < killed_at + LEASE + 2 * POLL + SLACK
        await asyncio.sleep(0.01)
    assert time.monotonic() > killed_at + LEASE / 2
    await case.check_alive(ahead, behind)


@pytest.mark.usefixtures("faked_clocks")
async def test_the_clock_is_set_while_jobs_run(case: Case, tmp_path: Path) -> None:
    clock = tmp_path / "clock"
    clock.write_text("+0s")
    worker = case.start_worker(environment=faked_clock(clock), lease_ttl=LEASE)
    await case.up(worker)
    jobs = await case.add_many([f"job {number}" for number in range(4)], seconds=2 * LEASE)
    await wait_until(lambda: len(case.log.running(worker.pid)) == 4, 5.0, "the jobs run")
    clock.write_text("-3600s")
    await asyncio.sleep(LEASE)  # all leases are renewed by the new time
    clock.write_text("+3600s")
    assert await case.all_ended(within=15.0) == {"done": 4}
    starts = by_label(case.log.starts())
    for job in jobs:
        ended = await case.scheduler.get(job)
        assert ended.result == ended.attempt == len(starts[job.args["label"]])
        # A file's leases are old when its machine's clock is put forward.
        assert ended.attempt == 1 or case.engine.dialect.name == "sqlite"
    await case.check_alive(worker)


async def test_zones_of_server_worker_and_caller(case: Case, make_engine: MakeEngine) -> None:
    """The session's zone is half an hour off any other, the worker's is Berlin."""
    connect_args = INDIA[case.engine.dialect.name]
    abroad = case.start_worker(
        "abroad", lease_ttl=LEASE, time_zone="Europe/Berlin", connect_args=connect_args
    )
    here = case.start_worker("here", lease_ttl=LEASE)
    await case.up(abroad, here)
    engine = make_engine(case.url, connect_args=connect_args)
    await case.add_many([f"long {number}" for number in range(8)], seconds=1.2 * LEASE)
    due = datetime.now(UTC) + timedelta(seconds=0.8)
    due_at = time.monotonic() + 0.8
    zones = ("UTC", "Asia/Kolkata", "America/St_Johns", "Europe/Berlin")
    async with AsyncSession(engine) as session, Scheduler(engine) as scheduler:
        for zone in zones:
            moment = due.astimezone(ZoneInfo(zone))
            job = await enqueue(session, "work", {"label": zone}, run_after=moment)
            assert (await scheduler.get(job, session=session)).run_after == due
        with pytest.raises(InvalidJobError, match="time zone"):
            await enqueue(session, "work", {"label": "x"}, run_after=due.replace(tzinfo=None))
        await session.commit()
    assert await case.all_ended(within=10.0) == {"done": 8 + len(zones)}
    starts = by_label(case.log.starts())
    assert {len(found) for found in starts.values()} == {1}
    for zone in zones:
        assert due_at - 0.01 <= starts[zone][0].at < due_at + 2 * POLL + SLACK
    await case.check_alive(abroad, here)


@pytest.mark.parametrize("zone", [{}, INDIA], ids=["server's zone", "+05:30"])
async def test_moments_come_back_to_the_microsecond(
    case: Case, make_engine: MakeEngine, zone: dict[str, Any]
) -> None:
    engine = make_engine(case.url, connect_args=zone.get(case.engine.dialect.name, {}))
    local = datetime(2030, 10, 27, 2, 30, tzinfo=BERLIN)
    moments = [
        datetime(2030, 1, 1, 12, 0, 0, microsecond, tzinfo=UTC)
        for microsecond in (0, 1, 123_456, 499_999, 500_000, 999_999)
    ]
    moments += [local, local.replace(fold=1), datetime(2030, 3, 31, 2, 30, tzinfo=BERLIN)]
    async with Scheduler(engine) as scheduler:
        for moment in moments:
            job = await scheduler.enqueue("work", {"label": "later"}, run_after=moment)
            found = await scheduler.get(job)
            assert job.run_after == found.run_after == moment.astimezone(UTC)
            assert found.run_after is not None
            assert found.run_after.utcoffset() == timedelta(0)
            assert found.created_at == job.created_at
    assert (local.replace(fold=1).astimezone(UTC) - local.astimezone(UTC)) == timedelta(hours=1)


async def test_delays_of_less_than_a_second(case: Case) -> None:
    worker = case.start_worker()
    await case.up(worker)
    begun, delays = time.monotonic(), (0.05, 0.3, 0.55)
    for delay in delays:
        await case.add(str(delay), run_after=delay)
    await case.all_ended(within=10.0)
    starts = by_label(case.log.starts())
    for delay in delays:
        # The database's clock has milliseconds on SQLite.
        assert delay - 0.002 <= starts[str(delay)][0].at - begun < delay + 2 * POLL + SLACK
    await case.check_alive(worker)
