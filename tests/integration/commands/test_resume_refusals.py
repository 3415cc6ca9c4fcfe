"""``flask idempotency resume`` runs nothing but the operation that it is for, and counts each try."""

from __future__ import annotations

import json
import logging

import pytest
from flask import redirect, request
from werkzeug.middleware.dispatcher import DispatcherMiddleware
from werkzeug.test import run_wsgi_app

from flask_idempotency import Retryable, current_operation, idempotent
from flask_idempotency.core.errors import StoreUnavailable
from tests.integration.commands.running import runner
from tests.killed import Killed

RESUMABLE = {"atomic": False, "on_interrupted": "retry", "resumable": ["X-User"]}


class Releases:
    """Releases of one application on one database: the first is killed after it has charged."""

    def __init__(self, make_world):
        self._make_world = make_world
        self.charges = []
        self.first = make_world(PROPAGATE_EXCEPTIONS=False)
        self.add(self.first, idempotent(**RESUMABLE)(self.charge))

    def charge(self):
        self.charges.append(current_operation.attempt if current_operation else 0)
        if len(self.charges) == 1:
            raise Killed
        return {}, 201

    def add(self, world, view, endpoint="charge", path="/payments"):
        world.app.add_url_rule(path, endpoint, view, methods=["POST"])

    def interrupt(self):
        with pytest.raises(Killed):
            self.first.post(key="canary")

    def next(self, view=None, **config):
        """The next release, with ``view`` in place of what was protected."""
        uri = self.first.app.config["SQLALCHEMY_DATABASE_URI"]
        world = self._make_world(SQLALCHEMY_DATABASE_URI=uri, PROPAGATE_EXCEPTIONS=False, **config)
        if view is not None:
            self.add(world, view)
        return world

    def resume(self, world, *options):
        """One round, an hour after the one before: the status of each operation."""
        self.make_due()
        result = runner(world.app)("resume", "--backoff", "0.1", "--json", *options)
        assert result.exit_code == 0, result.output
        return [line["status"] for line in json.loads(result.stdout)]

    def make_due(self):
        for name in "created_at", "completed_at", "lease_expires_at", "tried_at":
            self.first.sql(f"update idempotency_record set {name} = {name} - interval '1 hour'")

    def expire(self):
        self.first.sql("update idempotency_record set expires_at = clock_timestamp()")


@pytest.fixture
def releases(make_world):
    return Releases(make_world)


def unprotected(releases):
    return releases.next(releases.charge)


def not_resumable_any_more(releases):
    return releases.next(idempotent(atomic=False, on_interrupted="retry")(releases.charge))


def hidden_below_a_decorator(releases):
    view = idempotent(**RESUMABLE)(releases.charge)

    def hidden():
        return view()

    return releases.next(hidden)


def of_another_name(releases):
    world = releases.next()
    releases.add(world, idempotent(**RESUMABLE)(releases.charge), "other")
    return world


def gone(releases):
    world = releases.next()

    @world.app.errorhandler(404)
    def anything_else(_error):
        return releases.charge()

    return world


def with_a_handler_of_everything(releases):
    world = unprotected(releases)

    @world.app.errorhandler(Exception)
    def anything(_error):
        return releases.charge()

    return world


def redirected(releases):
    world = releases.next()
    releases.add(world, idempotent(**RESUMABLE)(releases.charge), path="/payments/")
    return world


def for_another_method(releases):
    world = releases.next()
    view = idempotent(**RESUMABLE)(releases.charge)
    world.app.add_url_rule("/payments", "charge", view, methods=["PUT"])
    world.app.add_url_rule("/payments", "form", releases.charge, methods=["POST"])
    return world


@pytest.mark.parametrize(
    "release",
    [
        unprotected,
        not_resumable_any_more,
        hidden_below_a_decorator,
        of_another_name,
        gone,
        with_a_handler_of_everything,
        redirected,
        for_another_method,
    ],
)
def test_nothing_runs_that_is_not_the_operation_and_the_tries_end(releases, release, caplog):
    releases.interrupt()
    world = release(releases)
    world.app.before_request(lambda: releases.charges.append("before_request"))
    rounds = [releases.resume(world, "--max-attempts", "4") for _ in range(5)]
    assert releases.charges == [1]
    assert rounds == [[409], [409], [409], [], []]
    assert "was not resumed" in caplog.text


