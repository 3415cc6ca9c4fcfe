"""The files of ``docs/go-live.md`` and ``docs/runbook.md`` work, and their numbers fit each other."""

from __future__ import annotations

import configparser
import os
import re
import runpy
import shlex
import signal
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from flask_idempotency.cli import cli
from flask_idempotency.client import IdempotentSession
from flask_idempotency.client.attempts import LONGEST
from flask_idempotency.web.settings import Settings
from laboratory import running
from tests.docs.pages import RECIPES, ROOT, blocks
from tests.integration.conftest import clients, open_shop  # noqa: F401 -- fixtures
from tests.integration.shops import HELD, promises_hold
from tests.waiting import wait_until

DEPLOY, PURGE = ROOT / "docs/go-live.md", ROOT / "docs/runbook.md"


MOUNTED = """
def post_worker_init(worker):
    from flask import Response
    from werkzeug.middleware.dispatcher import DispatcherMiddleware

    worker.wsgi = DispatcherMiddleware(worker.wsgi, {"/metrics": Response("")})
"""


@pytest.fixture
def conf(tmp_path) -> Any:
    """The page's configuration of gunicorn, as a file."""
    [block] = [block for block in blocks(DEPLOY, "python") if block.mark == "file: gunicorn.conf.py"]
    path = tmp_path / "gunicorn.conf.py"
    path.write_text(block.text)
    return path


def deployment() -> dict[str, Any]:
    [text] = [block.text for block in blocks(DEPLOY, "yaml")]
    return yaml.safe_load(text)


def service() -> str:
    [text] = [block.text for block in blocks(DEPLOY, "ini")]
    return text


def unit(text: str) -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None)
    parser.optionxform = str
    parser.read_string(text)
    return parser


def test_on_sigterm_a_running_request_gets_its_response(open_shop, clients, conf):  # noqa: F811
    shop = open_shop("--config", str(conf))
    first = clients.submit(shop.pay, "key-1", HELD)
    shop.arrived.read_text()
    os.kill(shop.pid, signal.SIGTERM)
    shop.go_on.write_text("go on")
    assert first.result().status == 201
    promises_hold(shop, {"key-1": [first.result()]})


def test_a_request_that_outlives_the_graceful_timeout_is_rolled_back(open_shop, clients, conf):  # noqa: F811
    shop = open_shop("--config", str(conf), "--graceful-timeout", "1")
    first = clients.submit(shop.pay, "key-1", HELD)
    shop.arrived.read_text()
    os.kill(shop.pid, signal.SIGTERM)
    assert first.exception() is not None
    other = open_shop("--config", str(conf), database_url=shop.database_url)
    (*_, retry) = other.pay_for_sure("key-1", HELD)
    assert '"attempt":2' in retry.body
    promises_hold(other, {"key-1": [retry]})


def test_the_logging_of_the_page_shows_what_happens(open_shop, clients, conf, capfd):  # noqa: F811
    """A take-over, at ``INFO``: after a worker that was killed. Each line has its time and name."""
    shop = open_shop("--config", str(conf))
    first = clients.submit(shop.pay, "key-1", HELD)
    shop.arrived.read_text()
    for worker in psutil.Process(shop.pid).children():
        worker.kill()
    assert first.exception() is not None
    shop.pay_for_sure("key-1", HELD, may_break=True)
    written = [""]

    def lines() -> list[str]:
        written[0] += capfd.readouterr().err
        return [line for line in written[0].splitlines() if "taken-over: attempt 2" in line]

    wait_until(lines, "the log has its line")
    [line] = lines()
    assert re.match(r"\d{4}-\d\d-\d\d \S+ INFO flask_idempotency operation ", line)


