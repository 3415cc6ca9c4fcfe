"""The tutorials, typed as a reader types them: what is shown is what the programs answer."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

import servers
from tests import curl
from tests.docs.pages import RECIPES, ROOT, blocks, commands, looks_like
from tests.waiting import wait_until

# As if it were installed, whether or not it is.
PLUGIN = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "pytest_flask_idempotency"}


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
        command, log = text.strip().removeprefix("$ ").split(), self._folder / "server.log"
        with log.open("ab") as out:
            self._server = subprocess.Popen(
                command, cwd=self._folder, env=self._environment, stdout=out, stderr=out
            )
        wait_until(self._listens, "the application listens")

    def _listens(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self._port)) == 0

    def close(self) -> None:
        """Stop the application."""
        if self._server is not None:
            self._server.terminate()
            self._server.wait(10)


@pytest.mark.parametrize(
    ("page", "on_servers"),
    [("tutorial", False), ("tutorial", True), ("testing", False)],
    ids=["tutorial", "tutorial on servers", "testing"],
)
def test_a_tutorial_shows_what_is_answered(page, on_servers, request, tmp_path):
    environment = dict(PLUGIN) if page == "testing" else {}
    if on_servers:
        environment = {
            "FLASK_SQLALCHEMY_DATABASE_URI": request.getfixturevalue("postgres").database("docs_typed"),
            "FLASK_IDEMPOTENCY_STORE": "hybrid",
            "FLASK_IDEMPOTENCY_REDIS_URL": request.getfixturevalue("redis_server").url,
        }
    port = str(servers.free_port())
    shell = Shell(tmp_path, port=port, **environment)
    request.addfinalizer(shell.close)
    for block in blocks(ROOT / f"docs/{page}.md", "python", "bash", "console"):
        kind, _, name = block.mark.partition(": ")
        text = block.text.replace(":5001", f":{port}")
        if kind in {"file", "append"}:
            with (tmp_path / name).open("a" if kind == "append" else "w", encoding="utf-8") as file:
                file.write("\n\n" * (kind == "append") + text)
        elif kind == "server":
            shell.serve(text.replace("5001", port))
        elif kind != "not run" and (kind != "on servers" or environment):
            for command, shown in commands(text):
                answer = shell.type(command)
                assert looks_like(answer, shown), f"{block.name}: {command}\n{answer}"


ASSISTANTS = RECIPES / "assistants.md"


@pytest.mark.parametrize(
    ("protected", "mistake"),
    [
        ("", ""),
        ("@idempotent\n", ""),
        ("scope=lambda: g.account)", "scope=None)"),
        ("db.session.commit()  #", "db.session.flush(); db.engine.raw_connection().commit()  #"),
        ('operation.derive_key("charge")', "str(operation.attempt)"),
        ("amount, atomic=True", "amount"),
    ],
)
def test_the_test_for_assistants_passes_and_fails_for_each_mistake_that_it_is_for(
    tmp_path, protected, mistake
):
    for block in blocks(ASSISTANTS, "python"):
        kind, _, name = block.mark.partition(": ")
        if kind in {"file", "append"}:
            with (tmp_path / name).open("a", encoding="utf-8") as file:
                file.write("\n\n" * (kind == "append") + block.text)
    shop = tmp_path / "shop.py"
    text = shop.read_text(encoding="utf-8")
    assert not protected or text.count(protected) == 1
    shop.write_text(text.replace(protected, mistake) if protected else text, encoding="utf-8")
    shell = Shell(tmp_path, port="0", **PLUGIN)
    answer = shell.type("pytest -q --tb=line -p no:cacheprovider test_shop.py")
    [block] = [block for block in blocks(ASSISTANTS, "console") if not block.mark]
    [(_, shown)] = commands(block.text)
    if protected:
        assert re.search(r"(?m)^\d failed", answer)
    else:
        assert looks_like(answer, shown)
