"""The files of ``docs/go-live.md`` and ``docs/runbook.md`` work, and their numbers fit each other."""

from __future__ import annotations

import os
import re
import runpy
import signal
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import yaml

from flask_idempotency.client import IdempotentSession
from flask_idempotency.client.attempts import LONGEST
from flask_idempotency.web.settings import Settings
from tests.docs.pages import ROOT, blocks
from tests.integration.conftest import clients, open_shop  # noqa: F401 -- fixtures
from tests.integration.shops import HELD
from tests.waiting import wait_until

DEPLOY = ROOT / "docs/go-live.md"


@pytest.fixture
def conf(tmp_path) -> Path:
    """The page's configuration of gunicorn, as a file."""
    [block] = [block for block in blocks(DEPLOY, "python") if block.mark == "file: gunicorn.conf.py"]
    path = tmp_path / "gunicorn.conf.py"
    path.write_text(block.text)
    return path


def test_its_logs_show_a_takeover_and_a_replay_and_on_sigterm_a_request_gets_its_response(
    open_shop,  # noqa: F811
    clients,  # noqa: F811
    conf,
    capfd,
):
    shop = open_shop("--config", str(conf))
    first = clients.submit(shop.pay, "key-1", HELD)
    shop.arrived.read_text()
    for worker in psutil.Process(shop.pid).children():
        worker.kill()
    assert first.exception() is not None
    shop.pay_for_sure("key-1", HELD, may_break=True)
    assert shop.pay("key-1", HELD).status == 201
    written = SimpleNamespace(out="", err="")

    def is_found(pattern: str) -> bool:
        new = capfd.readouterr()
        written.out, written.err = written.out + new.out, written.err + new.err
        return bool(re.search(pattern, written.out + written.err, re.MULTILINE))

    taken_over = r"^\d{4}-\d\d-\d\d \S+ INFO flask_idempotency operation .* taken-over: attempt 2"
    wait_until(lambda: is_found(taken_over), "the log has the line, with its time")
    wait_until(lambda: is_found(rf'"POST {HELD}" 201 \d+ms replayed=true$'), "there is the replay")
    assert re.search(rf'"POST {HELD}" 201 \d+ms replayed=-$', written.out, re.MULTILINE)
    assert "key-1" not in written.out
    last = clients.submit(shop.pay, "key-2", HELD)
    shop.arrived.read_text()
    os.kill(shop.pid, signal.SIGTERM)
    shop.go_on.write_text("go on")
    assert last.result().status == 201


def test_the_numbers_of_the_page_fit_each_other(conf):
    """Each time-out of the table is that of its configuration."""
    app = SimpleNamespace(config={})
    [code] = [block.text for block in blocks(DEPLOY, "python") if "pool_size" in block.text]
    exec(code, {"app": app})  # noqa: S102
    engine, settings = app.config["SQLALCHEMY_ENGINE_OPTIONS"], runpy.run_path(str(conf))
    connect = engine["connect_args"]
    [text] = [block.text for block in blocks(DEPLOY, "yaml")]
    spec = yaml.safe_load(text)["spec"]
    threads, workers, hosts = settings["threads"], settings["workers"], spec["replicas"] + 1
    assert engine["pool_size"] == threads
    said = f"({threads} + 4) × {workers} × {hosts} + 3 + 3 = {(threads + 4) * workers * hosts + 6}"
    page = DEPLOY.read_text("utf-8")
    assert said in page
    pod = spec["template"]["spec"]
    [container] = pod["containers"]
    seconds = int(container["lifecycle"]["preStop"]["exec"]["command"][-1])
    assert pod["terminationGracePeriodSeconds"] > settings["graceful_timeout"] + seconds
    table = page.partition("(who-waits)=")[2].partition("\n- **")[0]
    cells = [line.split("|") for line in table.splitlines() if line.startswith("| ")]
    good = {cell[3].replace("{confval}", "").strip(" `"): cell[4].strip() for cell in cells}
    shown = {name: int(text[:-2]) for name, text in good.items() if re.fullmatch(r"\d+ s", text)}
    attempt = IdempotentSession().timeout
    real = {
        **{name: int(value) for name, value in re.findall(r"(\w+_timeout)=(\d+)", connect["options"])},
        **{name: settings[name] for name in ("timeout", "graceful_timeout")},
        "pool_timeout": engine["pool_timeout"],
        "connect_timeout": connect["connect_timeout"],
        "tcp_user_timeout": connect["tcp_user_timeout"] / 1000,
        "IDEMPOTENCY_LEASE": Settings.lease,
        "timeout` of [our sessions](clients.md)": attempt,
    }
    assert {name: shown.get(name) for name in real} == real
    assert Settings.lease > settings["timeout"]
    assert shown["ttl"] + attempt + LONGEST < shown["deadline` of our sessions"]


def test_the_statement_for_pg_cron_deletes_what_the_command_would(world, add_view):
    """Not what runs, is interrupted, or lives."""
    [block] = [block.text for block in blocks(ROOT / "docs/runbook.md", "postgres")]
    statement = block.split("$job$")[1]
    add_view(world)
    for key in "expired", "alive", "interrupted":
        world.post(key=key)
    oldest = "key = (select key from idempotency_record order by created_at {} limit 1)"
    past = "update idempotency_record set expires_at = now() - interval '1 hour'"
    world.sql(f"{past} where {oldest.format('asc')}")
    world.sql(f"{past}, lease_expires_at = now() where {oldest.format('desc')}")
    for _ in range(2):
        world.sql(statement)
        assert world.sql("select count(*) from idempotency_record") == [(2,)]
