"""Texts that would do harm if anybody took them for more than texts: in SQL, formats, terminals."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import make_url

from asyncjobq import (
    Concurrency,
    DatabaseUnavailableError,
    JobContext,
    RateLimit,
    Scheduler,
)
from conformance.kit import Jobs
from conformance.running import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

HOSTILE = (
    "'; DROP TABLE jobs; --",
    '"; DROP TABLE jobs; --',
    "`jobs`; DELETE FROM jobs; #",
    "\\'; DROP TABLE jobs; -- \\",
    "%s %(name)s %% :name $1 ?",
    "{0} {name!r} {",
    "/*!50000 DROP TABLE jobs */",
    "os.system('true')",
    "[red]bold[/red] [link=https://example.org]x[/]",
    "<script>alert(1)</script>",
    "${jndi:ldap://example.org}",
    "ünïcödé 🐘 \u202e backwards",
)
UNTOLD = "s3cr3t-0f-n0b0dy"


@pytest.mark.parametrize("hostile", HOSTILE)
async def test_are_texts_on_the_whole_path(jobs: Jobs, hostile: str) -> None:
    scheduler = Scheduler(jobs.url, queues=(hostile,), poll_interval=0.1)

    @scheduler.handler(
        hostile,
        max_attempts=1,
        limits=[Concurrency(hostile, 1, key="text"), RateLimit("rate", 1000, per=1, key="group")],
    )
    async def work(ctx: JobContext, text: str, **more: Any) -> dict[str, str]:
        assert (ctx.type, ctx.queue, ctx.group_key) == (hostile, hostile, hostile)
        ctx.progress(1, 2, hostile)
        return {hostile: text, **more}

    async with scheduler:
        args = {"text": hostile, hostile: hostile}
        options: dict[str, Any] = {"queue": hostile, "group_key": hostile, "unique_key": hostile}
        options |= {"name": hostile, "meta": {hostile: hostile}}
        job = await scheduler.enqueue(hostile, args, **options)
        again = await scheduler.enqueue(hostile, args, **options)
        assert again.id == job.id
        await scheduler.pause(queue=hostile)
        await scheduler.drain()
        assert (await scheduler.get(job)).state == "ready"
        await scheduler.resume(queue=hostile)
        await scheduler.drain()
        found = await scheduler.find(type=hostile, queue=hostile, group_key=hostile)
        assert [(one.id, one.state, one.name) for one in found] == [(job.id, "done", hostile)]
        assert found[0].args == args
        assert found[0].meta == {hostile: hostile}
        assert found[0].result == {hostile: hostile}


@pytest.mark.parametrize("hostile", HOSTILE)
async def test_are_texts_in_errors(jobs: Jobs, hostile: str) -> None:
    @jobs.scheduler.handler(max_attempts=1)
    async def work() -> None:
        raise RuntimeError(hostile)

    job = await jobs.scheduler.enqueue(work.job())
    await jobs.scheduler.drain()
    assert hostile in ((await jobs.scheduler.get(job)).error or "")
    (attempt,) = await jobs.scheduler.attempts(job)
    assert attempt.message == hostile


@pytest.fixture
def with_password(backend_name: str, jobs: Jobs) -> Iterator[str]:
    """Give a URL with a password, at which nobody answers."""
    if backend_name == "sqlite":
        pytest.skip("a file has no password")
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # bound and not listening: refused, and nobody else's
        address = {"host": "127.0.0.1", "port": nobody.getsockname()[1]}
        url = make_url(jobs.url).set(**address, password=UNTOLD)
        yield url.render_as_string(hide_password=False)


@pytest.mark.requires("server")
async def test_nobody_is_told_the_password(
    with_password: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    scheduler = Scheduler(with_password)
    texts = [repr(scheduler), str(scheduler)]
    for call in (lambda: scheduler.enqueue("work"), scheduler.create_schema, scheduler.check):
        with pytest.raises(DatabaseUnavailableError) as caught:
            await call()
        error: BaseException | None = caught.value
        while error is not None:
            texts += [str(error), repr(error), str(vars(error))]
            error = error.__cause__ or error.__context__
    serving = asyncio.create_task(scheduler.serve())

    async def enough() -> bool:
        return sum("trying again" in record.getMessage() for record in caplog.records) >= 2

    await until(enough)
    scheduler.stop()
    await serving
    texts += [caplog.text]
    assert not [text for text in texts if UNTOLD in text]
