"""The long run: python -m tests.faults --minutes 15 --seed 1 --backend postgresql."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from cases.faked_clocks import clocks_can_be_faked
from cases.workers import prepare_forks
from databases import Databases
from faults.run import Run
from servers import BACKENDS, Servers, url_variable
from throwaway import MissingServerError


def options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--minutes", type=float, default=15.0, help="how long faults happen")
    parser.add_argument("--seed", type=int, default=1, help="what the schedule is drawn from")
    parser.add_argument("--backend", choices=BACKENDS, default="sqlite")
    parser.add_argument(
        "--url", help="a server of that kind; without, one is started and restarted"
    )
    parser.add_argument("--folder", type=Path, help="where the logs are to stay")
    return parser.parse_args()


async def main() -> int:
    """Run, print the figures, and return the exit code: 1 if anything was wrong."""
    given = options()
    logging.getLogger("sqlalchemy.pool").setLevel(logging.CRITICAL)  # connections break here
    variable = url_variable(given.backend)
    environment = {name: value for name, value in os.environ.items() if name != variable}
    if given.url:
        environment[variable] = given.url
    servers = Servers(environment, durable=True)
    try:
        server = servers.get(given.backend)
    except MissingServerError as error:
        print(error)
        return 2
    print(f"{given.backend} {server.version} ({server.origin}), seed {given.seed}")
    if given.backend != "sqlite" and server.process is None:
        print("no restarts: the server was given by its URL")
    if not clocks_can_be_faked():
        print("no wrong clocks: libfaketime is not installed")
    prepare_forks()
    folder = given.folder or Path(tempfile.mkdtemp(prefix="asyncjobq-faults-"))
    folder.mkdir(parents=True, exist_ok=True)
    databases = Databases(servers, folder)
    with databases.fresh(given.backend) as url:
        run = Run(url, folder, given.seed, given.minutes * 60, server.process)
        await run.go()
        print(f"{run.summary()}\nlogs: {folder}")
    databases.close()
    servers.close()
    return 1 if run.problems else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
