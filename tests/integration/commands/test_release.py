"""``flask idempotency show`` and ``release``: the ways out for operators."""

from __future__ import annotations

import json

import pytest

from flask_idempotency import current_operation, idempotent
from flask_idempotency.cli import cli
from tests.killed import Killed


@pytest.fixture
def config():
    return {}


@pytest.fixture
def world(make_world, probing_at_once, config):
    return make_world(PROPAGATE_EXCEPTIONS=False, **config)


@pytest.fixture
def run(world):
    """Runs a command of ``flask idempotency``; gives its output."""

    def run(*arguments, fails=False):
        result = world.app.test_cli_runner().invoke(cli, arguments)
        if result.exception and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert (result.exit_code != 0) is fails, result.output
        return result.output

    return run


@pytest.fixture
def interrupted(world):
    """A function that adds a view, which is killed after its first step in its first attempt."""

    def make(headers=None, **options):
        calls = []

        def charge():
            result = current_operation.step("charge", lambda: calls.append(1) or "charged")
            if current_operation.attempt == 1:
                raise Killed
            return {"result": result, "attempt": current_operation.attempt}, 201

        view = idempotent(atomic=False, **options)(charge)
        world.app.add_url_rule("/payments", "charge", view, methods=["POST"])
        with pytest.raises(Killed):
            world.post(key="canary", headers=headers or {})
        return calls

    return make


def digits(run, **expected):
    (line,) = json.loads(run("list", "--json"))
    assert {name: line[name] for name in expected} == expected
    return line["key"]


def test_show_tells_how_far_it_came(run, interrupted):
    interrupted()
    key = digits(run, state="interrupted", attempt=1)
    shown = run("show", key)
    assert "interrupted" in shown
    assert "charge " in shown.splitlines()[4]
    assert "canary" not in shown
    (record,) = json.loads(run("show", key, "--json"))
    assert [step["name"] for step in record["steps"]] == ["charge"]
    assert run("list", "--state", "interrupted").count(key) == 1
    assert "no records" in run("list", "--state", "in_progress")


def test_release_lets_it_run_again_without_its_finished_steps(world, run, interrupted):
    calls = interrupted()
    assert world.post(key="canary").status_code == 409
    key = digits(run, state="interrupted", expires=None)
    assert "may be run again" in run("release", "--why=asked", key)
    assert run("list", "--state", "interrupted").count(key) == 1
    assert world.post(key="canary").json == {"result": "charged", "attempt": 2}
    assert calls == [1]
    key = digits(run, state="completed")
    assert "is completed: only what is interrupted or failed" in run(
        "release", "--why=asked", key, fails=True
    )


def test_release_as_failed_is_for_good(world, run, interrupted, store):
    interrupted()
    key = digits(run, state="interrupted")
    assert "failed for good" in run("release", "--why=asked", key, "--fail")
    answers = [world.post(key="canary") for _ in range(2)]
    assert [answer.status_code for answer in answers] == [500, 500]
    assert answers[0].json["type"].endswith("operation-failed")
    assert "may be run again" in run("release", "--why=asked", digits(run, state="failed"))
    assert world.post(key="canary").json["attempt"] == 2


def test_what_is_released_is_out_of_its_holders_hands(world, run):
    def charge():
        world.sql("update idempotency_record set lease_expires_at = clock_timestamp()")
        run("release", "--why=asked", digits(run, state="interrupted"))
        return {}, 201

    world.app.add_url_rule("/payments", "charge", idempotent(atomic=False)(charge), methods=["POST"])
    assert world.post().status_code == 409


def test_a_record_that_is_not_there_is_named(run, interrupted):
    assert "there is no record whose digits are 0123abcd" in run("show", "0123abcd", fails=True)
    assert "there is no record whose digits are 0123abcd" in run("show", "0123ABCD", fails=True)
    for wrong in ("", "0123abc", "0123abcde", "%" * 8):
        assert "DIGITS are the 8 digits" in run("show", wrong, fails=True)