def test_the_access_log_of_the_page_tells_replays_apart(
    open_shop,  # noqa: F811
    conf,
    capfd,
    tmp_path,
    monkeypatch,
):
    """What is mounted beside the application keeps its path. And no control socket is made."""
    with conf.open("a") as file:
        file.write(MOUNTED)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    shop = open_shop("--config", str(conf))
    for _ in range(2):
        assert shop.pay("key-1").status == 201
    assert running.send(shop.url, "GET", "/metrics?x=1", {}).status == 200
    written = [""]

    def lines() -> list[str]:
        written[0] += capfd.readouterr().out
        return re.findall(r'\S+ "POST /payments" 201 \d+ms replayed=(\S+)$', written[0], re.MULTILINE)

    wait_until(lambda: len(lines()) == 2, "the access log has both")
    wait_until(lambda: lines() and '"GET /metrics" 200' in written[0], "it has the path of the scrape")
    assert lines() == ["-", "true"]
    assert "key-1" not in written[0]
    assert not (tmp_path / "home").exists()


def test_whoever_ends_gunicorn_waits_longer_than_gunicorn_does(conf):
    graceful = runpy.run_path(str(conf))["graceful_timeout"]
    pod = deployment()["spec"]["template"]["spec"]
    (_, seconds) = pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    assert pod["terminationGracePeriodSeconds"] > graceful + int(seconds)
    assert int(unit(service())["Service"]["TimeoutStopSec"]) > graceful


def test_the_numbers_of_the_pages_fit_each_other(conf):
    """Threads and pool; the lease and the time-out of a worker; the probe and the time-outs."""
    settings = runpy.run_path(str(conf))
    app = type("App", (), {"config": {}})
    [code] = [b.text for b in blocks(DEPLOY, "python") if "pool_size" in b.text]
    exec(code, {"app": app})  # noqa: S102
    engine = app.config["SQLALCHEMY_ENGINE_OPTIONS"]
    assert engine["pool_size"] == settings["threads"]
    workers, hosts = settings["workers"], deployment()["spec"]["replicas"] + 1  # one during a rollout
    all_of_them = (settings["threads"] + 4) * workers * hosts + 3 + 3
    said = f"({settings['threads']} + 4) × {workers} × {hosts} + 3 + 3 = {all_of_them}"
    assert said in DEPLOY.read_text("utf-8")
    assert Settings.lease > settings["timeout"]
    [waits] = [b.text for b in blocks(RECIPES / "silent-server.md", "python") if "set_wait" in b.text]
    silence, statement = (
        int(re.search(pattern, text)[1])
        for pattern, text in (
            (r"SILENCE_SECONDS = (\d+)", waits),
            (r"statement_timeout=(\d+)s", engine["connect_args"]["options"]),
        )
    )
    assert silence > statement
    probe = deployment()["spec"]["template"]["spec"]["containers"][0]["livenessProbe"]
    longest = (
        engine["connect_args"]["tcp_user_timeout"] / 1000 + engine["connect_args"]["connect_timeout"]
    )
    assert probe["periodSeconds"] * probe["failureThreshold"] > longest + engine["pool_timeout"]


