"""Several jobs are claimed at once, and one of them cannot be started, or not by this release.

The others must run. A job whose arguments cannot be read fails alone and says why; one whose type
no handler here runs is left for a worker that knows it; and nothing is claimed ahead of a free
slot, where its lease would run out before it begins.
"""

from __future__ import annotations

import asyncio
import time

from sqlalchemy import select

from asyncjobq import JobRow
from cases.workers import POLL, Case, wait_until

GOOD = [f"good {number}" for number in range(8)]
CUT_OFF = '{"label": "cut o'
UNREADABLE = ["[1, 2]", '{"nonsense": 1}', CUT_OFF]


async def test_some_that_cannot_be_started_strand_no_other(case: Case) -> None:
    unknown = await case.add("unknown", "of_a_later_release")
    bad = [await case.add("bad") for _ in UNREADABLE]
    await case.add_many(GOOD)
    for job, stored in zip(bad, UNREADABLE, strict=True):
        await set_args(case, job.id, stored)
    worker = case.start_worker(concurrency=12)
    await wait_until(lambda: len(case.log.ends()) == len(GOOD), 10.0, "the good jobs end")
    states = {"done": len(GOOD), "failed": len(bad), "ready": 1}
    await wait_until(lambda: has_states(case, states), 10.0, f"{states}")

    assert sorted(start.label for start in case.log.starts()) == GOOD
    query = select(JobRow.state, JobRow.attempt, JobRow.error).order_by(JobRow.id)
    left, *refused = await case.rows(query.limit(1 + len(bad)))
    assert (left.state, left.attempt) == ("ready", 0)
    for row in refused:
        assert (row.state, row.attempt) == ("failed", 1)
        assert "argument" in row.error

    used, begun = worker.cpu_seconds(), time.monotonic()
    await asyncio.sleep(2 * POLL)
    share = (worker.cpu_seconds() - used) / (time.monotonic() - begun)
    assert share < 0.4, f"idle, the worker uses {share:.0%} of a processor"
    await case.check_alive(worker)
    assert (await case.scheduler.get(unknown)).attempt == 0


async def set_args(case: Case, job_id: int, stored: str) -> None:
    """Write arguments past the library, as a bug or an older release might have left them."""
    if case.engine.dialect.name == "postgresql" and stored == CUT_OFF:
        stored = '"a string"'  # its JSON type holds nothing that is cut off
    statement = f"UPDATE jobs SET args = '{stored}' WHERE id = {job_id:d}"
    async with case.engine.begin() as connection:
        await connection.exec_driver_sql(statement)


async def has_states(case: Case, states: dict[str, int]) -> bool:
    return await case.states() == states


async def test_a_new_type_runs_on_the_new_release_alone(case: Case) -> None:
    names = [f"{type_} {number}" for number in range(20) for type_ in "ab"]
    for name in names:
        await case.add(name, name[0])
    old = case.start_worker("old", types=["a"])
    await case.up(old)
    await wait_until(lambda: len(case.log.ends()) >= 10, 10.0, "half of the old type has ended")
    new = case.start_worker("new", types=["a", "b", "work"])
    assert await case.all_ended(within=20.0) == {"done": 40}
    starts = case.log.starts()
    assert sorted(start.label for start in starts) == sorted(names)
    assert {start.pid for start in starts if start.label[0] == "b"} == {new.pid}
    assert old.pid in {start.pid for start in starts}
    await case.check_alive(new)
    assert old.exit_code is None


async def test_nothing_is_leased_ahead_of_a_free_slot(case: Case) -> None:
    """Jobs that take longer than a lease wait for their turn without being owned."""
    names = [f"job {number}" for number in range(4)]
    await case.add_many(names, seconds=1.1)
    workers = [case.start_worker(name, concurrency=1, lease_ttl=1.0) for name in "AB"]
    await case.up(*workers)
    in_flight = select(JobRow.id).where(JobRow.in_flight)
    while not set(await case.states()) <= {"done"}:
        assert len(await case.rows(in_flight)) <= 2
        await asyncio.sleep(0.05)
    assert sorted(start.label for start in case.log.starts()) == names
    await case.check_alive(*workers)
