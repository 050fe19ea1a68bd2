"""The quickstart does what its output in the README says, and is short."""

from __future__ import annotations

from examples.programs import EXAMPLES, Place

QUICKSTART = EXAMPLES / "quickstart.py"


def test_quickstart(place: Place) -> None:
    ran = place.run(str(QUICKSTART))
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "Ada owes 62 euros.\n", "")
    assert [path.name for path in place.left_behind] == ["quickstart.db"]


def test_quickstart_is_short() -> None:
    assert len(QUICKSTART.read_text().splitlines()) < 30
