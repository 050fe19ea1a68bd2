"""The web examples over real HTTP, each in a process of its own."""

from __future__ import annotations

from examples.programs import EXAMPLES, Place
from examples.web import serving

SIGNALS_PROGRAM = """
import asyncio, signal, sys
from contextlib import asynccontextmanager
from aiohttp import web
import aiohttp_app, fastapi_app

@asynccontextmanager
async def aiohttp_running():
    runner = web.AppRunner(aiohttp_app.make_app())
    await runner.setup()
    yield
    await runner.cleanup()

def handlers():
    return [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]

async def main(running):
    before = handlers()
    async with running:
        during = handlers()
    print(before == during == handlers())

asyncio.run(main(fastapi_app.app.router.lifespan_context(fastapi_app.app)))
asyncio.run(main(aiohttp_running()))
"""


def test_fastapi(place: Place) -> None:
    with serving(place, "fastapi_app.py") as web:
        placed = web.client.post("/orders", json={"product": "tea", "quantity": 2})
        assert (placed.status_code, placed.json()) == (201, {"order": 1, "job": 1})
        order = web.when_done("/orders/1")
        assert order["invoice"] == {"number": "2026-00001", "cents": 900}
        assert (web.count("orders"), web.count("jobs")) == (1, 1)

        refused = web.client.post("/orders", json={"product": "tea", "quantity": 19})
        assert refused.status_code == 409, refused.text
        assert (web.count("orders"), web.count("jobs")) == (1, 1), "rolled back"
        assert web.client.get("/orders/2").status_code == 404
        assert web.client.post("/orders", json={"product": "tea", "quantity": 18}).is_success
        assert web.when_done("/orders/2")["invoice"]["cents"] == 8100
        web.interrupt()
    assert place.left_behind == []


def test_aiohttp(place: Place) -> None:
    with serving(place, "aiohttp_app.py") as web:
        invited = web.client.post("/invitations", json={"email": "ada@example.org"})
        assert invited.status_code == 201, invited.text
        invitation = web.when_done("/invitations/ada@example.org")
        assert invitation["message_id"] == f"<invitation-{invited.json()['job']}@example.org>"
        assert "To: ada@example.org\n" in web.program.output

        refused = web.client.post("/invitations", json={"email": "ada@example.org"})
        assert refused.status_code == 409, refused.text
        assert (web.count("invitations"), web.count("jobs")) == (1, 1), "rolled back"
        assert web.client.get("/invitations/bob@example.org").status_code == 404
        web.interrupt()
    assert place.left_behind == []


def test_ctrl_c_right_after_the_start(place: Place) -> None:
    with serving(place, "aiohttp_app.py") as web:
        web.interrupt()


def test_signal_handlers_are_left_alone(place: Place) -> None:
    with place.running("-c", SIGNALS_PROGRAM, PYTHONPATH=str(EXAMPLES)) as program:
        assert program.exit_code(within=30) == 0, program.output
        told = [line for line in program.output.splitlines() if line in ("True", "False")]
        assert told == ["True", "True"], program.output
        program.check_output()
