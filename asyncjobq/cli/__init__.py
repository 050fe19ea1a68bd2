"""The command line: `asyncjobq worker`, `init`, `doctor` and `demo`."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line; its packages are an extra, so they are imported only here."""
    try:
        from asyncjobq.cli.commands import run  # noqa: PLC0415
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in ("rich", "typer"):
            raise
        sys.exit(f"The command line needs {missing}: pip install 'asyncjobq[cli]'")
    run()
