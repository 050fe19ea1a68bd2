"""What ends a command without a traceback."""

from __future__ import annotations


class CommandError(Exception):
    """The command cannot go on; its message is all that the user needs to know."""

    exit_code = 1


class UsageError(CommandError):
    """The command was called wrongly."""

    exit_code = 2
