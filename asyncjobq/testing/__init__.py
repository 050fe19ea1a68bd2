"""For tests of programs that enqueue jobs: a database for each test, and jobs that run when told.

With pytest, the fixtures of its plugin are all that is needed (`pytest --fixtures`); this package
is what stands behind them, and serves other test runners too:

    with JobTester(shop.scheduler) as jobs:
        await shop.place_order("tea")
        await jobs.assert_enqueued("write_invoice", args={"product": "tea"})
        await jobs.drain()
"""

from asyncjobq.testing.clock import JobClock
from asyncjobq.testing.tester import JobTester

__all__ = ["JobClock", "JobTester"]
