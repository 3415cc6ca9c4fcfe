"""The tutorials, typed as a reader types them: what is shown is what the programs answer."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

import servers
from tests.curl import path_with_curl
from tests.docs.pages import RECIPES, ROOT, Block, blocks, commands, looks_like
from tests.waiting import wait_until

# As if it were installed, whether or not it is.
PLUGIN = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "pytest_flask_idempotency"}
INHERITED = "HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "TMPDIR"


class Shell:
    """A reader's two terminals, in one folder: commands, and the application in the background.

    Their environment is a reader's, not that of the test run: ``CI`` alone changes what pytest shows.
    """

    def __init__(self, folder: Path, *, port: str, **environment: str) -> None:
        self._folder, self._port = folder, int(port)
        self._environment = {
            **{name: os.environ[name] for name in INHERITED if name in os.environ},
            "PYTHONPATH": str(ROOT),
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{path_with_curl(folder)}",
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
            timeout=100,
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


def write_file(block: Block, folder: Path) -> bool:
    """Write or continue the file that the block is, if it is one."""
    kind, _, name = block.mark.partition(": ")
    if kind in {"file", "append"}:
        with (folder / name).open("a" if kind == "append" else "w", encoding="utf-8") as file:
            file.write("\n\n" * (kind == "append") + block.text)
    return kind in {"file", "append"}


@pytest.mark.parametrize("page", ["tutorial", "tutorial on servers", "testing"])
def test_a_tutorial_shows_what_is_answered(page, request, tmp_path):
    environment, typed = dict(PLUGIN) if page == "testing" else {}, {""}
    if page == "tutorial on servers":
        environment = {
            "FLASK_SQLALCHEMY_DATABASE_URI": request.getfixturevalue("postgres").database("docs_typed"),
            "FLASK_IDEMPOTENCY_STORE": "hybrid",
            "FLASK_IDEMPOTENCY_REDIS_URL": request.getfixturevalue("redis_server").url,
        }
        typed = {"on servers"}
    port = str(servers.free_port())
    shell = Shell(tmp_path, port=port, **environment)
    request.addfinalizer(shell.close)
    for shown_block in blocks(ROOT / f"docs/{page.split()[0]}.md", "python", "bash", "console"):
        block = replace(shown_block, text=shown_block.text.replace("5001", port))
        if not write_file(block, tmp_path) and block.mark == "server":
            shell.serve(block.text)
        elif block.mark in typed:
            for command, shown in commands(block.text):
                answer = shell.type(command)
                assert looks_like(answer, shown), f"{block.name}: {command}\n{answer}"


ASSISTANTS = RECIPES / "assistants.md"
MISTAKES = {
    "none": "",
    "@idempotent\n": "",
    "scope=lambda: g.account)": "scope=None)",
    "db.session.commit()  #": "db.session.flush(); db.engine.raw_connection().commit()  #",
    'operation.derive_key("charge")': "str(operation.attempt)",
    "amount, atomic=True": "amount",
}
IN_EACH_FOLDER = """
import os, pathlib, pytest, flask_idempotency.testing, flask_sqlalchemy
for folder in sorted(pathlib.Path.cwd().iterdir()):
    if not os.fork():
        os.chdir(folder)
        code = pytest.main(["-qx", "-p", "no:cacheprovider", "test_shop.py"])
        print(folder.name, int(code), flush=True)
        os._exit(0)
    os.wait()
"""


def test_the_test_for_assistants_fails_for_each_mistake_that_it_is_for(tmp_path):
    for number, (right, wrong) in enumerate(MISTAKES.items()):
        folder = tmp_path / str(number)
        folder.mkdir()
        for block in blocks(ASSISTANTS, "python"):
            write_file(block, folder)
        shop = folder / "shop.py"
        text = shop.read_text(encoding="utf-8")
        assert text.count(right) == (right != "none")
        shop.write_text(text.replace(right, wrong), encoding="utf-8")
    answer = Shell(tmp_path, port="0", PROGRAM=IN_EACH_FOLDER, **PLUGIN).type('python -c "$PROGRAM"')
    codes = [(str(number), str(int(number > 0))) for number in range(len(MISTAKES))]
    assert re.findall(r"(?m)^(\d) (\d)$", answer) == codes, answer
    [shown] = [block.text for block in blocks(ASSISTANTS, "console") if not block.mark]
    assert shown.splitlines()[-1].removesuffix(" in ...") in answer
