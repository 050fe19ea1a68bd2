"""A place for programs to run in."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.programs import Place


@pytest.fixture
def place(tmp_path: Path) -> Place:
    """Give an empty home, current directory and folder for temporary files."""
    return Place(tmp_path)
