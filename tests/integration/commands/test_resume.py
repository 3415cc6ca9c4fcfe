"""``flask idempotency show``, ``release`` and ``resume``: the ways out for operators."""

from __future__ import annotations

import json
import time

import pytest
from flask import request
from werkzeug.http import http_date

from flask_idempotency import Retryable, current_operation, idempotent
from flask_idempotency.cli import cli
from tests.killed import Killed
from tests.web.leased.records import begun


@pytest.fixture
def config():
    return {}


@pytest.fixture
def world(make_world, config):
    return make_world(IDEMPOTENCY_PROBE_AFTER=0, PROPAGATE_EXCEPTIONS=False, **config)


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


def resume(run, *arguments):
    output = run("resume", "--backoff", "0.1", "--json", *arguments)
    return [(line["operation"], line["attempt"], line["status"]) for line in json.loads(output)]


def make_due(world):
    world.sql("update idempotency_record set created_at = created_at - interval '1 hour',"
              " lease_expires_at = lease_expires_at - interval '1 hour',"
              " completed_at = completed_at - interval '1 hour',"
              " tried_at = tried_at - interval '1 hour'")  # fmt: skip


def test_resume_finishes_what_was_abandoned(world, run, interrupted):
    calls = interrupted(resumable=["X-User"], on_interrupted="retry")
    make_due(world)
    assert resume(run) == [("charge", 1, 201)]
    assert resume(run) == []
    answer = world.post(key="canary")
    assert answer.json == {"result": "charged", "attempt": 2}
    assert answer.headers["Idempotent-Replayed"] == "true"
    assert calls == [1]
    assert world.records()[0].request is None


def test_who_is_not_signed_in_without_the_headers_is_told_so(world, run, interrupted):
    interrupted(resumable=True, on_interrupted="retry")
    make_due(world)
    assert resume(run) == [("charge", 1, 401)]


def test_an_operation_that_is_held_stays_held(world, run, interrupted):
    interrupted(resumable=["X-User"])
    make_due(world)
    assert resume(run) == [("charge", 1, 409)]
    assert digits(run, state="interrupted", attempt=1)


def test_one_that_began_too_long_ago_waits_for_an_operator(world, run, interrupted):
    calls = interrupted(resumable=["X-User"], on_interrupted="retry", ttl=7200)
    make_due(world)
    begun(world, ago="3 hours")
    assert resume(run) == [("charge", 1, 409)]
    old = digits(run, state="interrupted", attempt=1)
    run("release", old, "--not-done", "--why", "no charge there")
    make_due(world)
    assert resume(run) == [("charge", 1, 201)]
    assert calls == [1]


@pytest.mark.parametrize("config", [{}, {"IDEMPOTENCY_ENCRYPTION_KEYS": [b"k" * 32]}])
def test_the_request_is_sent_again_as_it_was(world, run, config):
    seen = []

    @world.app.post("/shops/<name>/payments")
    @idempotent(atomic=False, resumable=["authorization", "X-User"], on_interrupted="retry")
    def charge(name):
        seen.append(
            (name, request.query_string, request.get_data(), dict(request.headers), request.url)
        )
        if len(seen) == 1:
            raise Retryable
        return {}, 201

    world.post(
        "/shops/a b/payments?x=1&x=%2f",
        key="canary",
        data=b"\x00body\n",
        headers={"Authorization": "Bearer canary", "Content-Type": "x/y", "Cookie": "no"},
    )
    stored = bytes(world.records()[0].request)
    assert (b"canary" in stored) is not bool(config)
    make_due(world)
    assert resume(run) == [("charge", 1, 201)]
    first, again = seen
    assert first[:3] == again[:3]
    assert first[4] == again[4]
    assert again[3]["Authorization"] == "Bearer canary"
    assert again[3]["Idempotency-Key"] == "canary"
    assert again[3]["Content-Type"] == "x/y"
    assert "Cookie" not in again[3]


