"""``python -m laboratory``: it works, and nothing of it is left."""

from __future__ import annotations

import shlex
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest
import requests

import servers
from laboratory.running import ROOT
from laboratory.stories import STORIES

KINDS = {"postgres", "redis", "gunicorn", "laboratory"}


class Traces:
    """What a process starts while it lives: its descendants, and the folders they work with."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.processes: set[psutil.Process] = set()
        self.folders: set[Path] = set()
        self._root = psutil.Process(process.pid)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def _watch(self) -> None:
        while not self._ended.wait(0.2):
            with suppress(psutil.NoSuchProcess):
                for child in self._root.children(recursive=True):
                    self.processes.add(child)
                    paths = [Path(word) for word in [child.cwd(), *child.cmdline()]]
                    self.folders |= {path for path in paths if path.name.startswith("throwaway-")}

    def end(self) -> None:
        self._ended.set()
        self._thread.join()

    def assert_nothing_is_left(self) -> None:
        assert {folder.name.split("-")[1] for folder in self.folders} >= KINDS
        _, alive = psutil.wait_procs(self.processes, timeout=20)
        assert [*alive, *(folder for folder in self.folders if folder.exists())] == []


@contextmanager
def demo(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], Traces]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "laboratory", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        start_new_session=True,
    )
    traces = Traces(process)
    try:
        with process:
            yield process, traces
    finally:
        if process.poll() is None:
            process.kill()
        traces.end()


def read_until(process: subprocess.Popen[str], sign: str) -> list[str]:
    """The lines up to one with ``sign`` in it."""
    lines = []
    assert process.stdout is not None
    for line in process.stdout:
        lines.append(line.rstrip("\n"))
        if sign in line:
            return lines
    pytest.fail("the demo ended early:\n" + "\n".join(lines))


def test_the_check_passes_and_leaves_nothing() -> None:
    with demo("--check") as (process, traces):
        output, _ = process.communicate(timeout=110)
    assert process.returncode == 0, output
    assert "Idempotent-Replayed: true" in output
    told = [line.partition(" — ")[0] for line in output.splitlines() if " — " in line]
    assert told == [story.button for story in STORIES.values()]
    assert output.rstrip().endswith("All as expected.")
    traces.assert_nothing_is_left()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_however_it_is_stopped_nothing_is_left(number: signal.Signals) -> None:
    port = servers.free_port()
    with demo("--port", str(port)) as (process, traces):
        lines = read_until(process, "Ctrl-C")
        commands = [shlex.split(line) for line in lines if line.startswith("curl")]
        answer = requests.get(f"http://127.0.0.1:{port}", timeout=30)
        process.send_signal(number)
        output, _ = process.communicate(timeout=100)
    assert process.returncode == (-number if number == signal.SIGKILL else 0), output
    assert f"Open http://127.0.0.1:{port} in a browser." in lines
    assert "Did Alice pay twice?" in answer.text
    assert all(command[2] in answer.text for command in commands)
    assert [urlsplit(command[2]).path for command in commands] == ["/payments"] * 3
    traces.assert_nothing_is_left()
    socket.create_server(("127.0.0.1", port)).close()


def test_a_port_that_is_taken_is_said_in_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with demo("--port", str(port)) as (process, _):
            output, _ = process.communicate(timeout=100)
    assert process.returncode == 1
    assert f"port {port} cannot be used" in output.splitlines()[-1]
    assert "Traceback" not in output
