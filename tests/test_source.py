"""What the source must not do, whatever a database holds: import, evaluate, write SQL by hand."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import asyncjobq

ROOT: Final = Path(asyncjobq.__file__).parent

IMPORTING: Final = {
    "addresses.py": "the handlers of this worker's registry, for a process of their own",
    "cli/loading.py": "the application that a person has typed",
    "cli/demo.py": "the example that comes with the package",
}
"""The files that import by name, and what."""

NAMES_IN_SQL: Final = {
    "state",  # of an enumeration
    "UniqueWhile.WAITING",
    "values",
    "name",  # of a column or an index
    "column",
    "condition",
    "before",  # of a setting, as the server told it
    "query",
    "statement",
    "begin",
    "hint",
    "spelled",
    "by_key",
    "self._ready_index",
    "_READY.format(jobs.name)",
    "lease_ttl",
}
"""What SQL is put together from that is no constant: none of it comes from a row or a caller."""


def sources() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(ROOT.rglob("*.py")):
        yield path.relative_to(ROOT).as_posix(), ast.parse(path.read_text())


def calls() -> Iterator[tuple[str, str, ast.Call]]:
    for file, tree in sources():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                yield file, ast.unparse(node.func), node


def test_nothing_is_evaluated() -> None:
    forbidden = {"eval", "exec", "compile", "__import__", "os.system", "os.popen"}
    assert {(file, name) for file, name, _ in calls() if name in forbidden} == set()


def test_nothing_is_unpickled() -> None:
    forbidden = {"pickle", "cPickle", "dill", "marshal", "shelve", "jsonpickle", "yaml"}
    found = set()
    for file, tree in sources():
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                found |= {(file, alias.name.partition(".")[0]) for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found.add((file, node.module.partition(".")[0]))
    assert {(file, name) for file, name in found if name in forbidden} == set()


def test_only_what_a_person_named_is_imported_by_name() -> None:
    by_name = ("import_module", "spec_from_file_location", "exec_module")
    found = {file for file, name, _ in calls() if name.rpartition(".")[2] in by_name}
    assert found == set(IMPORTING)


def test_no_value_is_written_into_a_statement() -> None:
    by_hand = {"text", "literal_column", "exec_driver_sql", "prefix_with", "with_hint"}
    unknown = set()
    for file, name, call in calls():
        if name.rpartition(".")[2] in by_hand:
            for argument in call.args:
                unknown |= {(file, part) for part in parts(argument) if part not in NAMES_IN_SQL}
    assert {item for item in unknown if not is_table(item[1])} == set()


def parts(argument: ast.expr) -> Iterator[str]:
    """Yield what an argument is made of besides constants."""
    if isinstance(argument, ast.JoinedStr):
        for value in argument.values:
            if isinstance(value, ast.FormattedValue):
                yield ast.unparse(value.value)
    elif not isinstance(argument, ast.Constant):
        yield ast.unparse(argument)


def is_table(part: str) -> bool:
    """Tell whether this is a table, a column or a type of the models."""
    return (
        "tables." in part
        or part in {"jobs", "head", "of", "type_", "Key(16)"}
        or (part.startswith(("Key(", "JsonTable(")))
    )
