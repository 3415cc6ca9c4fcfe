"""The example shop on a PostgreSQL and a Redis of its own: ``python -m example.demo``."""

from __future__ import annotations

import argparse
import contextlib
import http.client
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from email.message import Message
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psycopg2
from sqlalchemy.exc import ArgumentError

import servers
from example.app import create_app
from example.models import db
from example.seed import ALICE, seed
from example.tour import STEPS
from servers.watchdog import Watchdog

ROOT = Path(__file__).resolve().parent.parent
CONFIG = ROOT / "example" / "gunicorn.conf.py"
START_SECONDS = 30  # gunicorn takes one; a machine that needs more has another problem
BACKLOG = 2048  # connections that wait for a worker: as many as with a socket of gunicorn's own
PASSWORD = "operator-demo-password"  # public because it is for the demo
STOP_SECONDS = 25  # more than gunicorn.conf.py gives requests to finish


class CannotStart(RuntimeError):
    """The message says what to do."""


@dataclass
class Reply:
    """A response."""

    status: int
    headers: Message
    body: str


def send(
    url: str, method: str, path: str, headers: Mapping[str, str], body: str | None = None
) -> Reply:
    """One request on a connection of its own."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=START_SECONDS)
    with contextlib.closing(connection):
        connection.request(method, path, body, dict(headers))
        response = connection.getresponse()
        return Reply(response.status, response.headers, response.read().decode())


@contextlib.contextmanager
def gunicorn(
    application: str, environment: Mapping[str, str], *arguments: str, port: int | None = None
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Run gunicorn with the shop's configuration until the block ends; yields its address and process.

    It inherits a listening socket, so nobody can take the port meanwhile, and a request sent before
    it is ready waits. A small shell stops it if this process dies of kill -9.
    """
    try:
        where = ("127.0.0.1", port or servers.free_port())
        listener = socket.create_server(where, backlog=BACKLOG)
    except OSError as error:
        raise CannotStart(f"port {port} cannot be used ({error.strerror}); try --port") from None
    own = {name: value for name, value in os.environ.items() if name != "GUNICORN_CMD_ARGS"}
    command = [sys.executable, "-m", "gunicorn", "--config", str(CONFIG), "--log-level", "warning"]
    folder = Path(tempfile.mkdtemp(prefix="throwaway-gunicorn-"))
    watchdog = Watchdog(folder)
    process = None
    try:
        with listener:
            process = subprocess.Popen(
                [*command, "--bind", f"fd://{listener.fileno()}", *arguments, application],
                stdin=subprocess.DEVNULL,
                cwd=ROOT,
                env={**own, **environment},
                pass_fds=[listener.fileno()],
                start_new_session=True,  # the terminal's Ctrl-C is for the demo, which ends it
            )
            watchdog.note([process.pid])
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        wait_until_it_answers(url)
        yield url, process
    finally:
        if process is not None:
            stop(process)
        shutil.rmtree(folder, ignore_errors=True)
        watchdog.close()


def wait_until_it_answers(url: str) -> None:
    """One request is enough: it waits until gunicorn accepts it, and fails if gunicorn dies."""
    try:
        answer = send(url, "GET", "/", {})
    except (OSError, http.client.HTTPException) as error:
        raise CannotStart(f"gunicorn did not respond ({error!r}); see its output above") from None
    if answer.status != 200:
        raise CannotStart(f"the shop responds with {answer.status}; see its output above")


def stop(process: subprocess.Popen[bytes]) -> None:
    """Let gunicorn finish; after ``STOP_SECONDS`` kill it and its workers."""
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def make_tables(database_url: str) -> None:
    """Create the tables and accounts here, not in each worker."""
    app = create_app({"SQLALCHEMY_DATABASE_URI": database_url, "IDEMPOTENCY_REDIS_URL": None})
    with app.app_context():
        seed()
        db.engine.dispose()


