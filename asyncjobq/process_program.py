"""The program of a handler's process: takes calls from its worker, one at a time.

Its only tie to the worker is a socket. When that is closed, the worker has no more work or is
dead, and the process ends: at once, with all that it has started, if a handler is at work.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import struct
import sys
import threading
from contextlib import suppress
from queue import SimpleQueue
from time import sleep
from typing import Any, Final

from asyncjobq import codec
from asyncjobq.addresses import Address, found_at
from asyncjobq.ends import Fail
from asyncjobq.handler_options import HandlerOptions
from asyncjobq.handlers import AnyHandler, Handler
from asyncjobq.process_errors import values_of

LENGTH: Final = struct.Struct("!Q")
ENDING: Final = 5.0
"""Seconds for a process that is not needed any more to end by itself."""
_DEATH_OF_PARENT: Final = 1  # PR_SET_PDEATHSIG


class Program:
    """One process's work."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._calls: SimpleQueue[dict[str, Any] | None] = SimpleQueue()
        self._at_work = False

    def run(self) -> None:
        """Answer calls until there are no more."""
        threading.Thread(target=self._read, name="asyncjobq calls", daemon=True).start()
        while (call := self._calls.get()) is not None:
            self._send({"begun": True})
            answer = answer_to(call)
            for stream in (sys.stdout, sys.stderr):
                with suppress(Exception):  # the handler may have closed it
                    stream.flush()
            self._at_work = False
            self._send(answer)

    def _read(self) -> None:
        stream = self._connection.makefile("rb")
        with suppress(OSError):
            while header := stream.read(LENGTH.size):
                call = json.loads(stream.read(*LENGTH.unpack(header)))
                self._at_work = True
                self._calls.put(call)
        self._calls.put(None)
        if not self._at_work:
            sleep(ENDING)  # unless what handlers left behind holds it up
        os.killpg(os.getpgrp(), signal.SIGKILL)

    def _send(self, values: dict[str, Any]) -> None:
        text = json.dumps(values).encode()
        try:
            self._connection.sendall(LENGTH.pack(len(text)) + text)
        except OSError:  # the worker is gone, or the handler has closed what it does not own
            os._exit(1)


def answer_to(call: dict[str, Any]) -> dict[str, Any]:
    """Call a handler; return its result as JSON text, or its error."""
    try:
        handler = _handler(call)
        value = handler.function(**handler.decode(codec.decode(call["args"])))
    except BaseException as error:  # SystemExit too: it ends the job, not the process
        return {"error": values_of(error)}
    try:
        result = codec.encode(handler.encode_result(value))
        codec.check_size(result, call["most"])
    except Exception as error:
        told = f"The handler succeeded, but its result cannot be stored: {error}"
        return {"error": values_of(Fail(told))}
    return {"result": result}


def _handler(call: dict[str, Any]) -> AnyHandler:
    try:
        found = found_at(Address(**call["address"]))
    except LookupError as error:
        raise Fail(str(error)) from error
    if isinstance(found, Handler):
        return found
    return Handler(found, call["type"], HandlerOptions())


def main(number: int) -> None:
    """Serve the worker at the other end of a socket, which this process has inherited."""
    os.set_inheritable(number, False)
    os.setpgid(0, 0)  # apart from what a terminal sends to all, and to be killed as a whole
    for ending in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ending, lambda *_: None)  # the worker decides what becomes of its jobs
    with suppress(OSError, AttributeError):  # there is no such call outside of Linux
        _die_with_the_worker()
    Program(socket.socket(fileno=number)).run()


def _die_with_the_worker() -> None:
    """Die a second after the worker's thread, also if the handler never lets another thread run.

    Until then, the thread that reads can kill what the handler has started, too. Python's own
    signal handlers would wait for the handler; that for SIGHUP, 1, is the C function `alarm`.
    """
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
    libc.signal(signal.SIGHUP, ctypes.cast(libc.alarm, ctypes.c_void_p))
    libc.prctl(_DEATH_OF_PARENT, signal.SIGHUP)