def test_the_table_of_time_outs_has_the_numbers_of_the_configurations(conf):
    """And each is shorter than what waits for it."""
    settings = runpy.run_path(str(conf))
    app = type("App", (), {"config": {}})
    [code] = [b.text for b in blocks(DEPLOY, "python") if "pool_size" in b.text]
    exec(code, {"app": app})  # noqa: S102
    engine = app.config["SQLALCHEMY_ENGINE_OPTIONS"]
    connect = engine["connect_args"]
    table = DEPLOY.read_text("utf-8").partition("(who-waits)=")[2].partition("\n- **")[0]
    good = {
        row[3].replace("{confval}", "").strip(" `"): row[4].strip()
        for row in (line.split("|") for line in table.splitlines() if line.startswith("| "))
    }

    def seconds(name):
        return int(re.fullmatch(r"(\d+) s", good[name])[1])

    limits = {name: int(value) for name, value in re.findall(r"(\w+)=(\d+)", connect["options"])}
    assert [seconds("timeout"), seconds("graceful_timeout")] == [
        settings["timeout"],
        settings["graceful_timeout"],
    ]
    assert seconds("pool_timeout") == engine["pool_timeout"]
    assert seconds("connect_timeout") == connect["connect_timeout"]
    assert seconds("tcp_user_timeout") * 1000 == connect["tcp_user_timeout"]
    for name in ("statement_timeout", "idle_in_transaction_session_timeout"):
        assert seconds(name) == limits[name]
    assert seconds("IDEMPOTENCY_LEASE") == Settings.lease
    attempt, deadline = IdempotentSession().timeout, seconds("deadline` of our sessions")
    assert seconds("timeout` of [our sessions](clients.md)") == attempt
    assert (
        max(engine["pool_timeout"], seconds("tcp_user_timeout") + seconds("connect_timeout")) < attempt
    )
    assert 2 * seconds("query_wait_timeout") < attempt
    inside_out = ["statement_timeout", "timeout", "proxy_read_timeout", "deadline` of our sessions"]
    assert sorted(inside_out, key=seconds) == inside_out
    left = seconds("ttl") - int(good["loop_wait`, `retry_timeout"].split()[0])  # of the lease, at worst
    ends = ("statement_timeout", "idle_in_transaction_session_timeout", "transaction_timeout")
    assert max(map(seconds, ends)) < left
    checks = re.findall(r"\d+", good["inter`, `timeout check`, `fall`, `rise"])
    inter, check, fall, _rise = map(int, checks)
    assert fall * (inter + check) < left
    cluster = (ROOT / "docs/failover.md").read_text("utf-8")
    assert f"timeout check {check}s\n" in cluster
    assert f"default-server inter {inter}s fall {fall} rise" in cluster
    assert seconds("ttl") + attempt + LONGEST < deadline


def test_the_service_has_what_systemd_needs_and_runs_programs_that_exist():
    parsed = unit(service())
    assert parsed["Unit"]["Description"]
    for name in "ExecStartPre", "ExecStart":
        program, *arguments = shlex.split(parsed["Service"][name])
        assert program.startswith("/")  # systemd asks for it
        assert (Path(sys.executable).parent / Path(program).name).exists()
        the_command_exists(arguments)


def the_command_exists(arguments: list[str]) -> None:
    if "idempotency" in arguments:
        assert arguments[arguments.index("idempotency") + 1] in cli.commands


def test_what_kubernetes_runs_exists():
    spec = deployment()["spec"]
    for container in spec["template"]["spec"]["initContainers"]:
        the_command_exists(container["command"])
    assert spec["selector"]["matchLabels"].items() <= spec["template"]["metadata"]["labels"].items()


def test_the_line_for_cron_has_its_fields_and_runs_a_command_that_exists():
    [line] = [block.text for block in blocks(PURGE, "text") if "/venv/" in block.text]
    *when, user, command = line.split(maxsplit=6)
    assert all(re.fullmatch(r"\d+|\*", field) for field in when)
    assert user == "shop"
    assert ". /etc/shop.env" in command  # cron gives the command no environment of its own
    the_command_exists(shlex.split(command))


def test_the_command_by_hand_has_the_environment_of_the_service():
    [line] = [block.text for block in blocks(DEPLOY, "bash")]
    (*_, script) = shlex.split(line)
    assert f". {unit(service())['Service']['EnvironmentFile']};" in script
    the_command_exists(shlex.split(script))


def test_the_statement_for_pg_cron_deletes_what_the_command_would(world, add_view):
    """Not what runs, is interrupted, or lives."""
    [block] = [block.text for block in blocks(PURGE, "postgres")]
    statement = block.split("$job$")[1]
    runs = add_view(world)
    for key in "expired", "alive", "running":
        world.post(key=key)
    oldest = "key = (select key from idempotency_record order by created_at {} limit 1)"
    past = "update idempotency_record set expires_at = now() - interval '1 hour'"
    world.sql(f"{past} where {oldest.format('asc')}")
    world.sql(f"{past}, lease_expires_at = now() where {oldest.format('desc')}")
    world.sql(statement)
    assert len(runs) == 3
    assert world.sql("select count(*) from idempotency_record") == [(2,)]
    world.sql(statement)
    assert world.sql("select count(*) from idempotency_record") == [(2,)]
