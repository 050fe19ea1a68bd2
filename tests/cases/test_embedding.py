"""A scheduler that is made at import, as web applications do, meets several event loops.

Each time it must work on the loop that runs, keep nothing of the one before, leave the program's
signal handlers alone, and let the process exit by itself, also if nobody closed it.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
EXIT_WITHIN = 5.0
BAD_SIGNS = (
    "Warning",
    "Traceback",
    "different loop",
    "loop is closed",
    "never awaited",
    "never retrieved",
    "Task was destroyed",
)


async def test_three_event_loops_in_one_process(prepared_url: str) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-X", "dev", "-W", "error", "-m", "cases.embedding_program"),
        prepared_url,
        env={**os.environ, "PYTHONPATH": str(TESTS)},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(30):
            told = await process.stdout.readline()
        async with asyncio.timeout(EXIT_WITHIN):
            _, errors = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()
    text = errors.decode()
    assert (told, process.returncode) == (b"done\n", 0), text
    assert [sign for sign in BAD_SIGNS if sign in text] == [], text
