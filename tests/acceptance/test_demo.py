"""``python -m laboratory``: it works, and nothing of it is left."""

from __future__ import annotations

import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest
import requests

import servers
from laboratory.running import ROOT

KINDS = {"postgres", "redis", "gunicorn", "laboratory"}


@contextmanager
def demo(port: int) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "laboratory", "--port", str(port)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        start_new_session=True,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def read_until(process: subprocess.Popen[str], sign: str) -> list[str]:
    """The lines up to one with ``sign`` in it."""
    lines = []
    assert process.stdout is not None
    for line in process.stdout:
        lines.append(line.rstrip("\n"))
        if sign in line:
            return lines
    pytest.fail("the demo ended early:\n" + "\n".join(lines))


def test_it_says_what_to_try_and_when_it_is_stopped_nothing_is_left() -> None:
    """As little after a kill -9: its servers end with whoever started them."""
    port = servers.free_port()
    with demo(port) as process:
        lines = read_until(process, "Ctrl-C")
        commands = [shlex.split(line) for line in lines if line.startswith("curl")]
        answer = requests.get(f"http://127.0.0.1:{port}", timeout=30)
        started = psutil.Process(process.pid).children(recursive=True)
        words = set[str]()
        for each in started:
            with suppress(psutil.NoSuchProcess):  # PostgreSQL's come and go
                words |= {each.cwd(), *each.cmdline()}
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=100)
    assert process.returncode == 0, output
    assert f"Open http://127.0.0.1:{port} in a browser." in lines
    assert "Did Alice pay twice?" in answer.text
    assert all(command[2] in answer.text for command in commands)
    assert [urlsplit(command[2]).path for command in commands] == ["/payments"] * 3
    folders = {Path(word) for word in words if Path(word).name.startswith("throwaway-")}
    assert {folder.name.split("-")[1] for folder in folders} >= KINDS
    _, alive = psutil.wait_procs(started, timeout=20)
    assert [*alive, *(folder for folder in folders if folder.exists())] == []
    socket.create_server(("127.0.0.1", port)).close()
