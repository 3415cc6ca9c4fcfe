"""The demo: one shop without the extension beside one with it. ``python -m laboratory``."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from typing import Any

from werkzeug.serving import WSGIRequestHandler, make_server

import servers
from laboratory.page import create_app
from laboratory.results import Result
from laboratory.running import CannotStart, send
from laboratory.stage import OPERATOR_PASSWORD, Stage, open_stage
from laboratory.stories import STORIES
from laboratory.tour import lines

FIRST = "lost-response"  # the headline's story: it has been played when somebody opens the page


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


class _Quiet(WSGIRequestHandler):
    def log_request(self, *_: Any) -> None:
        """What is asked for is seen on the page."""


@contextlib.contextmanager
def listening(port: int | None) -> Iterator[socket.socket]:
    """The page's socket, before anything is started: whether the port is free is soon said."""
    try:
        listener = socket.create_server(("127.0.0.1", port or servers.free_port()), backlog=128)
    except OSError as error:
        raise CannotStart(f"port {port} cannot be used ({error.strerror}); try --port") from None
    with listener:
        yield listener


@contextlib.contextmanager
def serving(stage: Stage, listener: socket.socket) -> Iterator[str]:
    """Serve the laboratory's page until the block ends; yields its address."""
    app = create_app(stage)
    app.config["SHOWN"]["results"], _ = stage.play(STORIES[FIRST])
    host, port = listener.getsockname()
    server = make_server(host, port, app, threaded=True, request_handler=_Quiet, fd=listener.fileno())
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://{host}:{port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def show(stage: Stage, url: str) -> int:
    """Say what to try, then wait for Ctrl-C."""
    print(f"Open {url} in a browser.\n")
    shop = stage.lane("with").url
    print(f"The shop with the extension is at {shop}. Or try these in another terminal:\n")
    for step, curl in lines(shop):
        print(f"# {step.title}. {step.expect}\n{curl}\n")
    print(f"# What its operator sees: {shop}/operations/ (any name, password {OPERATOR_PASSWORD})\n")
    print("Ctrl-C stops it and removes every trace.", flush=True)
    threading.Event().wait()
    return 0


def check(stage: Stage, times: int) -> int:
    """Press every button, so often, and read the books; 0 if all is as told."""
    failures = check_curl(stage.lane("with").url)
    stage.start_over()
    for story in STORIES.values():
        seen = set()
        for _ in range(times):
            results, _ = stage.play(story)
            seen.add(tuple(f"{result.lane.name}: {result.verdict}" for result in results))
            failures += [complaint(each) for each in results if not each.is_as_told]
        for told in sorted(seen):
            print(f"{story.button} — {'  '.join(told)}", flush=True)
        if len(seen) > 1:
            failures.append(f"{story.name}: {len(seen)} different stories in {times} presses")
    print("\n".join(failures) or "All as expected.")
    return 1 if failures else 0


def complaint(result: Result) -> str:
    happened = "\n".join(
        f"  {(each.at - result.began) * 1000:8.0f} ms  {each.who}: {each.what} {each.detail}"
        for each in result.moments
    )
    return f"{result.story.name}, {result.lane.name}: {result.verdict} {result.because}\n{happened}"


def check_curl(url: str) -> list[str]:
    """Send the three requests that the terminal is told of."""
    failures = []
    first_body = None
    for step, _ in lines(url):
        answer = send(url, "POST", "/payments", step.headers("check"), step.body)
        replayed = answer.headers.get("Idempotent-Replayed") == "true"
        mark = "  Idempotent-Replayed: true" if replayed else ""
        print(f"# {step.title}. {step.expect}\n{answer.status}{mark}\n{answer.body.strip()}\n")
        first_body = first_body or answer.body
        if (answer.status, replayed) != (step.status, step.replayed):
            what = f"a replayed {step.status}" if step.replayed else f"a new {step.status}"
            failures.append(f"{step.title}: {what} was expected")
        if replayed and answer.body != first_body:
            failures.append(f"{step.title}: the body differs from the first")
    return failures


def run(port: int | None, *, times: int) -> int:
    """Start everything; ``times`` to press each button, or 0 to show the page."""
    with listening(port) as listener:
        print("Starting PostgreSQL, Redis, a card provider and two shops …", flush=True)
        with open_stage() as stage:
            if times:
                with interrupt.allowed():
                    return check(stage, times)
            with serving(stage, listener) as url, interrupt.allowed():
                return show(stage, url)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m laboratory", description=__doc__)
    parser.add_argument("--port", type=int, default=os.environ.get("PORT") or None)
    parser.add_argument("--check", action="store_true", help="press every button and stop")
    parser.add_argument("--times", type=int, default=1, help="with --check: how often each")
    options = parser.parse_args()
    interrupt.listen()
    try:
        return run(options.port, times=options.times if options.check else 0)
    except KeyboardInterrupt:
        print("\nStopped; nothing is left.")
        return 0
    except (CannotStart, servers.Unavailable) as error:
        print(f"The demo cannot run: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
