"""The documentation tells the truth: its code runs, its answers are the real ones.

How a block is marked: see ``pages.py``. The how-to pages have tests of their own, ``test_how_to.py``.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import redis
import sqlalchemy as sa
from flask import Flask, request
from flask_sqlalchemy import SQLAlchemy

import flask_idempotency
import servers
from flask_idempotency import Idempotency, Problem, Retryable, current_operation, idempotent
from flask_idempotency.cli import cli
from flask_idempotency.config import SETTINGS, Settings
from flask_idempotency.options import RouteOptions
from flask_idempotency.outcomes import outcomes_blueprint
from tests.docs.pages import MAKE_DUE, PAGES, ROOT, blocks, name_of


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_python_block_runs_or_is_a_fragment_that_compiles(page, names):
    for block in blocks(page, "python"):
        code = compile(block.source, str(page), "exec")
        if not block.mark:
            exec(code, names)  # noqa: S102
        else:
            assert re.match(r"fragment$|file: |append: ", block.mark), block.name


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_mark_stands_before_a_block(page):
    """A mark that is misspelt or one line too high would silently mark nothing."""
    text = page.read_text(encoding="utf-8")
    marks = re.findall(r"^ *<!-- .* -->$", text, re.MULTILINE)
    on_tables = text.count("<!-- counted -->\n|")
    marked = [b for b in blocks(page, "python", "console", "http", "bash") if b.mark]
    assert len(marks) == len(marked) + on_tables
    assert not re.search(r"^ +```(python|http)", text, re.MULTILINE), "indented, so not found"


class TestTutorials:
    """A tutorial is typed, command by command, into a shell in an empty folder."""

    def test_the_answers_of_the_first_are_the_real_ones(self, postgres, redis_server, tmp_path):
        self.type_page("tutorial", tmp_path, postgres.database("docs_tutorial"), redis_server.url)

    def test_and_those_of_the_one_about_testing(self, tmp_path):
        # As if it were installed, whether or not it is.
        plugin = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "pytest_flask_idempotency"}
        self.type_page("testing", tmp_path, "", "", **plugin)

    def type_page(self, page, folder, database_url, redis_url, **environment):
        port = str(servers.free_port())
        shell = Shell(folder, database_url, redis_url, port=port, **environment)
        path = ROOT / f"docs/{page}.md"
        try:
            for block in blocks(path, "python", "bash", "console"):
                kind, _, name = block.mark.partition(": ")
                text = block.text.replace(":5000", f":{port}")
                if kind == "file":
                    (folder / name).write_text(text, encoding="utf-8")
                elif kind == "append":
                    with (folder / name).open("a", encoding="utf-8") as file:
                        file.write("\n\n" + text)
                elif kind == "server":
                    shell.serve(text.replace("5000", port))
                elif kind != "not run":
                    for command, shown in commands(text):
                        answer = shell.type(command)
                        assert looks_like(answer, shown), (
                            f"{block.name}: {command}\n--- shown\n{shown}\n--- real\n{answer}"
                        )
        finally:
            shell.close()


def commands(text: str) -> Iterator[tuple[str, str]]:
    """Each ``$ command`` of a block with the answer that is shown below it."""
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        command, _, shown = part.partition("\n")
        yield command, shown


def looks_like(answer: str, shown: str) -> bool:
    """Whether the answer is the one shown; ``...`` stands for anything, white space counts little."""
    lines = [" ".join(line.split()) for line in shown.splitlines() if line.strip()]
    pattern = "\n".join(
        r"(?:[^\n]*\n)*?[^\n]*" if line == "..." else re.escape(line).replace(r"\.\.\.", "[^\n]*")
        for line in lines
    )
    real = "\n".join(" ".join(line.split()) for line in answer.splitlines() if line.strip())
    return re.fullmatch(pattern, real) is not None


class Shell:
    """A reader's two terminals, in one folder: commands, and the application in the background.

    Their environment is a reader's, not that of the test run: ``CI`` alone changes what pytest shows.
    """

    INHERITED = "HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "TMPDIR"

    def __init__(
        self, folder: Path, database_url: str, redis_url: str, *, port: str, **environment: str
    ) -> None:
        self._folder, self._port = folder, int(port)
        self._environment = {
            **{name: os.environ[name] for name in self.INHERITED if name in os.environ},
            "DATABASE_URL": database_url,
            "REDIS_URL": redis_url,
            "PYTHONPATH": str(ROOT),
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
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


class TestCommands:
    """The page has every command, and each example's output is the real one."""

    PAGE = ROOT / "docs/cli.md"

    def test_it_has_the_help_of_every_command_once(self):
        shown = re.findall(r"(?m)^```\{command\} (.*)$", self.PAGE.read_text(encoding="utf-8"))
        assert sorted(shown) == sorted(cli.commands)
        for name in shown:
            text = reference().command(name)
            assert cli.commands[name].help.splitlines()[0] in text
            for param in cli.commands[name].params:
                is_option = param.param_type_name == "option"
                assert (f"`{param.opts[0]}" if is_option else param.human_readable_name) in text

    def test_its_outputs_are_the_real_ones(self, postgres, redis_server):
        app, db = Flask("shop"), SQLAlchemy()
        app.config["SQLALCHEMY_DATABASE_URI"] = postgres.database("docs_commands")
        app.config["IDEMPOTENCY_REDIS_URL"] = redis_server.url
        db.init_app(app)
        Idempotency(app, db, scope=None)
        for name, answer in ("payment", ({"amount": 500}, 201)), ("refund", ({}, 500)):
            view = idempotent(lambda answer=answer: answer)
            app.add_url_rule(f"/{name}s", f"create_{name}", view, methods=["POST"])
        self.add_parcels(app)
        run = app.test_cli_runner().invoke
        for block in blocks(self.PAGE, "console"):
            for command, shown in commands(block.text):
                name, *arguments = command.removeprefix("flask idempotency ").split()
                if name == "resume":  # what was released just now is due later
                    self.sql(app, db, MAKE_DUE)
                answer = run(cli, [name, *arguments]).output
                assert looks_like(answer, shown), f"{block.name}: {command}\n{answer}"
                if answer.endswith("created the table of its steps\n"):
                    self.work(app, db)
        with app.app_context():
            db.engine.dispose()

    def add_parcels(self, app):
        """Views that are not atomic."""

        @app.post("/orders")
        @idempotent(atomic=False)
        def send_order():
            return {}, 500

        @app.post("/parcels")
        @idempotent(atomic=False, resumable=True)
        def send_parcel():
            current_operation.step("stamp", lambda: {"number": 17})
            if current_operation.attempt == 1:
                raise Killed
            return {}, 201

    def work(self, app, db):
        """Seven records, of which the first has expired, and two are of views that were killed."""
        post = app.test_client().post
        for key, path in enumerate(("/payments", "/payments", "/payments", "/refunds", "/orders")):
            post(path, headers={"Idempotency-Key": str(key)})
        for number in 1, 2:
            with pytest.raises(Killed):
                post("/parcels", headers={"Idempotency-Key": f"parcel-{number}"})
        first = "SELECT key FROM idempotency_record ORDER BY created_at LIMIT 1"
        update = "UPDATE idempotency_record SET"
        self.sql(app, db, f"{update} expires_at = clock_timestamp() WHERE key = ({first})")
        self.sql(app, db, f"{update} lease_expires_at = created_at WHERE lease_expires_at IS NOT NULL")

    def sql(self, app, db, statement):
        """Run a statement on a connection of its own, committed."""
        with app.app_context(), db.engine.begin() as connection:
            connection.execute(sa.text(statement))


