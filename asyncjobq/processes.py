"""Processes for handlers that compute, or that may not return: they can be killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from asyncio import IncompleteReadError, StreamReader, StreamWriter
from asyncio.subprocess import DEVNULL, Process
from contextlib import suppress
from dataclasses import asdict
from struct import Struct
from typing import Any, Final, Self

from asyncjobq import codec
from asyncjobq.addresses import address_of
from asyncjobq.errors import HandlerProcessError
from asyncjobq.handlers import AnyHandler
from asyncjobq.process_errors import error_of

LENGTH: Final = Struct("!Q")
ENDING: Final = 5.0
"""Seconds for a process that is not needed any more to end by itself."""
_START: Final = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from asyncjobq.process_program import main; main(int(sys.argv[2]))"
)


class HandlerProcess:
    """One process, which runs one handler at a time."""

    def __init__(self, process: Process, reader: StreamReader, writer: StreamWriter) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer
        self.begun = False
        """Whether its handler was called."""

    @classmethod
    async def start(cls) -> Self:
        """Start a process that waits for calls; it ends with this one, however that ends."""
        ours, theirs = socket.socketpair()
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", _START, json.dumps(sys.path), str(theirs.fileno())),
                stdin=DEVNULL,
                pass_fds=[theirs.fileno()],
            )
            reader, writer = await asyncio.open_connection(sock=ours)
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        return cls(process, reader, writer)

    @property
    def lives(self) -> bool:
        """Whether the process can be called, as far as is known."""
        return self._process.returncode is None and not self._reader.at_eof()

    async def call(self, values: dict[str, Any]) -> dict[str, Any]:
        """Have a handler called and return the answer; raises HandlerProcessError if it dies."""
        self.begun = False
        text = json.dumps(values).encode()
        try:
            self._writer.write(LENGTH.pack(len(text)) + text)
            await self._writer.drain()
            await self._read()
            self.begun = True
            return await self._read()
        except (IncompleteReadError, ConnectionError, ValueError) as error:
            how = await self._how_it_ended()
            self._writer.close()
            raise HandlerProcessError(how) from error

    async def _read(self) -> dict[str, Any]:
        (length,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
        values: dict[str, Any] = json.loads(await self._reader.readexactly(length))
        return values

    async def _how_it_ended(self) -> str:
        """Return what became of a process that has closed its side, once it is no more."""
        try:
            async with asyncio.timeout(1.0):
                code = await self._process.wait()
        except TimeoutError:
            await self.kill()
            return "closed its connection to the worker, and was killed"
        if code < 0:
            return f"was killed by {_signal_name(-code)}"
        return f"ended with exit code {code}"

    async def kill(self) -> None:
        """Kill the process with all that it has started, and wait until it is gone."""
        if self._process.returncode is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            with suppress(ProcessLookupError):  # it had not made its own group yet
                self._process.kill()
        self._writer.close()
        await self._process.wait()

    async def end(self) -> None:
        """Let the process end, which does nothing now."""
        self._writer.close()
        try:
            async with asyncio.timeout(ENDING):
                await self._process.wait()
        except TimeoutError:
            await self.kill()


class HandlerProcesses:
    """The processes of one worker: as many as run at once, kept for the next job."""

    def __init__(self) -> None:
        self._idle: list[HandlerProcess] = []
        self._at_work: set[HandlerProcess] = set()

    async def run(self, handler: AnyHandler, args: str, most: int) -> Any:
        """Call a handler with stored arguments; return what it returned, as JSON values.

        Raises what it raised, or HandlerProcessError. A cancelled call kills the process.
        """
        address = asdict(address_of(handler.function, handler.type))
        call = {"address": address, "type": handler.type, "args": args, "most": most}
        while (answer := await self._answer(call)) is None:
            pass
        if "error" in answer:
            raise error_of(answer["error"])
        return codec.decode(answer["result"])

    async def _answer(self, call: dict[str, Any]) -> dict[str, Any] | None:
        """Return the answer; None if a process that was kept has died before it took the call."""
        kept = self._kept()
        process = kept or await HandlerProcess.start()
        self._at_work.add(process)
        try:
            answer = await process.call(call)
        except HandlerProcessError:
            if kept is None or process.begun:
                raise
            return None
        except BaseException:
            await process.kill()
            raise
        finally:
            self._at_work.discard(process)
        self._idle.append(process)
        return answer

    def _kept(self) -> HandlerProcess | None:
        while self._idle:
            process = self._idle.pop()
            if process.lives:
                return process
        return None

    async def aclose(self) -> None:
        """End the processes; kill those whose jobs were given up."""
        idle, self._idle = self._idle, []
        killed = (process.kill() for process in self._at_work)
        await asyncio.gather(*killed, *(process.end() for process in idle))


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