def show(url: str, process: subprocess.Popen[bytes]) -> int:
    """Say what to try, then wait for Ctrl-C."""
    print(f"The shop is at {url} (open it in a browser, or try these in another terminal)\n")
    key = str(uuid.uuid4())
    for step in STEPS:
        print(f"# {step.title}. {step.expect}\n{step.curl(url, key)}\n")
    print(f"# What the operator sees: {url}/operations/ (any name, password {PASSWORD})\n")
    print("Ctrl-C stops it and removes every trace.", flush=True)
    process.wait()
    raise CannotStart("gunicorn has stopped by itself; see its output above")


def check(url: str) -> int:
    """Send the three requests and print the responses; 0 if all are as expected."""
    print(f"The shop is at {url}\n", flush=True)
    key = str(uuid.uuid4())
    failures = []
    first_body = None
    for step in STEPS:
        answer = send(url, "POST", "/payments", step.headers(key), step.body)
        replayed = answer.headers.get("Idempotent-Replayed") == "true"
        mark = "  Idempotent-Replayed: true" if replayed else ""
        print(f"# {step.title}. {step.expect}\n{answer.status}{mark}\n{answer.body.strip()}\n")
        first_body = first_body or answer.body
        if (answer.status, replayed) != (step.status, step.replayed):
            what = f"a replayed {step.status}" if step.replayed else f"a new {step.status}"
            failures.append(f"{step.title}: {what} was expected")
        if replayed and answer.body != first_body:
            failures.append(f"{step.title}: the body differs from the first")
    me = send(url, "GET", "/accounts/me", STEPS[0].headers(key)).body
    print(f"# The account, debited once\n{me.strip()}\n")
    if f'"balance":{ALICE.balance - STEPS[0].amount},' not in me:
        failures.append("the account was not debited once")
    print("\n".join(failures) or "All as expected.")
    return 1 if failures else 0


def run(port: int | None, *, only_check: bool) -> int:
    """Start everything in order; the block ends it in reverse."""
    print("Starting PostgreSQL, Redis and gunicorn …", flush=True)
    with servers.postgres() as postgres, servers.redis() as redis:
        try:
            database_url = postgres.database("shop")
        except psycopg2.Error as error:  # the server in DATABASE_URL may be down, or reject it
            raise CannotStart(f"PostgreSQL cannot create a database: {error}") from None
        make_tables(database_url)
        environment = {
            "DATABASE_URL": database_url,
            "REDIS_URL": redis.url,
            "SECRET_KEY": secrets.token_hex(),
            "OPERATOR_PASSWORD": PASSWORD,
        }
        shop = gunicorn("example:create_app()", environment, port=port)
        with shop as (url, process), interrupt.allowed():
            return check(url) if only_check else show(url, process)


class Interrupt:
    """Ctrl-C, SIGTERM and a closed terminal, handled only when nothing is half started or stopped.

    Starting takes seconds; a signal that arrives meanwhile waits until everything can be stopped.
    """

    def __init__(self) -> None:
        self._asked = self._allowed = False

    def listen(self) -> None:
        """Handle the signals from now on."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._hear)

    def _hear(self, _number: int, _frame: Any) -> None:
        self._asked = True
        if self._allowed:
            self._allowed = False  # a second one must not disturb the shutdown
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def allowed(self) -> Iterator[None]:
        """Let a signal, even an earlier one, end the block with ``KeyboardInterrupt``."""
        self._allowed = True
        try:
            if self._asked:
                raise KeyboardInterrupt
            yield
        finally:
            self._allowed = False


interrupt = Interrupt()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m example.demo", description=__doc__)
    parser.add_argument("--port", type=int, default=os.environ.get("PORT") or None)
    parser.add_argument("--check", action="store_true", help="send the three requests and stop")
    options = parser.parse_args()
    interrupt.listen()
    try:
        return run(options.port, only_check=options.check)
    except KeyboardInterrupt:
        print("\nStopped; nothing is left.")
        return 0
    except ArgumentError:
        print("The demo cannot run: DATABASE_URL is not a URL", file=sys.stderr)
        return 1
    except (CannotStart, servers.Unavailable) as error:
        print(f"The demo cannot run: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