class Killed(BaseException):
    """Nothing catches it, as nothing catches a SIGKILL."""


class TestHttpReference:
    """Each request of the page is sent, and its answer is the one shown."""

    PAGE = ROOT / "docs/http.md"

    def test_its_answers_are_the_real_ones(self, postgres):
        shop = Shop(postgres.database("docs_http"))
        examples = list(blocks(self.PAGE, "http"))
        sent = set()
        for asked, answered in zip(examples[::2], examples[1::2], strict=True):
            real = shop.ask(asked.text, given=asked.mark.removeprefix("given: "))
            status, headers, body = parsed(answered.text)
            assert f"HTTP/1.1 {real.status}" == status, asked.name
            assert real.get_data(as_text=True).strip() == body, asked.name
            ours = {"content-length", "cache-control"}  # said once for all answers
            assert {n: v for n, v in real.headers if n.lower() not in ours} == headers, asked.name
            sent.add(headers["Content-Type"] == PROBLEM and json.loads(body)["type"])
        shop.close()
        base = next(setting.default for setting in SETTINGS if setting.name == "PROBLEM_BASE")
        assert sent - {False} == {base + problem.type for problem in PROBLEMS}

    def test_its_table_has_every_problem_with_its_status_and_type(self):
        rows = re.findall(
            r"^\|.*\| (\d{3}) \| `([a-z-]+)` \| (.*?) \| `(\w+)` \|$",
            self.PAGE.read_text(encoding="utf-8"),
            re.MULTILINE,
        )
        assert {(name, int(status), kind) for status, kind, _, name in rows} == {
            (problem.__name__, problem.status, problem.type) for problem in PROBLEMS
        }
        assert len(rows) == len(PROBLEMS)


