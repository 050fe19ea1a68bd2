"""The import of a long file whose worker is killed half way: every row is there, once.

At full length on every database; otherwise on two, for each run takes several interpreters.
"""

from __future__ import annotations

import os
import re

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import create_async_engine

from examples.programs import EXAMPLES, Place

EXAMPLE = EXAMPLES / "import_file.py"
FULL = bool(os.environ.get("ASYNCJOBQ_TEST_FULL"))
DATABASES = ("sqlite", "postgresql", "mysql", "mariadb") if FULL else ("sqlite", "postgresql")


@pytest.mark.parametrize("backend_name", DATABASES, indirect=True)
async def test_a_killed_import_goes_on_and_writes_each_row_once(
    place: Place, database_url: str
) -> None:
    ran = place.run(str(EXAMPLE), database_url, within=90.0)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stderr == "Job 1 was reclaimed: its lease had run out.\n"
    rows, number, different = figures(
        r"The file has (\S+) rows, the table (\S+), of which (\S+) differ", ran.stdout
    )
    assert rows == number == different > 9_000
    assert "Imports listed: 1." in ran.stdout
    (begun,) = figures(r"Attempt 1 begins at row (\S+)\.", ran.stdout)
    (resumed,) = figures(r"Attempt 2 begins at row (\S+)\.", ran.stdout)
    (killed,) = figures(r"Killed behind row (\S+) or later", ran.stdout)
    assert begun == 0
    assert rows / 2 <= killed <= resumed < rows
    assert figures(r"Done in attempt (\d): (\S+) rows", ran.stdout) == [2, rows]
    assert await stored(database_url) == (number, number, 1)


def figures(pattern: str, printed: str) -> list[int]:
    """Return the figures in the one line that says this."""
    found = re.findall(pattern, printed)
    assert len(found) == 1, printed
    groups = found[0] if isinstance(found[0], tuple) else (found[0],)
    return [int(figure.replace(",", "")) for figure in groups]


async def stored(url: str) -> tuple[int, ...]:
    """Return the number of rows, of different rows and of listed imports."""
    engine = create_async_engine(url)
    async with engine.connect() as connection:
        rows = await connection.execute(
            text(
                "SELECT count(*), count(DISTINCT code), (SELECT count(*) FROM imports) "
                "FROM characters"
            )
        )
        found = tuple(rows.one())
    await engine.dispose()
    return found
