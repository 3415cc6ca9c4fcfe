"""The tutorials, typed as a reader types them: what is shown is what the programs answer."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

import servers
from tests import curl
from tests.docs.pages import ROOT, blocks, commands, looks_like

# As if it were installed, whether or not it is.
PLUGIN = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "pytest_flask_idempotency"}


class TestTutorials:
    """A tutorial is typed, command by command, into a shell in an empty folder."""

    def test_the_responses_of_the_first_are_the_real_ones(self, tmp_path):
        self.type_page("tutorial", tmp_path)

    def test_and_they_are_the_same_on_servers(self, postgres, redis_server, tmp_path):
        settings = {
            "FLASK_SQLALCHEMY_DATABASE_URI": postgres.database("docs_tutorial"),
            "FLASK_IDEMPOTENCY_STORE": "hybrid",
            "FLASK_IDEMPOTENCY_REDIS_URL": redis_server.url,
        }
        self.type_page("tutorial", tmp_path, **settings)

    def test_and_those_of_the_one_about_testing(self, tmp_path):
        self.type_page("testing", tmp_path, **PLUGIN)

    def type_page(self, page, folder, **environment):
        port = str(servers.free_port())
        shell = Shell(folder, port=port, **environment)
        path = ROOT / f"docs/{page}.md"
        try:
            for block in blocks(path, "python", "bash", "console"):
                kind, _, name = block.mark.partition(": ")
                text = block.text.replace(":5001", f":{port}")
                if kind == "file":
                    (folder / name).write_text(text, encoding="utf-8")
                elif kind == "append":
                    with (folder / name).open("a", encoding="utf-8") as file:
                        file.write("\n\n" + text)
                elif kind == "server":
                    shell.serve(text.replace("5001", port))
                elif kind != "not run" and (kind != "on servers" or environment):
                    for command, shown in commands(text):
                        answer = shell.type(command)
                        assert looks_like(answer, shown), (
                            f"{block.name}: {command}\n--- shown\n{shown}\n--- real\n{answer}"
                        )
        finally:
            shell.close()


class Shell:
    """A reader's two terminals, in one folder: commands, and the application in the background.

    Their environment is a reader's, not that of the test run: ``CI`` alone changes what pytest shows.
    """

    INHERITED = "HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "TMPDIR"

    def __init__(self, folder: Path, *, port: str, **environment: str) -> None:
        self._folder, self._port = folder, int(port)
        with_curl = curl.path_with(curl.kinds()[0], folder)
        self._environment = {
            **{name: os.environ[name] for name in self.INHERITED if name in os.environ},
            "PYTHONPATH": str(ROOT),
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{with_curl}",
            "no_proxy": "*",
            **environment,
        }
        self._server: subprocess.Popen[bytes] | None = None

    def type(self, command: str) -> str:
        """What bash answers."""
        done = subprocess.run(
            ["bash", "-c", command],  # noqa: S607
            cwd=self._folder,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=60,
            check=False,
        )
        return done.stdout.decode()

    def serve(self, text: str) -> None:
        """Start the application anew, and wait until it listens."""
        if self._server is not None:
            self.close()
            time.sleep(1)  # a reader is no quicker; a lock of the dead is doubted after a second
        command = text.strip().removeprefix("$ ")
        with (self._folder / "server.log").open("ab") as log:
            self._server = subprocess.Popen(
                command.split(), cwd=self._folder, env=self._environment, stdout=log, stderr=log
            )
        for _ in range(200):
            time.sleep(0.1)
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self._port)) == 0:
                    return
            if self._server.poll() is not None:
                break
        pytest.fail("the tutorial's application did not start:\n" + self.log())

    def log(self) -> str:
        """What the application has written."""
        return (self._folder / "server.log").read_text(encoding="utf-8")

    def close(self) -> None:
        """Stop the application."""
        if self._server is not None:
            self._server.terminate()
            self._server.wait(10)