PROBLEM = "application/problem+json"
PROBLEMS = Problem.__subclasses__()


def parsed(message: str) -> tuple[str, dict[str, str], str]:
    """First line, headers and body of a request or an answer."""
    head, _, body = message.strip().partition("\n\n")
    first, *lines = head.splitlines()
    return first, dict(line.split(": ", 1) for line in lines), body.strip()


class Shop:
    """The API of the HTTP reference, with a way into each situation that the page describes."""

    def __init__(self, url: str, *, create: bool = True) -> None:
        self.running, self.go_on = threading.Event(), threading.Event()
        self.allowed = True
        self.app, self.db = Flask("shop"), SQLAlchemy()
        self.app.config.update(
            SQLALCHEMY_DATABASE_URI=url,
            SQLALCHEMY_ENGINE_OPTIONS={"connect_args": {"connect_timeout": 2}},
            IDEMPOTENCY_MAX_RESPONSE_BYTES=1000,
        )
        self.db.init_app(self.app)
        Idempotency(self.app, self.db, scope=lambda: request.headers.get("X-User"))

        @self.app.post("/payments")
        @idempotent
        def pay() -> Any:
            if request.headers["Idempotency-Key"] == "still-running":
                self.running.set()
                self.go_on.wait(20)
            answer = {"id": 1, "amount": request.get_json()["amount"]}
            return answer, 201, {"Location": "/payments/1"}

        @self.app.post("/transfers")
        @idempotent(fingerprint="json")
        def transfer() -> Any:
            return {}

        @self.app.post("/withdrawals")
        @idempotent(authorize_replay=lambda operation: self.allowed)
        def withdraw() -> Any:
            return {}

        @self.app.post("/reports")
        @idempotent
        def report() -> Any:
            return "x" * 2000, 201, {"Location": "/reports/1"}

        @self.app.post("/conflicts")
        @idempotent
        def conflict() -> Any:
            raising = "DO $$ BEGIN RAISE EXCEPTION USING ERRCODE = '40001'; END $$"
            self.db.session.execute(sa.text(raising))
            return {}

        self.add_leased_views()
        self.app.register_blueprint(outcomes_blueprint())
        if create:
            with self.app.app_context():
                self.db.create_all()

    def add_leased_views(self) -> None:
        """Views that are not atomic."""

        @self.app.post("/charges")
        @idempotent(atomic=False)
        def charge() -> Any:
            if request.headers["Idempotency-Key"] == "busy-1":
                raise Retryable("The payment provider is busy.", retry_after=5)
            raise Killed

        @self.app.post("/donations")
        @idempotent(atomic=False, on_interrupted="fail")
        def donate() -> Any:
            raise Killed

    def end_leases(self) -> None:
        """As if so much time had passed."""
        end = sa.text("UPDATE idempotency_record SET lease_expires_at = clock_timestamp()")
        with self.app.app_context(), self.db.engine.begin() as connection:
            connection.execute(end)

    def ask(self, message: str, *, given: str) -> Any:
        """Send a request, after the situation that the page gives."""
        match given.partition(";")[0]:
            case (
                ""
                | "the view meets a serialization failure"
                | 'the view raises Retryable("The payment provider is busy.", retry_after=5)'
            ):
                return self.send(message)
            case "a finished request with this key":
                assert self.send(message).status_code < 300
                self.allowed = False
                return self.send(message)
            case "the first request with this key is still running":
                first = threading.Thread(target=self.send, args=[message])
                first.start()
                assert self.running.wait(20)
                try:
                    return self.send(message)
                finally:
                    self.go_on.set()
                    first.join()
            case "PostgreSQL cannot be reached":
                nowhere = f"postgresql+psycopg2://shop@127.0.0.1:{servers.free_port()}/shop"
                return Shop(nowhere, create=False).send(message)
            case "the first request with this key was killed in the view":
                with pytest.raises(Killed):
                    self.send(message)
                self.end_leases()
                return self.send(message)
        raise AssertionError(f"no way to get there: {given}")

    def send(self, message: str) -> Any:
        """Send a request as it stands on the page."""
        first, headers, body = parsed(message)
        method, path, _ = first.split()
        length = headers.pop("Content-Length", None)
        environ = {} if length is None else {"CONTENT_LENGTH": length}
        return self.app.test_client().open(
            path, method=method, headers=headers, data=body, environ_overrides=environ
        )

    def close(self) -> None:
        """Give the connections back."""
        with self.app.app_context():
            self.db.engine.dispose()


