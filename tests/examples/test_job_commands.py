"""The commands that look at jobs and change them, on real tables."""

from __future__ import annotations

import asyncio
import io
import json
import signal
import sys
from collections.abc import Awaitable, Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import pytest

from asyncjobq import Explanation, Fail, Job, LimitState, Scheduler, WorkerState
from asyncjobq.cli.changing import period
from asyncjobq.cli.errors import UsageError
from asyncjobq.presence import appear
from examples.commanding import Command
from examples.programs import COMMAND, Place, wait_for

T = TypeVar("T")

NASTY = "\x1b]0;owned\x07\x1b[31m[bold]x[/bold]\u202e\n"
SHOWN = "\\x1b]0;owned\\x07\\x1b[31m[bold]x[/bold]\\u202e"

APPLICATION = """
import os
from asyncjobq import Concurrency, Fail, Scheduler

scheduler = Scheduler(os.environ["ASYNCJOBQ_URL"], limits=[Concurrency("gpu", 0)])

@scheduler.handler
async def render(scene: int) -> int:
    return scene
"""


@pytest.fixture
def cli(
    database_url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Command:
    """Give the command line on an empty database with the tables, in a folder with an app."""
    monkeypatch.setenv("ASYNCJOBQ_URL", database_url)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    monkeypatch.delitem(sys.modules, "shop", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shop.py").write_text(APPLICATION)
    command = Command(monkeypatch, capsys)
    command.good("init")
    return command


@pytest.fixture
def here(cli: Command, database_url: str) -> Callable[[Callable[[Scheduler], Awaitable[T]]], T]:
    """Give what runs an async function on a scheduler of these tables."""
    del cli

    def run(function: Callable[[Scheduler], Awaitable[T]]) -> T:
        async def on_it() -> T:
            async with Scheduler(database_url, poll_interval=0.05) as scheduler:
                return await function(scheduler)

        return asyncio.run(on_it())

    return run


only_here = pytest.mark.parametrize("backend_name", ["sqlite"], indirect=True)


def names_of(kind: type) -> set[str]:
    return {field.name for field in fields(kind)}


def keys_of_job() -> set[str]:
    return names_of(Job) - {"existing"}


class TestOnEveryDatabase:
    def test_what_runs_what_waits_why_and_what_failed(self, cli: Command, here: Any) -> None:
        first = int(cli.good("enqueue", "extract", '{"day": 1}').out)
        second = int(cli.good("enqueue", "clean", "--depends-on", first, "--group", "acme").out)
        (newest, oldest) = cli.good("jobs", "--json").json
        assert (newest["id"], oldest["id"]) == (second, first)
        assert newest.keys() == keys_of_job()
        shown = cli.good("show", second)
        assert f"It depends on a job not done: job {first} ('extract'), ready." in shown.out
        assert "No worker is live" in shown.out
        assert any(line.startswith("depends on") for line in shown.lines)

        async def fail(scheduler: Scheduler) -> None:
            @scheduler.handler(max_attempts=1)
            async def extract(day: int) -> None:
                raise Fail(NASTY * day)

            await scheduler.drain()

        here(fail)
        failed = cli.good("jobs", "--state", "failed", "--json").json
        assert [job["id"] for job in failed] == [first]
        shown = cli.good("show", second, "--json").json
        assert [reason["why"] for reason in shown["explanation"]["reasons"]][:2] == [
            "cancelled", "cause",
        ]  # fmt: skip
        shown = cli.good("show", first, "--tracebacks")
        assert SHOWN.replace("\n", "") in shown.out.replace("\\n", "")
        assert not {"\x1b", "\x07", "\u202e"} & set(shown.out)
        assert cli.good("stats", "--json").json["kinds"][0] == {
            "queue": "default", "type": "clean", "jobs": {"cancelled": 1},
        }  # fmt: skip
        assert cli.good("retry", first).out == f"Job {first} is run again.\n"
        states = {job["id"]: job["state"] for job in cli.good("jobs", "--json").json}
        assert states[first] == "blocked"  # until a worker has looked around it
        text = cli.good("show", first).out
        assert "Whether it, or what is in it, may go on has not been looked at" in text
        assert cli.good("cancel", first).out == f"Job {first} is cancelled.\n"

    def test_graph(self, cli: Command, here: Any) -> None:
        async def fill(scheduler: Scheduler) -> int:
            async with scheduler.workflow("nightly [red]") as nightly:
                inner = nightly.container("clean")
                first = nightly.add(_spec("extract"))
                inner.add(_spec("wash"), depends_on=[first])
            return nightly.id

        top = here(fill)
        drawn = cli.good("graph", top).lines
        assert drawn[0].startswith(f"{top} nightly [red]/ ")
        assert any("clean/ " in line for line in drawn)
        assert any("wash blocked  after " in line for line in drawn)
        found = cli.good("graph", top, "--json").json
        assert (len(found["jobs"]), len(found["edges"]), found["cut"]) == (4, 1, False)
        assert cli.good("graph", top, "--as", "mermaid").out.startswith("flowchart LR\n")
        assert cli.good("graph", top, "--as", "dot").out.startswith("digraph jobs {")
        assert cli.good("graph", top, "--limit", 2).lines[-1].startswith("There are more")

    def test_workers_and_what_they_would_serve(self, cli: Command, here: Any) -> None:
        async def come(scheduler: Scheduler) -> str:
            own = scheduler.settings
            await scheduler._database.run(
                lambda c: appear(c, scheduler._database.backend, own, ["work"])
            )
            return own.worker_id

        assert cli.good("workers").out == "No worker is there.\n"
        worker_id = here(come)
        (worker,) = cli.good("workers", "--json").json
        assert worker.keys() == names_of(WorkerState)
        assert (worker["worker_id"], worker["live"], worker["types"]) == (worker_id, True, ["work"])
        assert f"{worker_id} " in cli.good("workers").lines[2]
        misspelt = cli.good("enqueue", "wrok").out.strip()
        text = cli.good("show", misspelt).out
        assert "None of the 1 live workers has a handler for 'wrok'." in text

    def test_pruned(self, cli: Command, here: Any) -> None:
        async def end(scheduler: Scheduler) -> None:
            scheduler.handler("work")(_nothing)
            for _ in range(3):
                await scheduler.enqueue("work")
            await scheduler.drain()

        here(end)
        assert cli.good("prune", "--older-than", "1d").out == "0 jobs are deleted.\n"
        said = cli.good("prune", "--older-than", "0s", "--state", "done", "--limit", 2)
        assert said.out == "2 jobs are deleted.\n"
        assert len(cli.good("jobs", "--json").json) == 1


def _spec(name: str) -> Any:
    from asyncjobq import JobSpec

    return JobSpec[Any](name, {})


async def _nothing() -> None: ...


@only_here
class TestJobs:
    def test_in_words(self, cli: Command) -> None:
        cli.good("enqueue", "resize", "--name", NASTY.strip(), "--group", "[red]g")
        lines = cli.good("jobs").lines
        assert lines[0].split() == [
            "Id", "Type", "State", "Queue", "Group", "Attempt", "Created", "Error",
        ]  # fmt: skip
        assert SHOWN in lines[2]
        assert "[red]g" in lines[2]

    def test_filters_and_pages(self, cli: Command) -> None:
        for queue in ("a", "b", "a", "b"):
            cli.good("enqueue", f"type {queue}", "--queue", queue)

        def ids(*options: object) -> list[int]:
            return [job["id"] for job in cli.good("jobs", "--json", *options).json]

        assert ids() == [4, 3, 2, 1]
        assert ids("--oldest") == [1, 2, 3, 4]
        assert ids("-n", 2) == [4, 3]
        assert ids("-n", 2, "--after", 3) == [2, 1]
        assert ids("--oldest", "--after", 3) == [4]
        assert ids("--queue", "a", "--type", "type a", "--state", "ready") == [3, 1]
        assert ids("--state", "done", "--state", "failed") == []
        assert cli.good("jobs", "--queue", "c").out == "There are none.\n"

    def test_nobody(self, cli: Command) -> None:
        for command in ("show", "graph"):
            said = cli(command, 12)
            assert said.code == 1
            assert said.err.startswith("Error: There is no job 12")


@only_here
class TestChanging:
    def test_some_refused(self, cli: Command) -> None:
        cli.good("enqueue", "work")
        said = cli("cancel", 1, 7)
        assert (said.code, said.out) == (1, "Job 1 is cancelled.\n")
        assert "no job 7" in said.err
        said = cli("cancel", 1)
        assert (said.code, said.err) == (1, "Job 1 had ended before.\n")
        cli.good("retry", 1)
        said = cli("retry", 1)
        assert (said.code, said.err.startswith("Error: Job 1 is blocked; only failed")) == (1, True)

    def test_all_that_match(self, cli: Command) -> None:
        for _ in range(3):
            cli.good("enqueue", "work", "--group", "acme")
        said = cli.good("cancel", "--group", "acme", "--yes")
        assert said.out == "3 are cancelled, 0 are asked to end.\n"
        assert cli.good("retry", "--type", "work", "-y").out == "0 are run again.\n"
        said = cli.good("retry", "--type", "work", "--state", "cancelled", "--yes")
        assert said.out == "3 are run again.\n"

    @pytest.mark.parametrize("answer", ["y\n", "n\n"])
    def test_asks_first(self, cli: Command, monkeypatch: pytest.MonkeyPatch, answer: str) -> None:
        cli.good("enqueue", "work")
        asked = cli("cancel", "--type", "work")
        assert (asked.code, "Say --yes" in asked.err) == (2, True)
        terminal = io.StringIO(answer)
        monkeypatch.setattr(terminal, "isatty", lambda: True)
        monkeypatch.setattr(sys, "stdin", terminal)
        said = cli("cancel", "--type", "work")
        assert "Cancel all jobs of type 'work'?" in said.out + said.err
        state = cli.good("jobs", "--json").json[0]["state"]
        assert (said.code, state) == ((0, "cancelled") if answer == "y\n" else (1, "ready"))

    def test_pause(self, cli: Command) -> None:
        assert cli.good("pause", "--queue", "media").out == "The queue 'media' is paused.\n"
        cli.good("pause", "--type", "work")
        stats = cli.good("stats", "--json").json
        assert [(one["queue"], one["type"]) for one in stats["paused"]] == [
            ("media", None), (None, "work"),
        ]  # fmt: skip
        assert "The queue 'media' is paused since " in cli.good("stats").out
        assert cli.good("resume", "--queue", "media").out == "The queue 'media' goes on.\n"
        said = cli("resume", "--queue", "media")
        assert (said.code, said.err) == (1, "The queue 'media' was not paused.\n")

    @pytest.mark.parametrize(
        "arguments",
        [
            "cancel", "retry", "cancel 1 --type work", "pause", "resume",
            "pause --queue a --type b",
            "prune --older-than soon", "prune --older-than 1d --state ready", "enqueue work 17",
            "enqueue work {", "enqueue work --arg x", "jobs --app shop:scheduler --url sqlite://",
        ],
    )  # fmt: skip
    def test_called_wrongly(self, cli: Command, arguments: str) -> None:
        said = cli(*arguments.split())
        assert said.code == 2
        assert said.err.startswith("Error: ")
        assert said.err.count("\n") == 1


def test_periods() -> None:
    assert [period(text) for text in ("90", "1.5s", "15m", "12h", "30d", "2w")] == [
        90, 1.5, 900, 43_200, 2_592_000, 1_209_600,
    ]  # fmt: skip
    for wrong in ("", "x", "-1d", "1y", "1 d"):
        with pytest.raises(UsageError):
            period(wrong)


@only_here
class TestEnqueue:
    def test_options(self, cli: Command, monkeypatch: pytest.MonkeyPatch) -> None:
        options = ["--queue", "q", "--name", "n", "--group", "g", "--priority", 5, "--delay", "1h"]
        options += ["--max-attempts", 2, "--timeout", "90s", "--unique-key", "u"]
        args = ["-a", "b=2", "-a", "c=text", "-a", 'd={"e": null}']
        job = cli.good("enqueue", "work", '{"a": 1}', *args, *options, "--json").json
        assert job["args"] == {"a": 1, "b": 2, "c": "text", "d": {"e": None}}
        names = ("queue", "name", "group_key", "priority", "state", "max_attempts", "timeout")
        assert [job[name] for name in names] == ["q", "n", "g", 5, "scheduled", 2, 90]
        monkeypatch.setattr(sys, "stdin", io.StringIO('{"z": 1}'))
        assert cli.good("enqueue", "work", "-", "--json").json["args"] == {"z": 1}

    def test_checked_by_the_handler(self, cli: Command) -> None:
        said = cli("enqueue", "render", '{"scnee": 1}', "--app", "shop:scheduler")
        assert (said.code, "scnee" in said.err) == (1, True)
        cli.good("enqueue", "render", '{"scene": 1}', "--app", "shop:scheduler")


@only_here
class TestApplication:
    def test_is_imported_only_if_it_is_named(self, cli: Command) -> None:
        cli.good("enqueue", "render", '{"scene": 1}')
        for command in ("jobs", "stats", "workers", "schedules", "limits"):
            cli.good(command)
        assert "Limits of 'render' itself could not be looked at" in cli.good("show", 1).out
        assert "shop" not in sys.modules
        text = cli.good("show", 1, "--app", "shop:scheduler").out
        assert "The limit 'gpu' has no room" in text
        assert "shop" in sys.modules

    def test_limits(self, cli: Command) -> None:
        cli.good("enqueue", "render", '{"scene": 1}')
        assert "name" not in cli.good("limits").out.split()[0]
        (limit,) = cli.good("limits", "--app", "shop:scheduler", "--json").json
        assert limit.keys() == names_of(LimitState)
        assert (limit["name"], limit["full"], limit["waiting"]) == ("gpu", True, 1)
        lines = cli.good("limits", "--app", "shop:scheduler", "--job", 1).lines
        assert lines[2].split()[0] == "gpu"

    def test_schedules(self, cli: Command, here: Any) -> None:
        async def add(scheduler: Scheduler) -> None:
            await scheduler.add_schedule("tidy", "work", every=90)
            await scheduler.add_schedule("greet", "work", cron="0 9 * * *")
            await scheduler.pause_schedule("greet")

        assert cli.good("schedules").out == "There are none.\n"
        here(add)
        lines = cli.good("schedules").lines
        assert "0 9 * * * UTC" in lines[2]
        assert "paused" in lines[2]
        assert "every 1 min 30 s" in lines[3]
        assert [one["name"] for one in cli.good("schedules", "--json").json] == ["greet", "tidy"]


@only_here
def test_the_keys_of_an_explanation(cli: Command) -> None:
    cli.good("enqueue", "work")
    shown = cli.good("show", 1, "--json").json
    assert shown.keys() == {"job", "explanation", "attempts", "neighbours"}
    assert shown["explanation"].keys() == names_of(Explanation) - {"job"}


@only_here
def test_follow(cli: Command, place: Place, database_url: str) -> None:
    cli.good("enqueue", "first")
    follow = (*COMMAND, "jobs", "--follow", "--interval", "0.05", "--json")
    with place.running(*follow, ASYNCJOBQ_URL=database_url) as program:
        program.wait_for_output('"first"')
        cli.good("enqueue", "second")
        program.wait_for_output('"second"')
        cli.good("cancel", 1)
        wait_for(lambda: '"cancelled"' in program.output, "the cancelled job")
        program.signal(signal.SIGINT)
        assert program.exit_code() == 0, program.output
        program.check_output()
        lines = [json.loads(line) for line in program.output.splitlines()]
    assert [(job["id"], job["state"]) for job in lines] == [
        (1, "ready"), (2, "ready"), (1, "cancelled"),
    ]  # fmt: skip
