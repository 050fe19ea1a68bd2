"""Leases: claimed by one, and renewed by their owner alone."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from asyncjobq import State
from asyncjobq.lease import Claimed, Defaults, Lease, reclaim_once, still_ours
from conformance.kit import Jobs
from conformance.steps import (
    TTL,
    assert_one_of_them,
    claiming,
    enqueuing,
    holding,
    ids_of,
    impostor,
    renewing,
    spec,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")


class TestClaim:
    async def test_writes_the_lease(self, jobs: Jobs) -> None:
        job = await jobs.enqueue()
        claimed = await jobs.claim_one("me")
        row = await jobs.row(job)
        assert claimed.lease == Lease(job.id, "me", 1)
        assert (row.state, row.in_flight, row.lease_owner) == (State.LEASED, True, "me")
        assert (row.lease_token, row.attempt) == (1, 1)
        assert row.started_at == claimed.started_at

    async def test_expires_by_the_clock_of_the_database(self, jobs: Jobs) -> None:
        """However wrong the worker's clock is."""
        jobs.later(86_400)
        claimed = await jobs.leased()
        now = await jobs.now()
        left = (await jobs.row(claimed)).lease_expires - now
        assert left == pytest.approx(timedelta(seconds=TTL), abs=timedelta(seconds=2))
        assert now - claimed.started_at < timedelta(seconds=2)

    async def test_fills_in_what_the_job_left_out(self, jobs: Jobs) -> None:
        for type_name in ("a", "b"):
            await jobs.enqueue(type_name)
            await jobs.enqueue(type_name, max_attempts=9, timeout=90)
        how: dict[str, Any] = {
            "types": ["a", "b"],
            "defaults": Defaults(max_attempts={"a": 2, "b": 3}, timeout={"a": 20.0, "b": 30.0}),
        }
        claimed = sorted(await jobs.claim(4, **how), key=lambda job: job.lease.job_id)
        assert [(job.max_attempts, job.timeout) for job in claimed] == [
            (2, 20), (9, 90), (3, 30), (9, 90),
        ]  # fmt: skip
        assert (await jobs.row(claimed[0])).max_attempts == 2

    async def test_returns_what_the_job_needs(self, jobs: Jobs) -> None:
        job = await jobs.enqueue(args={"a": "ä"}, group_key="acme", weight=2.5, queue="media")
        (claimed,) = await jobs.claim(queues=["media"])
        assert claimed.args == '{"a":"ä"}'
        assert (claimed.type, claimed.queue, claimed.group_key) == ("work", "media", "acme")
        assert (claimed.weight, claimed.attempt, claimed.created_at) == (2.5, 1, job.created_at)

    async def test_takes_none_twice(self, jobs: Jobs) -> None:
        made = await jobs.enqueue_many(5)
        first, second = await jobs.claim(3), await jobs.claim(3)
        assert ids_of(first) + ids_of(second) == ids_of(made)
        assert await jobs.claim(3) == []

    async def test_of_nothing_is_nothing(self, jobs: Jobs) -> None:
        assert await jobs.claim() == []

    async def test_from_many_groups_at_once(self, jobs: Jobs) -> None:
        specs = [spec(group_key=f"g{n % 40}", priority=n // 40) for n in range(120)]
        made = await jobs.do(enqueuing(*specs))
        claimed = await jobs.claim(2)
        assert sorted(ids_of(claimed)) == ids_of(made)[:80]

    async def test_the_token_goes_up_for_ever(self, jobs: Jobs) -> None:
        tokens: list[int] = []
        for _ in range(3):
            claimed = await (jobs.claim_one() if tokens else jobs.leased())
            tokens.append(claimed.lease.token)
            jobs.later(TTL + 1)
            await jobs.reclaim()
        assert tokens == [1, 2, 3]


@pytest.mark.requires("row_locks")
class TestClaimBesideOthers:
    async def test_at_any_moment_of_another_claim(self, jobs: Jobs) -> None:
        async for moment in jobs.moments():
            await jobs.do(enqueuing(*(spec(group_key=f"g{n % 2}") for n in range(10))))
            mine = await moment.of(claiming(3, "a"), meanwhile=claiming(3, "b"))
            theirs: list[Claimed] = moment.other
            assert not set(ids_of(mine)) & set(ids_of(theirs))
            assert len(mine) <= 6
            for claimed, owner in ((mine, "a"), (theirs, "b")):
                for job in claimed:
                    row = await jobs.row(job)
                    assert (row.lease_owner, row.lease_token) == (owner, 1)

    async def test_goes_round_what_another_is_claiming(self, jobs: Jobs) -> None:
        await jobs.enqueue_many(6)
        async with jobs.limited_time(), jobs.transaction() as take:
            held = await take(claiming(3, "a"))
            claimed = await jobs.claim(3, "b")
        assert len(held) == len(claimed) == 3
        assert not set(ids_of(held)) & set(ids_of(claimed))

    async def test_finds_jobs_to_which_a_caller_holds_an_edge(self, jobs: Jobs) -> None:
        job = await jobs.enqueue()
        async with jobs.limited_time(), jobs.transaction() as take:
            await take(enqueuing(spec(depends_on=[job])))
            assert ids_of(await jobs.claim()) == [job.id]


class TestRenewal:
    async def test_extends_the_lease_and_shows_that_the_job_runs(self, jobs: Jobs) -> None:
        claimed = await jobs.leased()
        jobs.later(20)
        renewal = await jobs.renew(claimed)
        row, now = await jobs.row(claimed), await jobs.now()
        assert renewal.renewed == {claimed.lease}
        assert (row.state, row.in_flight) == (State.RUNNING, True)
        near = timedelta(seconds=2)
        assert row.lease_expires - now == pytest.approx(timedelta(seconds=TTL), abs=near)
        assert now - row.heartbeat_at < near

    async def test_revives_a_lease_that_nobody_has_taken_back(self, jobs: Jobs) -> None:
        claimed = await jobs.leased()
        jobs.later(TTL + 1)
        assert (await jobs.renew(claimed)).renewed == {claimed.lease}
        assert await jobs.reclaim() == []

    @pytest.mark.parametrize("wrong", ["owner", "token", "id"])
    async def test_by_anybody_else_is_lost(self, jobs: Jobs, wrong: str) -> None:
        claimed = await jobs.leased()
        before = await jobs.row(claimed)
        lease = impostor(claimed.lease, wrong)
        jobs.later(5)
        assert (await jobs.renew(lease)).lost == {lease}
        assert await jobs.do(lambda c, b: still_ours(c, b, [lease])) == set()
        assert await jobs.row(claimed) == before

    async def test_of_an_ended_job_is_lost(self, jobs: Jobs) -> None:
        claimed = await jobs.leased()
        await jobs.finish(claimed)
        assert (await jobs.renew(claimed)).lost == {claimed.lease}
        assert await jobs.state(claimed) == State.DONE

    async def test_tells_of_a_request_to_cancel(self, jobs: Jobs) -> None:
        claimed, other = await jobs.leased(), await jobs.leased()
        await jobs.spoil(claimed, cancel_requested=True)
        renewal = await jobs.renew(claimed, other)
        assert renewal.cancel_requested == {claimed.lease}
        assert renewal.renewed == {claimed.lease, other.lease}

    async def test_of_many_together(self, jobs: Jobs) -> None:
        await jobs.enqueue_many(1200)
        claimed = await jobs.claim(1200)
        gone = claimed[::3]
        await jobs.finish(*gone)
        renewal = await jobs.renew(*claimed)
        assert renewal.lost == {job.lease for job in gone}
        assert renewal.renewed == {job.lease for job in claimed} - renewal.lost

    async def test_of_an_old_and_a_new_lease_of_one_job(self, jobs: Jobs) -> None:
        """A handler that was given up may still be here when its job comes back."""
        old = await jobs.leased()
        jobs.later(TTL + 1)
        await jobs.reclaim()
        new = await jobs.claim_one()
        for leases in ((old, new), (new, old)):
            renewal = await jobs.renew(*leases)
            assert renewal.renewed == {new.lease}
            assert renewal.lost == {old.lease}

    @pytest.mark.requires("row_locks")
    async def test_goes_round_what_somebody_holds(self, jobs: Jobs) -> None:
        held, free = await jobs.leased(), await jobs.leased()
        async with jobs.limited_time(), jobs.transaction() as take:
            await take(holding(held))
            renewal = await jobs.renew(held, free)
        assert (renewal.held, renewal.renewed) == ({held.lease}, {free.lease})
        assert (await jobs.renew(held)).renewed == {held.lease}

    @pytest.mark.requires("row_locks")
    async def test_waits_for_no_caller_with_an_open_edge(self, jobs: Jobs) -> None:
        claimed = await jobs.leased()
        async with jobs.limited_time(), jobs.transaction() as take:
            await take(enqueuing(spec(depends_on=[claimed.lease.job_id])))
            assert (await jobs.renew(claimed)).renewed == {claimed.lease}

    @pytest.mark.requires("row_locks")
    async def test_with_a_reclaim_at_any_moment(self, jobs: Jobs) -> None:
        async for moment in jobs.moments():
            claimed = await jobs.leased()
            jobs.later(TTL + 1)
            renewal = await moment.of(renewing(claimed), meanwhile=reclaim_once)
            assert_one_of_them(renewal.renewed, moment.other)
            state = State.READY if moment.other else State.RUNNING
            assert await jobs.state(claimed) == state