def test_nothing_is_sent_while_the_protection_is_off(releases):
    releases.interrupt()
    world = releases.next(idempotent(**RESUMABLE)(releases.charge), IDEMPOTENCY_ENABLED=False)
    releases.make_due()
    result = runner(world.app)("resume")
    assert result.exit_code == 1
    assert "IDEMPOTENCY_ENABLED is False" in result.output
    assert releases.charges == [1]
    assert releases.first.records()[0].tries is None


def test_an_application_mounted_at_its_place_since_is_not_asked(releases):
    """Nor is any other middleware: kept is the request as the application itself saw it."""
    releases.interrupt()
    world = releases.next(idempotent(**RESUMABLE)(releases.charge))

    def other(_environ, start_response):
        releases.charges.append("other")
        start_response("200 OK", [])
        return []

    world.app.wsgi_app = DispatcherMiddleware(world.app.wsgi_app, {"/payments": other})
    assert releases.resume(world) == [201]
    assert releases.charges == [1, 2]


def test_an_application_below_a_prefix_is_resumed(releases):
    app = releases.first.app
    app.wsgi_app = DispatcherMiddleware(lambda *_: [], {"/shop": app.wsgi_app})
    with pytest.raises(Killed):
        releases.first.post("/shop/payments")
    assert releases.resume(releases.first) == [201]


def test_what_the_application_returns_before_the_view_is_not_taken_for_done(releases):
    releases.interrupt()
    world = releases.next(idempotent(**RESUMABLE)(releases.charge))
    world.app.before_request(lambda: ("Closed today.", 200))
    assert [releases.resume(world, "--max-attempts", "3") for _ in range(3)] == [[409], [409], []]
    assert releases.charges == [1]


def test_what_a_decorator_returns_in_place_of_the_view_is_not_taken_for_done(releases):
    releases.interrupt()

    def closed():
        return redirect("/closed")

    closed.__idempotency_route__ = idempotent(**RESUMABLE)(releases.charge).__idempotency_route__
    assert releases.resume(releases.next(closed)) == [409]
    assert releases.charges == [1]


def test_a_response_that_is_not_stored_is_not_taken_for_done(releases):
    runs = []
    view = idempotent(resumable=["X-User"], store=lambda _: False)(lambda: (runs.append(1), {})[1])
    world = releases.next(view)
    world.post()
    assert [releases.resume(world, "--max-attempts", "3") for _ in range(3)] == [[409], [409], []]
    assert len(runs) == 3


@pytest.mark.parametrize(("options", "config", "status", "why"), [
    ({"namespace": "v2"}, {}, 401, "the route's namespace has changed"),
    ({}, {"IDEMPOTENCY_HEADER": "X-Key"}, 400, "IDEMPOTENCY_HEADER or the route's key"),
])  # fmt: skip
def test_the_log_says_why_a_request_is_refused_each_time(
    releases, caplog, options, config, status, why
):
    releases.interrupt()
    world = releases.next(idempotent(**RESUMABLE, **options)(releases.charge), **config)
    caplog.clear()
    assert releases.resume(world) == [status]
    assert f"operation 'charge' was not resumed, status {status}: " in caplog.text
    assert why in caplog.text
    assert releases.charges == [1]


def test_without_its_key_a_request_is_not_resumed_unprotected(releases):
    """The header has another name since, and the route does without a key."""
    releases.interrupt()
    view = idempotent(required=False, **RESUMABLE)(releases.charge)
    world = releases.next(view, IDEMPOTENCY_HEADER="X-Key")
    assert releases.resume(world) == [400]
    assert releases.charges == [1]


