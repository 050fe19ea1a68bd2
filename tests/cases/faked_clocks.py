"""Clocks of single processes that are wrong, by libfaketime (Debian's package `faketime`)."""

from __future__ import annotations

from pathlib import Path

import pytest

from backend_report import CAPABILITY_SKIP

_FOLDERS = (
    "usr/lib/*/faketime",
    "usr/lib/faketime",
    "usr/lib64/faketime",
    "usr/local/lib/faketime",
)


def faked_clock(offset: str | Path) -> dict[str, str]:
    """Return the environment of a process whose wall clock is off, e.g. by `+600s`.

    Given a file, the offset is what the file says at the time. The monotonic clock stays right,
    as it does when a machine's clock is set.
    """
    how = "FAKETIME_TIMESTAMP_FILE" if isinstance(offset, Path) else "FAKETIME"
    return {
        "LD_PRELOAD": str(_libraries()[0]),
        how: str(offset),
        "FAKETIME_NO_CACHE": "1",
        # With that workaround for an old C library, Python's threads wait for each other too long.
        "FAKETIME_FORCE_MONOTONIC_FIX": "0",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "DONT_FAKE_MONOTONIC": "1",
    }


def clocks_can_be_faked() -> bool:
    """Tell whether libfaketime is installed."""
    return bool(_libraries())


def require_faked_clocks(request: pytest.FixtureRequest) -> None:
    """Skip the test where libfaketime is not installed."""
    if not clocks_can_be_faked():
        request.node.stash[CAPABILITY_SKIP] = True
        pytest.skip("libfaketime is not installed (Debian: apt-get install faketime)")


def _libraries() -> list[Path]:
    return [path for folder in _FOLDERS for path in Path("/").glob(f"{folder}/libfaketimeMT.so.1")]
