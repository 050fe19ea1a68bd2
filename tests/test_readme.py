"""Every snippet of the README runs, in order and in one namespace, as a reader would try them."""

import ast
import asyncio
import inspect
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from aiohttp.test_utils import TestClient, TestServer

from examples.commanding import Command

pytest_plugins = ["pytester"]

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
QUICKSTART = (ROOT / "examples" / "quickstart.py").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
TEXTS = [text for language, text in BLOCKS if language == "text"]
COMMANDS = next(text for language, text in BLOCKS if language == "sh" and "jobs --state" in text)
SNIPPETS = [text for language, text in BLOCKS if language == "python"]


async def run(snippet: str, namespace: dict[str, Any]) -> None:
    """Execute a snippet in which `await` may stand at the top level."""
    code = compile(snippet, "README.md", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    result = eval(code, namespace)  # noqa: S307  our own README
    if inspect.isawaitable(result):
        await result


def run_commands(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the lines of the command line's snippet, as a shell would."""
    said: dict[str, str] = {}
    for line in COMMANDS.splitlines():
        name, *arguments = shlex.split(line, comments=True)
        if name == "export":
            monkeypatch.setenv(*arguments[0].split("=", 1))
        else:
            said[arguments[0]] = command.good(*arguments).out
    assert "transcode" in said["stats"]
    assert "Fail: there is no video" in said["show"]
    assert said["retry"] == "Job 4 is run again.\n"
    assert said["prune"] == "0 jobs are deleted.\n"


def test_quickstart_is_the_example_and_prints_what_it_says(tmp_path: Path) -> None:
    assert SNIPPETS[0] == QUICKSTART
    assert len(QUICKSTART.splitlines()) < 30
    printed = subprocess.run(
        [sys.executable, "-W", "error", "-c", SNIPPETS[0]],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert (printed.stdout, printed.stderr) == (TEXTS[0], "")


async def test_handlers_and_transactions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {}
    handlers, graphs, control, recurring, limits, why = SNIPPETS[1:7]
    transaction, unique, long_jobs, hooks = SNIPPETS[7:11]
    await run(handlers, namespace)
    assert "{'width': 640} done" in capsys.readouterr().out
    media = namespace["scheduler"]
    await run(graphs, namespace)
    printed = capsys.readouterr().out
    drawing = next(text for language, text in BLOCKS if language == "mermaid")
    assert printed.startswith("published {'done': 8}\n")
    without_colors = [line for line in printed.splitlines()[1:] if "style" not in line]
    assert without_colors[: len(drawing.splitlines())] == drawing.splitlines()
    await namespace["nights"].aclose()
    await run(control, {**namespace, "scheduler": media})
    printed = capsys.readouterr().out
    assert "type='transcode'" in printed
    assert "1 failed Fail there is no video" in printed
    states = ["done", "done", "cancelled", "failed"]
    assert [job.state for job in await media.find()] == states
    await run(recurring, namespace)
    assert capsys.readouterr().out.startswith("greet Bo ")
    await namespace["nights"].aclose()
    await run(limits, namespace)
    printed = capsys.readouterr().out.splitlines()
    assert "tokens acme 4 1000000 0" in [line.replace(".0", "") for line in printed]
    await run(why, {**namespace, "asyncio": asyncio})
    printed = capsys.readouterr().out
    assert "No worker is live" in printed
    assert printed.endswith(TEXTS[1])
    await run(transaction, namespace)
    states += ["ready", "ready", "cancelled"]
    assert [job.state for job in await media.find()] == states
    await media.aclose()
    await asyncio.to_thread(run_commands, Command(monkeypatch, capsys), monkeypatch)
    await run(unique, namespace)
    assert "{'product': 2, 'price': 5}" in capsys.readouterr().out
    await run(long_jobs, namespace)
    lines = capsys.readouterr().out.splitlines()
    assert sorted(lines[:2])[1].startswith("done {'done': 3, 'total': 3, 'message': 'rows'} rows=3")
    assert lines[2] == "rows=3"
    await run(hooks, namespace)
    printed = capsys.readouterr().out
    assert sorted(printed.splitlines()) == [
        "Failed look_up 1",
        "Succeeded look_up 1",
        "look_up took 0 s, for request 7",
        "look_up took 0 s, for request 7",
    ]
    await namespace["shop"].aclose()


async def test_web_frameworks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {}
    fastapi, aiohttp = SNIPPETS[11:13]
    await run(fastapi, namespace)
    app, scheduler = namespace["app"], namespace["scheduler"]
    transport = httpx.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://test") as client,
    ):
        job_id = (await client.post("/greetings", params={"name": "Ada"})).json()
        await scheduler.wait(job_id, timeout=10)
        answer = (await client.get(f"/greetings/{job_id}")).json()
        missing = await client.get("/greetings/815")
    assert answer == {"state": "done", "greeting": "Hello Ada"}
    assert (missing.status_code, "no job 815" in missing.text) == (404, True)

    await run(aiohttp, namespace)
    async with TestClient(TestServer(namespace["app"])) as browser:
        response = await browser.post("/greetings", params={"name": "Bo"})
        assert await scheduler.wait(await response.json(), timeout=10) == "Hello Bo"
    await scheduler.aclose()


def test_testing(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{pytester.path}")
    conftest, tests = SNIPPETS[13:15]
    media, _, _ = SNIPPETS[1].partition("await scheduler.create_schema()")
    pytester.makepyfile(conftest=conftest, test_media=tests, media=media)
    plugins = ("-p", "_asyncjobq_pytest", "-p", "pytest_asyncio.plugin", "-o", "asyncio_mode=auto")
    loops = ("-o", "asyncio_default_fixture_loop_scope=function", "-p", "no:cacheprovider")
    pytester.runpytest_subprocess("-Werror", *plugins, *loops).assert_outcomes(passed=4)


def test_the_servers_to_try_it_out_on_are_among_those_tested() -> None:
    compose = (ROOT / "docker-compose.yml").read_text()
    (tested,) = re.findall(r"^Tested: (.*?);", README, re.MULTILINE)
    names = {"postgres": "PostgreSQL", "mysql": "MySQL", "mariadb": "MariaDB"}
    images = re.findall(r"image: (\w+):([\d.]+)", compose)
    assert [name for name, _ in images] == list(names)
    for name, version in images:
        (versions,) = re.findall(rf"{names[name]} ([\d. and]+)", tested)
        assert version in versions.split(" and ")


def test_all_snippets_are_run() -> None:
    assert len(SNIPPETS) == 15
