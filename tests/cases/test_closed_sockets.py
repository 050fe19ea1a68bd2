"""A handler closes every socket of its worker: those of the loop, and those to the database.

What the worker can still do then is anybody's guess; its jobs have to end all the same. A new
connection may get the number of a closed one that somebody else still reads from; what is done on
it is given up when the worker's patience is at its end.
"""

from __future__ import annotations

from asyncjobq.backends.bounded import PATIENCE
from cases.workers import Case, wait_until


async def test_jobs_of_a_worker_without_sockets_end(case: Case) -> None:
    old = case.start_worker("A", lease_ttl=1.0)
    await case.up(old)
    neighbour = await case.add("neighbour", seconds=0.5)
    await wait_until(lambda: case.log.starts("neighbour"), 10.0, "the neighbour runs")
    unplugging = await case.add("unplugging", "unplug")
    await wait_until(lambda: case.log.ends("unplugging"), 10.0, "the sockets are closed")
    new = case.start_worker("B", lease_ttl=1.0)
    await case.up(new)
    after = await case.add("after", queue="B", depends_on=[neighbour, unplugging])
    assert await case.all_ended(within=PATIENCE + 20.0) == {"done": 3}
    for job in (neighbour, unplugging):
        assert (await case.scheduler.get(job)).attempt <= 2
    assert (await case.scheduler.get(after)).attempt == 1
    old.kill()
    case.workers.remove(old)  # it may have met anything
    await case.check_alive(new)
