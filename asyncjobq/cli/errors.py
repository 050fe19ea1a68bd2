"""What ends a command without a traceback, and with which exit code.

0: it did what it was told. 1: it could not, because what was named is not there, or was refused, or
the database is away. 2: it was called wrongly, or the settings or the tables are wrong.
"""

from __future__ import annotations

from typing import Final

REFUSED: Final = 1
WRONG_CALL: Final = 2


class CommandError(Exception):
    """The command cannot go on; its message is all that the user needs to know."""

    exit_code = REFUSED


class UsageError(CommandError):
    """The command was called wrongly."""

    exit_code = WRONG_CALL
