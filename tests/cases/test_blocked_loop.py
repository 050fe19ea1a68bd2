"""A handler blocks the event loop for many leases while another worker stands by.

Renewal must go on: neither the blocking job nor its neighbours may be run a second time.
"""

from __future__ import annotations

import pytest

from cases.log import by_label
from cases.workers import Case, wait_until

LEASE, LEASES = 1.0, 5


@pytest.mark.parametrize("blocking", ["block", "hold"])
async def test_no_neighbour_is_run_twice(case: Case, blocking: str) -> None:
    """`hold` blocks in the middle of a transaction: on SQLite, that locks everybody out."""
    old = case.start_worker("A", blocking=True, lease_ttl=LEASE)
    await case.up(old)
    names = ["neighbour 0", "neighbour 1"]
    await case.add_many(names, seconds=1.5 * LEASE)
    await wait_until(lambda: len(case.log.starts()) == 2, 10.0, "the neighbours run")
    await case.add("blocker", blocking, seconds=LEASES * LEASE)
    await wait_until(lambda: case.log.starts("blocker"), 10.0, "the loop is blocked")
    new = case.start_worker("B", blocking=True, lease_ttl=LEASE)
    await case.up(new)
    await wait_until(lambda: case.log.ends("blocker"), 3.0 * LEASES, "the loop is free")
    assert await case.all_ended(within=10.0) == {"done": 3}

    starts, ends = by_label(case.log.starts()), by_label(case.log.ends())
    assert {label: len(found) for label, found in starts.items()} == dict.fromkeys(starts, 1)
    assert set(starts) == set(ends) == {*names, "blocker"}
    assert "has blocked the event loop" in old.output()
    assert "reclaimed" not in old.output() + new.output()
    await case.check_alive(old, new)
