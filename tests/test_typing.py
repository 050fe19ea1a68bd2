"""The types that users meet, as mypy sees them; CI also runs `pyright tests/typing`."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("path", sorted(ROOT.glob("tests/typing/*.py")), ids=lambda path: path.stem)
def test_types_that_users_meet(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mypy = pytest.importorskip("mypy.api", reason="mypy comes with the extra dev")
    monkeypatch.chdir(ROOT)
    report, problems, status = mypy.run(["--strict", "--follow-imports=silent", str(path)])
    assert status == 0, report + problems
