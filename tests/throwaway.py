"""Run database servers that end, and leave nothing behind, when the test session ends."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Final

from sqlalchemy import URL

START_SECONDS: Final = 60.0
STOP_SECONDS: Final = 30.0

_MEMORY_FOLDER: Final = Path("/dev/shm")  # noqa: S108
_MEMORY_NEEDED: Final = 4 * 1024**3

# The shell outlives a test run that is killed: its standard input is a pipe from the test
# run, and when that closes, for whatever reason, it stops the server and removes the data.
# While there is a file "again", a server that ends is started anew, once "down" is gone.
_KEEPER: Final = """
signal=$1 folder=$2
shift 2
exec 3<&0
{
    cat <&3 >/dev/null
    rm -f "$folder/again" "$folder/down"
    while kill -s "$signal" "$(cat "$folder/server")"; do sleep 1; done
} 2>/dev/null &
watcher=$!
while true; do
    "$@" 3<&- </dev/null &
    echo "$!" >"$folder/server.new"
    mv "$folder/server.new" "$folder/server"
    wait "$!"
    [ -e "$folder/again" ] || break
    while [ -e "$folder/down" ]; do sleep 0.05; done
done
exec 3<&-
kill "$watcher" 2>/dev/null
rm -rf -- "$folder"
"""


class MissingServerError(Exception):
    """There is no such server here; the message says what was looked for."""


@dataclass(frozen=True)
class Account:
    """The system user that runs a server; None is the one that runs the tests."""

    user: int | None = None
    group: int | None = None

    @property
    def extra_groups(self) -> list[int] | None:
        """Return the further groups to run with: none of root's."""
        return None if self.user is None else []

    def run(self, command: Sequence[str | Path], folder: Path) -> None:
        """Run a command to its end, for preparing a server."""
        try:
            subprocess.run(
                command,
                check=True,
                user=self.user,
                group=self.group,
                extra_groups=self.extra_groups,
                cwd=folder,
                env=_environment(folder),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        except subprocess.CalledProcessError as error:
            raise MissingServerError(f"{command[0]} failed: {_tail(error.stdout)}") from error
        except OSError as error:
            raise MissingServerError(f"{command[0]} cannot be run: {error}") from error

    def make_folder(self, parent: Path) -> Path:
        """Make a folder that only this account can read."""
        folder = Path(tempfile.mkdtemp(prefix="asyncjobq-server-", dir=parent))
        self.own(folder)
        return folder

    def own(self, path: Path) -> None:
        """Hand a file or folder to this account."""
        if self.user is not None and self.group is not None:
            os.chown(path, self.user, self.group, follow_symlinks=False)

    def own_all(self, folder: Path) -> None:
        """Hand a folder and everything in it to this account."""
        self.own(folder)
        for path in folder.rglob("*"):
            self.own(path)


def server_account(preferred: str) -> Account:
    """Return who runs a server: PostgreSQL and MySQL refuse to run as root."""
    if os.geteuid() != 0:
        return Account()
    import pwd

    for name in (preferred, "nobody"):
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            continue
        return Account(entry.pw_uid, entry.pw_gid)
    raise MissingServerError(f"root needs a user {preferred} or nobody to run a server as")


@dataclass
class ServerProcess:
    """A server that was started, with the shell that keeps it."""

    program: Path
    url: URL
    folder: Path
    process: subprocess.Popen[bytes]
    output: IO[bytes] = field(repr=False)

    def waiting(self) -> Iterator[None]:
        """Yield while the server may still be starting; MissingServerError if it ended."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise MissingServerError(f"{self.program} ended at once: {self.log()}")
            yield
            time.sleep(0.02)

    def restart(self, number: signal.Signals, down: float) -> None:
        """End the server with a signal, and start it again after some seconds; blocks so long."""
        again, away = self.folder / "again", self.folder / "down"
        before = self._server_id()
        for mark in (again, away):
            mark.touch()
        os.kill(before, number)
        time.sleep(down)
        away.unlink()
        for _ in self.waiting():
            if self._server_id() != before:
                break
        again.unlink()

    def _server_id(self) -> int:
        return int((self.folder / "server").read_text())

    def log(self) -> str:
        """Return the last lines that the server wrote."""
        self.output.seek(0)
        return _tail(self.output.read().decode(errors="replace"))

    def stop(self) -> None:
        """End the server and remove its data."""
        if self.process.stdin is not None:
            self.process.stdin.close()
        try:
            self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(STOP_SECONDS)
        self.output.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def start_process(
    command: Sequence[str | Path], url: URL, folder: Path, account: Account, stop_signal: str
) -> ServerProcess:
    """Start a server under a keeper that ends it with the signal; its data is in the folder."""
    output = tempfile.TemporaryFile()  # noqa: SIM115
    process = subprocess.Popen(
        ["/bin/sh", "-c", _KEEPER, "keeper", stop_signal, folder, *command],
        user=account.user,
        group=account.group,
        extra_groups=account.extra_groups,
        cwd="/",
        env=_environment(folder),
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # Ctrl-C is for the tests, which then stop their servers
    )
    return ServerProcess(Path(command[0]), url, folder, process, output)


def data_parent() -> Path:
    """Return where data goes: to memory if there is plenty, where databases are made faster."""
    if _MEMORY_FOLDER.is_dir() and os.access(_MEMORY_FOLDER, os.W_OK | os.X_OK):
        space = os.statvfs(_MEMORY_FOLDER)
        if space.f_bavail * space.f_frsize > _MEMORY_NEEDED:
            return _MEMORY_FOLDER
    return Path(tempfile.gettempdir())


def free_port() -> int:
    """Return a loopback port that nobody listens on at this moment."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def _environment(folder: Path) -> dict[str, str]:
    path = os.environ.get("PATH", os.defpath) + os.pathsep + "/usr/sbin"
    return {"PATH": path, "LC_ALL": "C", "HOME": str(folder), "TMPDIR": str(folder)}


def _tail(output: str) -> str:
    return " / ".join(output.strip().splitlines()[-5:]) or "no output"
