"""Where a function is, such that another process finds it: by its module and its name there."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from asyncjobq.errors import HandlerError

PROGRAM: Final = "__asyncjobq_program__"
"""What the file of the main program is called where it is loaded for its functions alone."""


@dataclass(frozen=True)
class Address:
    """A module's name, or the file of a program that has none, and a function's name in it."""

    module: str
    name: str
    file: str | None = None


def address_of(function: Callable[..., Any], type_name: str) -> Address:
    """Return where a handler is; raises HandlerError if no other process can find it there."""
    refused = f"Handler {type_name!r} cannot run in a process of its own: "
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    owner = getattr(function, "__self__", None)
    if not module or not name or not (owner is None or inspect.isclass(owner)):
        raise HandlerError(f"{refused}{function!r} is not found by name; give a plain `def`.")
    if "<" in name:  # of a lambda, or within another function
        raise HandlerError(f"{refused}{name} is not at the top level of its module. Move it there.")
    if module != "__main__":
        return Address(module, name)
    program = sys.modules["__main__"]
    spec, file = getattr(program, "__spec__", None), getattr(program, "__file__", None)
    if spec is not None:
        return Address(spec.name, name)
    if file is None or not Path(file).exists():
        raise HandlerError(f"{refused}it was typed in. Put it into a file, and import that.")
    return Address(PROGRAM, name, str(Path(file).absolute()))


def found_at(address: Address) -> Any:
    """Import and return what is at an address; a program's own file is run under another name.

    Raises LookupError if it is not there.
    """
    try:
        start = _program(address.file) if address.file else import_module(address.module)
        return reduce(getattr, address.name.split("."), start)
    except (ImportError, AttributeError) as error:
        place = address.file or address.module
        raise LookupError(f"{address.name} is not found in {place}: {error}") from error


def _program(file: str) -> Any:
    if PROGRAM not in sys.modules:
        spec = importlib.util.spec_from_file_location(PROGRAM, file)
        if spec is None or spec.loader is None:
            raise ImportError(f"{file} is no Python file")
        sys.modules[PROGRAM] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[PROGRAM])
    return sys.modules[PROGRAM]