def test_an_atomic_operation_is_resumed_too(world, run, interrupted):
    answers = [500, 500, 201]
    view = idempotent(resumable=["X-User"])(lambda: ({}, answers.pop(0)))
    world.app.add_url_rule("/payments", "pay", view, methods=["POST"])
    assert world.post().status_code == 500
    assert resume(run) == []  # too soon
    make_due(world)
    assert resume(run, "--max-attempts", "1") == []
    assert resume(run) == [("pay", 1, 500)]
    make_due(world)
    assert resume(run, "--limit", "1") == [("pay", 2, 201)]
    assert "nothing to resume" in run("resume")


def test_a_failure_that_rolls_back_is_left_alone_for_longer_each_time(world, run):
    attempts = []
    view = idempotent(resumable=["X-User"])(lambda: (attempts.append(1), ({}, 500))[1])
    world.app.add_url_rule("/payments", "pay", view, methods=["POST"])
    world.post()
    make_due(world)
    outputs = [run("resume", "--backoff", "60") for _ in range(2)]
    assert "nothing to resume" in outputs[1]
    assert len(attempts) == 2
    assert digits(run, state="released"), "nobody holds it"
    world.post()
    assert digits(run, state="in_progress"), "who knows"


def test_what_runs_is_left_alone(world, run):
    seen = []

    def pay():
        make_due(world) if seen else None
        seen.append(resume(run))
        return {}, 201

    world.app.add_url_rule("/payments", "pay", idempotent(resumable=True)(pay), methods=["POST"])
    assert world.post().status_code == 201
    assert seen == [[]]


def dies_once(world, path, **options):
    """A view that is killed in each first attempt; the scopes and paths it ran for."""
    runs = []

    def view(**_values):
        runs.append((current_operation.scope, request.path))
        if current_operation.attempt == 1:
            raise Killed
        return {}, 201

    view = idempotent(atomic=False, resumable=True, on_interrupted="retry", **options)(view)
    world.app.add_url_rule(path, "view", view, methods=["POST"])
    return runs


def test_resume_runs_nothing_for_somebody_else(world, run):
    runs = dies_once(world, "/payments", scope=lambda: request.headers.get("X-User", "guest"))
    with pytest.raises(Killed):
        world.post()
    make_due(world)
    assert [status for _, _, status in resume(run)] == [401]
    assert runs == [("alice", "/payments")]


def test_resume_sends_odd_paths_as_they_were(world, run):
    runs = dies_once(world, "/p/<path:name>", scope=None)
    paths = ("/p/a%3Fb", "/p/%23x", "/p/%2523", "/p/%C3%BC")
    for path in paths:
        with pytest.raises(Killed):
            world.post(path, key=path)
    make_due(world)
    assert [status for _, _, status in resume(run)] == [201] * len(paths)
    first, again = runs[: len(paths)], runs[len(paths) :]
    assert sorted(first) == sorted(again)


AGED = {"resumable": ["X-User"], "on_interrupted": "retry", "ttl": 4000, "refuse_old_keys": "require"}


def sent_in(seconds):
    return {"Repeatability-First-Sent": http_date(time.time() + seconds)}


def test_a_resumed_request_is_as_old_as_its_client_said(world, run, interrupted):
    """So its record lives for as long as a retry may begin it, whatever the client's clock shows."""
    interrupted(headers=sent_in(3600), **AGED)
    make_due(world)
    assert resume(run) == [("charge", 1, 201)]
    (record,) = world.records()
    assert 3600 + 4000 < (record.expires_at - record.completed_at).total_seconds() < 3600 + 4000 + 600


def test_one_that_was_stored_before_ages_were_required_is_resumed(world, run, interrupted):
    interrupted(headers=sent_in(0), **AGED)
    stored = bytes(world.records()[0].request).replace(b"Repeatability-First-Sent", b"X-Other")
    world.sql("update idempotency_record set request = :stored", stored=stored)
    make_due(world)
    assert resume(run) == [("charge", 1, 201)]
