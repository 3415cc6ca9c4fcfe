"""The files of ``docs/go-live.md`` and ``docs/runbook.md`` work, and their numbers fit each other."""

from __future__ import annotations

import os
import re
import runpy
import signal
from typing import Any

import psutil
import pytest
import yaml

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


def test_on_sigterm_a_running_request_gets_its_response(open_shop, clients, conf):  # noqa: F811
    shop = open_shop("--config", str(conf))
    first = clients.submit(shop.pay, "key-1", HELD)
    shop.arrived.read_text()
    os.kill(shop.pid, signal.SIGTERM)
    shop.go_on.write_text("go on")
    assert first.result().status == 201
    promises_hold(shop, {"key-1": [first.result()]})


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


@pytest.fixture
def settings(conf) -> dict[str, Any]:
    return runpy.run_path(str(conf))


@pytest.fixture
def engine() -> dict[str, Any]:
    """The page's options of the engine."""
    app = type("App", (), {"config": {}})
    [code] = [b.text for b in blocks(DEPLOY, "python") if "pool_size" in b.text]
    exec(code, {"app": app})  # noqa: S102
    return app.config["SQLALCHEMY_ENGINE_OPTIONS"]


def test_the_numbers_of_the_pages_fit_each_other(settings, engine):
    [text] = [block.text for block in blocks(DEPLOY, "yaml")]
    spec = yaml.safe_load(text)["spec"]
    pod = spec["template"]["spec"]
    [container] = pod["containers"]
    threads, workers, hosts = settings["threads"], settings["workers"], spec["replicas"] + 1
    assert engine["pool_size"] == threads
    said = f"({threads} + 4) × {workers} × {hosts} + 3 + 3 = {(threads + 4) * workers * hosts + 6}"
    assert said in DEPLOY.read_text("utf-8")
    assert Settings.lease > settings["timeout"]
    seconds = int(container["lifecycle"]["preStop"]["exec"]["command"][-1])
    assert pod["terminationGracePeriodSeconds"] > settings["graceful_timeout"] + seconds
    connect, probe = engine["connect_args"], container["livenessProbe"]
    longest = connect["tcp_user_timeout"] / 1000 + connect["connect_timeout"] + engine["pool_timeout"]
    assert probe["periodSeconds"] * probe["failureThreshold"] > longest
    silence = (RECIPES / "silent-server.md").read_text("utf-8").partition("SILENCE_SECONDS = ")[2]
    limit = re.search(r"statement_timeout=(\d+)s", connect["options"])
    assert int(silence.split()[0]) > int(limit[1])


def test_the_table_of_time_outs_has_the_numbers_of_the_configurations(settings, engine):
    """And each is shorter than what waits for it."""
    table = DEPLOY.read_text("utf-8").partition("(who-waits)=")[2].partition("\n- **")[0]
    rows = [line.split("|") for line in table.splitlines() if line.startswith("| ")]
    good = {row[3].replace("{confval}", "").strip(" `"): row[4].strip() for row in rows}
    shown = {name: int(text[:-2]) for name, text in good.items() if re.fullmatch(r"\d+ s", text)}
    connect = engine["connect_args"]
    real = {name: int(value) for name, value in re.findall(r"(\w+_timeout)=(\d+)", connect["options"])}
    real |= {name: settings[name] for name in ("timeout", "graceful_timeout")}
    real |= {"pool_timeout": engine["pool_timeout"], "connect_timeout": connect["connect_timeout"]}
    real |= {
        "tcp_user_timeout": connect["tcp_user_timeout"] / 1000,
        "IDEMPOTENCY_LEASE": Settings.lease,
    }
    attempt, deadline = IdempotentSession().timeout, shown["deadline` of our sessions"]
    real["timeout` of [our sessions](clients.md)"] = attempt
    assert {name: shown.get(name) for name in real} == real
    waits = engine["pool_timeout"], shown["tcp_user_timeout"] + shown["connect_timeout"]
    assert max(*waits, 2 * shown["query_wait_timeout"]) < attempt
    inside_out = ["statement_timeout", "timeout", "proxy_read_timeout", "deadline` of our sessions"]
    assert sorted(inside_out, key=shown.__getitem__) == inside_out
    left = shown["ttl"] - int(good["loop_wait`, `retry_timeout"].split()[0])  # of the lease, at worst
    ends = ("statement_timeout", "idle_in_transaction_session_timeout", "transaction_timeout")
    assert max(shown[name] for name in ends) < left
    inter, check, fall, _ = map(int, re.findall(r"\d+", good["inter`, `timeout check`, `fall`, `rise"]))
    assert fall * (inter + check) < left
    cluster = (ROOT / "docs/failover.md").read_text("utf-8")
    assert f"timeout check {check}s\n" in cluster
    assert f"default-server inter {inter}s fall {fall} rise" in cluster
    assert shown["ttl"] + attempt + LONGEST < deadline


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
