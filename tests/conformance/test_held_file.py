"""A SQLite file that one writer holds for longer than leases last: nobody can renew or reclaim."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Iterator

import pytest

from asyncjobq.clock import monotonic
from asyncjobq.emitter import Emitter
from asyncjobq.heartbeat import Heartbeat
from asyncjobq.lease import Claimed
from asyncjobq.reclaiming import LOOKING, Reclaiming
from asyncjobq.run import JobRun, Stop
from asyncjobq.states import State
from asyncjobq.subscribers import Subscribers
from conformance.kit import Jobs
from conformance.running import until
from conformance.runs import run_of, wait_for_ever
from conformance.steps import TTL

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.requires("file_database"),
]


@pytest.fixture
def holder(jobs: Jobs) -> Iterator[sqlite3.Connection]:
    """Give another program's connection, which holds the file until it rolls back."""
    connection = sqlite3.connect(jobs.database.path, isolation_level=None)  # type: ignore[attr-defined]
    connection.execute("BEGIN IMMEDIATE")
    yield connection
    connection.close()


def late(heartbeat: Heartbeat, claimed: Claimed) -> JobRun:
    """Keep a lease that has run out."""
    run = run_of(wait_for_ever)
    run.claimed = claimed
    heartbeat.add(run, monotonic())
    heartbeat._beats[claimed.lease].leased_at -= TTL
    return run


async def queueing(jobs: Jobs) -> bool:
    return jobs.database.queues


async def test_handlers_of_a_worker_that_queues_go_on(
    jobs: Jobs, caplog: pytest.LogCaptureFixture, request: pytest.FixtureRequest
) -> None:
    claimed, heartbeat = await jobs.leased(), Heartbeat(jobs.database, TTL)
    holder: sqlite3.Connection = request.getfixturevalue("holder")
    run = late(heartbeat, claimed)
    renewing = asyncio.ensure_future(heartbeat.renew_once())
    await until(lambda: queueing(jobs))
    for _ in range(2):
        await heartbeat.expire_once()
    assert run.stopped is None
    assert len(caplog.messages) == 1
    assert "nobody can write meanwhile" in caplog.text
    holder.rollback()
    await renewing
    assert await jobs.state(claimed) == State.RUNNING
    assert not jobs.database.queues
    await heartbeat.expire_once()
    assert run.stopped is None


async def test_but_not_those_whose_lease_is_seen_to_be_anothers(
    jobs: Jobs, request: pytest.FixtureRequest
) -> None:
    claimed, heartbeat = await jobs.leased(), Heartbeat(jobs.database, TTL)
    holder: sqlite3.Connection = request.getfixturevalue("holder")
    holder.execute("UPDATE jobs SET lease_token = lease_token + 1")
    holder.execute("COMMIT")
    holder.execute("BEGIN IMMEDIATE")
    run = late(heartbeat, claimed)
    renewing = asyncio.ensure_future(heartbeat.renew_once())
    await until(lambda: queueing(jobs))
    await heartbeat.expire_once()
    assert run.stopped is Stop.LEASE_LOST
    holder.rollback()
    await renewing


class TestReclaim:
    @pytest.fixture
    def reclaiming(self, jobs: Jobs) -> Reclaiming:
        return Reclaiming(jobs.database, Emitter(Subscribers()), TTL)

    async def test_takes_at_once_what_it_did_not_wait_for(
        self, jobs: Jobs, reclaiming: Reclaiming
    ) -> None:
        claimed = await jobs.leased()
        reclaiming._tolerated = LOOKING  # on a machine that is busy
        jobs.later(TTL + 1)
        assert await reclaiming.reclaim_once()
        assert await jobs.state(claimed) == State.READY

    async def test_lets_others_go_first_who_had_to_wait_too(
        self, jobs: Jobs, reclaiming: Reclaiming, request: pytest.FixtureRequest
    ) -> None:
        claimed = await jobs.leased()
        jobs.later(TTL + 1)
        holder: sqlite3.Connection = request.getfixturevalue("holder")
        taking = asyncio.ensure_future(reclaiming.reclaim_once())
        await until(lambda: queueing(jobs))
        await asyncio.sleep(0.01)  # what counts is that it had to wait
        holder.rollback()
        assert not await taking
        assert await jobs.state(claimed) == State.LEASED
        assert 0 < reclaiming.pause <= TTL / 3
        assert not await reclaiming.reclaim_once()
        reclaiming._not_before = monotonic()
        assert await reclaiming.reclaim_once()
        assert await jobs.state(claimed) == State.READY

    async def test_waits_no_longer_than_a_renewal_interval(
        self, jobs: Jobs, reclaiming: Reclaiming
    ) -> None:
        assert reclaiming._leaves_them(1000.0)
        assert TTL / 3 - 1 < reclaiming.pause <= TTL / 3
        assert not reclaiming._leaves_them(TTL / 3)
        assert reclaiming._leaves_them(1.0)  # another time
