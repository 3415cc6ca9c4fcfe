"""Applications under gunicorn, with the shop's own configuration, until a block ends."""

from __future__ import annotations

import contextlib
import http.client
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from email.message import Message
from pathlib import Path
from urllib.parse import urlsplit

import flask_migrate

import servers
from example.app import create_app
from example.extensions import db
from example.seed import seed
from servers.watchdog import Watchdog

ROOT = Path(__file__).resolve().parent.parent
CONFIG = ROOT / "example" / "gunicorn.conf.py"
START_SECONDS = 30  # gunicorn takes one; a machine that needs more has another problem
BACKLOG = 2048  # connections that wait for a worker: as many as with a socket of gunicorn's own
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
    application: str,
    environment: Mapping[str, str],
    *arguments: str,
    port: int | None = None,
    before: Sequence[str] = (),
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Run gunicorn with the shop's configuration until the block ends; yields its address and process.

    It inherits a listening socket, so nobody can take the port meanwhile, and a request sent before
    it is ready waits. A small shell stops it if this process dies of kill -9.

    :param before: words of a program that becomes what it runs, such as ``unshare``.
    """
    try:
        where = ("127.0.0.1", port or servers.free_port())
        listener = socket.create_server(where, backlog=BACKLOG)
    except OSError as error:
        raise CannotStart(f"port {port} cannot be used ({error.strerror}); try --port") from None
    own = {name: value for name, value in os.environ.items() if name != "GUNICORN_CMD_ARGS"}
    command = [
        *before,
        sys.executable,
        "-m",
        "gunicorn",
        "--config",
        str(CONFIG),
        "--log-level",
        "warning",
    ]
    folder = Path(tempfile.mkdtemp(prefix="throwaway-gunicorn-"))
    own["PROMETHEUS_MULTIPROC_DIR"] = str(folder)  # the watchdog removes it, whatever happens
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
    """Create the shop's tables and what is in them here, not in each worker."""
    app = create_app(
        {
            "SQLALCHEMY_DATABASE_URI": database_url,
            "IDEMPOTENCY_REDIS_URL": None,
            "SECRET_KEY": "for tables only",
        }
    )
    with app.app_context():
        flask_migrate.upgrade()
        seed()
        db.engine.dispose()