class TestConfiguration:
    """The lists of the page are what the library reads."""

    def test_every_setting_is_listed_once(self):
        listed = [entry.name for entry in reference().settings()]
        assert listed == ["IDEMPOTENCY_" + field.upper() for field in Settings.__annotations__]
        assert len(set(listed)) == len(SETTINGS)

    def test_every_option_is_listed_once_and_has_its_words(self):
        entries = list(reference().options())
        assert [entry.name for entry in entries] == list(RouteOptions.__annotations__)
        assert all(entry.meaning and entry.allowed and entry.default for entry in entries)

    def test_the_page_shows_both_lists(self):
        text = (ROOT / "docs/configuration.md").read_text(encoding="utf-8")
        assert text.count("```{settings}") == text.count("```{options}") == 1

    @pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=name_of)
    def test_no_page_names_a_setting_or_a_command_that_is_not_there(self, page):
        text = page.read_text(encoding="utf-8")
        settings = set(re.findall(r"\bIDEMPOTENCY_[A-Z_]*[A-Z]", text))
        assert settings <= {"IDEMPOTENCY_" + setting.name for setting in SETTINGS}
        assert set(re.findall(r"flask idempotency ([a-z-]+)", text)) <= set(cli.commands)


def reference() -> Any:
    """The Sphinx extension that makes the lists, without Sphinx."""
    path = ROOT / "docs/_ext/reference.py"
    spec = importlib.util.spec_from_file_location("reference", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with patch.dict(sys.modules, {"reference": module, **_without_sphinx()}):
        spec.loader.exec_module(module)
    return module


def _without_sphinx() -> dict[str, Any]:
    """What the extension imports for its directives only; the tests do without Sphinx."""
    names = ("docutils", "docutils.nodes", "sphinx", "sphinx.application", "sphinx.util",
             "sphinx.util.docutils")  # fmt: skip
    stubs: dict[str, Any] = {name: types.ModuleType(name) for name in names}
    stubs["docutils"].nodes = stubs["docutils.nodes"]
    stubs["sphinx.application"].Sphinx = object
    stubs["sphinx.util.docutils"].SphinxDirective = object
    return stubs


def test_the_api_page_has_every_public_name():
    text = (ROOT / "docs/api.md").read_text(encoding="utf-8")
    shown = re.findall(
        r"(?m)^\.\. (?:py:|auto)(?!currentmodule)\w+:: (?:flask_idempotency\.)?([\w.]+)", text
    )
    elsewhere = {"idempotency_field", *(name for name in shown if "." in name)}
    assert sorted(set(shown) - elsewhere) == sorted(flask_idempotency.__all__)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_page_is_in_the_map(page):
    """Sphinx would say so too, but not in the words of the front page."""
    if page.parent == ROOT / "docs" and page.name != "index.md":
        assert f"({page.name})" in (ROOT / "docs/index.md").read_text(encoding="utf-8")


def test_the_guarantees_name_only_tests_that_exist():
    text = (ROOT / "docs/guarantees.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(tests/[\w/.]+)`", text))
    assert named
    assert {name for name in named if not (ROOT / name).is_file()} == set()