def test_a_request_that_the_route_skips_by_now_is_not_resumed_unprotected(releases):
    releases.interrupt()
    world = releases.next(releases.charge)
    world.idempotency.protect(world.app, skip=lambda _request: True, **RESUMABLE)
    assert releases.resume(world) == [400]
    assert releases.charges == [1]


def test_without_its_records_a_request_is_not_resumed_unprotected(releases, monkeypatch):
    releases.interrupt()
    view = idempotent(**RESUMABLE)(releases.charge)
    world = releases.next(view, IDEMPOTENCY_ON_STORE_ERROR="allow")
    state = world.app.extensions["idempotency"]
    take_over = state.records.take_over

    def unavailable(*_claim):
        monkeypatch.setattr(state.records, "take_over", take_over)
        raise StoreUnavailable

    monkeypatch.setattr(state.records, "take_over", unavailable)
    assert releases.resume(world) == [503]
    assert releases.charges == [1]
    assert releases.resume(world) == [201]


def test_a_view_that_sends_its_own_request_on_resumes_nothing_with_it(releases):
    """The environ that it copies names no record any more."""
    releases.interrupt()
    world, inner = releases.next(), []

    def relay():
        copy = {**request.environ, "PATH_INFO": "/inner"}
        inner.append(run_wsgi_app(world.app.wsgi_app, copy)[1])
        return {}, 201

    releases.add(world, idempotent(**RESUMABLE)(relay))
    releases.add(world, lambda: ("", 204), "inner", "/inner")
    assert releases.resume(world) == [201]
    assert inner == ["204 NO CONTENT"]


def test_a_request_that_is_refused_is_tried_as_often_as_one_that_runs(releases):
    """And the attempt, the fencing token, is that of those that ran."""
    releases.interrupt()
    world = releases.next(idempotent(**{**RESUMABLE, "resumable": True})(releases.charge))
    releases.first.sql("update idempotency_record set request = convert_to(replace("
                       "convert_from(request, 'utf8'), 'X-User', 'X-Gone'), 'utf8')")  # fmt: skip
    rounds = [releases.resume(world, "--max-attempts", "4") for _ in range(5)]
    assert rounds == [[401], [401], [401], [], []]
    (record,) = releases.first.records()
    assert (record.attempt, record.tries) == (1, 4)
    assert world.post(key="canary").status_code == 201
    assert releases.charges == [1, 2]


@pytest.mark.parametrize("where", ["before the claim", "in the view"])
def test_a_try_that_kills_the_process_counts(releases, where):
    releases.interrupt()
    world = releases.next(idempotent(**RESUMABLE)(lambda: kill("in the view")))
    tried = []

    @world.app.before_request
    def kill(at="before the claim"):
        if at == where:
            tried.append(at)
            raise Killed

    for _ in range(2):
        with pytest.raises(Killed):
            releases.resume(world, "--max-attempts", "3")
        result = runner(world.app)("resume", "--backoff", "60", "--max-attempts", "9")
        assert "1 operation runs or is not due yet" in result.output
    assert releases.resume(world, "--max-attempts", "3") == []
    assert len(tried) == 2


def test_a_try_that_kills_the_process_counts_for_no_other_operation(releases):
    for key in "one", "two":
        releases.charges.clear()
        with pytest.raises(Killed):
            releases.first.post(key=key)
    world = releases.next(idempotent(**RESUMABLE)(releases.charge))

    @world.app.before_request
    def kill():
        raise Killed

    with pytest.raises(Killed):
        releases.resume(world)
    assert [record.tries for record in releases.first.records()] == [2, None]


def before(world, function):
    """Call it after the request was matched to its endpoint, and before the view."""

    def hook():
        function()  # what it gives would be a response

    world.app.before_request_funcs[None].append(hook)


def given_back(releases, **options):
    """An operation that has charged and was given back, and the next release, which would finish it."""
    mails = []

    def pay():
        current_operation.step("charge", lambda: releases.charges.append(current_operation.attempt))
        if not mails:
            raise Retryable
        current_operation.step("mail", lambda: mails.append(1))
        return {}, 201

    world = releases.next(idempotent(**{**RESUMABLE, **options})(pay))
    assert world.post(key="canary").status_code == 503
    mails.append("the mail server is up again")
    return world


