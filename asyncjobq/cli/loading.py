"""Finding the scheduler that a command line names as MODULE:OBJECT."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from asyncjobq.cli.errors import UsageError
from asyncjobq.handlers import Handler
from asyncjobq.scheduler import Scheduler


def scheduler_of(
    target: str | None, url: str | None, schema: str | None, table_prefix: str, folder: Path
) -> Scheduler:
    """Return the scheduler that a command names by MODULE:OBJECT, or on a URL; raises UsageError.

    Without either, the environment's ASYNCJOBQ_URL is meant.
    """
    if target is not None:
        if url or schema or table_prefix:
            raise UsageError(
                "--url, --schema and --table-prefix are the scheduler's own; leave them out"
            )
        return load_scheduler(target, folder)
    url = url or os.environ.get("ASYNCJOBQ_URL")
    if not url:
        raise UsageError("Which database? Name MODULE:OBJECT, --url, or set ASYNCJOBQ_URL")
    return Scheduler(url, schema=schema, table_prefix=table_prefix)


def load_scheduler(target: str, folder: Path) -> Scheduler:
    """Return what MODULE:OBJECT names: a Scheduler, or what a function without arguments makes.

    The module is looked for in `folder` first. Raises UsageError.
    """
    module_name, _, path = target.partition(":")
    if not module_name or not path:
        raise UsageError(
            f"{target!r} names no scheduler: write the module, a colon and the scheduler's name "
            "in it, e.g. myapp.jobs:scheduler"
        )
    found = _attribute(import_module(module_name, folder), path, target)
    made = found() if callable(found) and not isinstance(found, Handler) else found
    if not isinstance(made, Scheduler):
        raise UsageError(_not_a_scheduler(target, found, made))
    return made


def import_module(name: str, folder: Path) -> ModuleType:
    """Import a module, from `folder` if it is there; raises UsageError."""
    sys.path.insert(0, str(folder.resolve()))
    try:
        return importlib.import_module(name)
    except ImportError as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and f"{name}.".startswith(f"{missing}."):
            raise UsageError(_no_module(name, missing, folder)) from None
        place = traceback.extract_tb(error.__traceback__)[-1]
        raise UsageError(
            f"{name!r} was found, but importing it failed in {place.filename}, line "
            f"{place.lineno}: {error}"
        ) from error


def _no_module(name: str, missing: str, folder: Path) -> str:
    if name.endswith(".py"):
        module = ".".join(Path(name).with_suffix("").parts)
        return f"{name!r} is a file; write the module's name, {module!r}"
    return (
        f"There is no module {missing!r}, neither in {folder.resolve()} nor installed; "
        "--app-dir says where to look"
    )


def _attribute(module: ModuleType, path: str, target: str) -> Any:
    found: Any = module
    for name in path.split("."):
        if not hasattr(found, name):
            raise UsageError(f"{target!r}: {module.__name__!r} has no {path!r}")
        found = getattr(found, name)
    return found


def _not_a_scheduler(target: str, found: Any, made: Any) -> str:
    if inspect.iscoroutine(made):
        made.close()
        return f"{target!r} is an async def; make it a def that returns a Scheduler"
    what = "is" if made is found else "returns"
    return f"{target!r} {what} {made!r}, which is not a Scheduler"