class TestMessages:
    """The table of the page "Life of a request" is counted, not believed."""

    def test_its_numbers_are_those_of_the_servers(self, postgres, redis_server):
        if not postgres.controllable:
            pytest.skip("a server that the environment names does not show its log")
        text = (ROOT / "docs/request.md").read_text(encoding="utf-8")
        table = text.partition("<!-- counted -->\n")[2].partition("\n\n")[0]
        rows = [row.strip("| ").split(" | ") for row in table.splitlines()[2:]]
        shown = [(int(redis), int(hybrid), int(alone)) for _, redis, hybrid, alone in rows]
        bare = Counter(postgres, redis_server, store=None).count_all()
        hybrid = Counter(postgres, redis_server, store="hybrid").count_all()
        alone = Counter(postgres, redis_server, store="postgres").count_all()
        real = [(*bare[0], bare[0][1])]
        real += [(*both, single[1]) for both, single in zip(hybrid, alone, strict=True)]
        assert real == shown


class Counter:
    """Counts the messages of each situation of the table, in its order."""

    def __init__(self, postgres: Any, redis_server: Any, store: str | None) -> None:
        self._postgres, self._store = postgres, store
        self._redis = redis.Redis.from_url(redis_server.url)
        self._running, self._go_on = threading.Event(), threading.Event()
        self._app, db = Flask("counted"), SQLAlchemy()
        url = postgres.database(f"docs_count_{store or 'bare'}")
        self._app.config["SQLALCHEMY_DATABASE_URI"] = url
        self._app.config["SQLALCHEMY_ENGINE_OPTIONS"] = {
            "connect_args": {"options": "-c log_statement=all"}
        }
        db.init_app(self._app)
        protect: Any = lambda view: view  # noqa: E731
        if store:
            if store == "hybrid":
                self._app.config["IDEMPOTENCY_REDIS_URL"] = redis_server.url
            Idempotency(self._app, db, scope=None)
            protect = idempotent

        class Payment(db.Model):  # type: ignore[name-defined, misc]
            id = sa.Column(sa.Integer, primary_key=True)
            amount = sa.Column(sa.Integer, nullable=False)

        @self._app.post("/payments")
        @protect
        def pay() -> Any:
            payment = Payment(amount=request.get_json()["amount"])
            db.session.add(payment)
            db.session.commit()
            number = payment.id
            key = request.headers["Idempotency-Key"].strip('"')
            if key == "failing" and current_operation.attempt == 1:
                return {"error": "at first"}, 500
            if key.startswith("running"):
                self._running.set()
                self._go_on.wait(20)
            return {"id": number}, 201

        self._db = db
        with self._app.app_context():
            db.create_all()

    def count_all(self) -> list[tuple[int, int]]:
        """Redis and Postgres messages of each row."""
        self._send("warm up")
        counts = [self._count("first", 201)]
        if self._store:
            counts += [self._count("first", 201), self._count("first", 422, amount=6)]
            counts += [self._duplicate("running-1", age=0), self._duplicate("running-2", age=1.1)]
            assert self._send("failing") == 500
            counts += [self._count("failing", 201)]
        with self._app.app_context():
            self._db.engine.dispose()
        return counts

    def _duplicate(self, key: str, *, age: float) -> tuple[int, int]:
        self._running.clear()
        self._go_on.clear()
        first = threading.Thread(target=self._send, args=[key])
        first.start()
        assert self._running.wait(20)
        time.sleep(age)
        try:
            return self._count(key, 409)
        finally:
            self._go_on.set()
            first.join()

    def _count(self, key: str, status: int, amount: int = 5) -> tuple[int, int]:
        log, calls = len(self._postgres.log), self._redis_calls()
        assert self._send(key, amount) == status
        statements = self._postgres.log[log:].count("LOG:  statement: ")
        return self._redis_calls() - calls, statements

    def _redis_calls(self) -> int:
        return self._redis.info("commandstats").get("cmdstat_eval", {"calls": 0})["calls"]

    def _send(self, key: str, amount: int = 5) -> int:
        return (
            self._app.test_client()
            .post("/payments", json={"amount": amount}, headers={"Idempotency-Key": f'"{key}"'})
            .status_code
        )