def test_what_an_operator_releases_is_tried_anew(releases):
    """However often it was begun and tried before; and again until the same limit."""
    releases.interrupt()
    world = releases.next(idempotent(**{**RESUMABLE, "on_interrupted": "hold"})(releases.charge))
    run = runner(world.app)
    three = "--max-attempts", "3"
    assert [releases.resume(world, *three) for _ in range(3)] == [[409], [409], []]
    releases.first.sql("update idempotency_record set attempt = 7")
    assert "1 operation has reached" in run("resume", *three).output
    (record,) = releases.first.records()
    assert "may be run again" in run("release", "--why=asked", bytes(record.key).hex()[:8]).output
    assert releases.resume(world, *three) == [201]
    assert releases.charges == [1, 8]


def test_a_release_begins_the_count_of_tries_only(releases):
    world = given_back(releases, resumable=True)
    releases.first.sql("update idempotency_record set tries = 0, attempt = 7, request = convert_to("
                       "replace(convert_from(request, 'utf8'), 'X-User', 'X-Gone'),"
                       " 'utf8')")  # fmt: skip
    rounds = [releases.resume(world, "--max-attempts", "3") for _ in range(4)]
    assert rounds == [[401], [401], [401], []]
    (record,) = releases.first.records()
    assert (record.attempt, record.tries) == (7, 3)


def test_what_has_expired_is_not_begun_again(releases):
    world = given_back(releases)
    releases.first.sql("update idempotency_record set lease_expires_at = null")  # without its step
    releases.expire()
    assert releases.resume(world) == []
    assert releases.charges == [1]
    assert "1 operation has expired unfinished" in runner(world.app)("resume").output
    assert releases.first.count("idempotency_record_step") == 1


def test_what_has_not_expired_goes_on_with_its_steps(releases):
    world = given_back(releases)
    assert releases.resume(world) == [201]
    assert releases.charges == [1]


def test_what_expires_on_its_way_is_not_begun_again(releases):
    world = given_back(releases)
    releases.first.sql("update idempotency_record set lease_expires_at = null")  # without its step
    before(world, releases.expire)
    assert releases.resume(world) == [409]
    assert releases.charges == [1]
    assert releases.first.count("idempotency_record_step") == 1


def test_what_is_gone_on_its_way_is_not_begun_again(releases):
    world = given_back(releases)
    before(world, lambda: world.sql("delete from idempotency_record"))
    assert releases.resume(world) == [409]
    assert releases.charges == [1]
    assert releases.first.records() == []


def test_what_another_attempt_took_over_meanwhile_is_left_to_it(releases):
    releases.interrupt()
    world = releases.next(idempotent(**RESUMABLE)(releases.charge))
    before(world, lambda: world.sql("update idempotency_record set owner = 'other'"))
    assert releases.resume(world) == [409]
    assert releases.charges == [1]


def test_an_atomic_operation_that_has_expired_is_not_begun_again(releases):
    answers, runs = [500, 201], []

    def pay():
        runs.append(current_operation.attempt)
        return {}, answers.pop(0)

    world = releases.next(idempotent(resumable=["X-User"])(pay))
    assert world.post().status_code == 500
    releases.expire()
    assert releases.resume(world) == []
    assert runs == [1]
    assert world.post().status_code == 201, "its client may begin it again"
    assert runs == [1, 1]


def test_a_lease_that_is_over_does_not_expire(releases):
    """Nobody gave it back: what it did may be out in the world."""
    releases.interrupt()
    releases.expire()
    assert releases.resume(releases.next(idempotent(**RESUMABLE)(releases.charge))) == [201]


def test_a_log_line_shows_no_control_characters_of_the_table(releases, caplog):
    releases.interrupt()
    name = "\x1b]0;canary\x07"
    releases.first.sql("update idempotency_record set name = :name, request = ''", name=name)
    with caplog.at_level(logging.ERROR):
        assert releases.resume(releases.first) == [500]
    assert "\x1b" not in caplog.messages[-1]
