"""Ready jobs that a worker will not start: said once, and found without reading the others."""

from __future__ import annotations

import pytest

from asyncjobq.unserved import BOUND, Unserved, ready_kinds
from conformance.kit import Jobs
from conformance.running import serving, until
from conformance.steps import enqueuing, spec

pytestmark = pytest.mark.asyncio(loop_scope="module")


class TestReadyKinds:
    async def test_are_found_in_order(self, jobs: Jobs) -> None:
        kinds = [("a", "x"), ("a", "y"), ("b", "x"), ("default", "work")]
        for queue, type_ in reversed(kinds):
            options = {"queue": queue, "group_key": "g"}
            await jobs.do(enqueuing(*[spec(type_, **options)] * 3, spec(type_, queue=queue)))
        await jobs.enqueue("later", run_after=60)
        assert await jobs.do(ready_kinds) == kinds

    async def test_are_bounded(self, jobs: Jobs) -> None:
        await jobs.do(enqueuing(*(spec(f"type {n:03}") for n in range(BOUND + 5))))
        assert len(await jobs.do(ready_kinds)) == BOUND


class TestWarning:
    async def test_once_of_each(self, jobs: Jobs, caplog: pytest.LogCaptureFixture) -> None:
        for type_, queue in (("work", "default"), ("wrok", "default"), ("work", "media")):
            await jobs.do(enqueuing(*[spec(type_, queue=queue)] * 2))
        unserved = Unserved(jobs.database, ["default", "fast"], ["work"])
        await unserved.look_once()
        assert caplog.records == []
        for _ in range(2):
            await unserved.look_once()
        assert [record.getMessage() for record in caplog.records] == [
            "Jobs of the type 'wrok' are ready in the queue 'default', and this worker has no "
            "handler for it; it has those of 'work'.",
            "Jobs of the type 'work' are ready in the queue 'media', which this worker does not "
            "serve; it serves 'default', 'fast'.",
        ]

    async def test_by_one_that_drains(self, jobs: Jobs, caplog: pytest.LogCaptureFixture) -> None:
        await jobs.enqueue("wrok")
        async with jobs.limited_time():
            assert set((await jobs.scheduler.drain()).values()) == {0}
        assert "'wrok'" in caplog.text

    async def test_by_one_that_serves(
        self, jobs: Jobs, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        await jobs.enqueue("wrok")
        monkeypatch.setattr("asyncjobq.unserved.FIRST_PAUSE", 0.01)
        async with serving(jobs.scheduler):

            async def told() -> bool:
                return "'wrok'" in caplog.text

            await until(told)
