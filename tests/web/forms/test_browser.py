"""What a browser sees, which follows redirects and keeps cookies: pages, messages, its session."""

import json

import pytest
import requests
import sqlalchemy as sa
from flask import flash, get_flashed_messages, redirect, session
from flask.sessions import SecureCookieSessionInterface
from markupsafe import Markup

from flask_idempotency import idempotent
from tests.web.forms.pages import ALICE, MESSAGE, add_payments, field_of, load, send


class WithoutTuples(SecureCookieSessionInterface):
    """A session that makes lists of messages."""

    serializer = json


class TestInABrowser:
    def test_a_form_sent_again_says_the_same_again(self, shop):
        add_payments(shop)
        client, field = shop.client, load(shop.client)
        for _ in range(3):
            answer = send(client, field)
            assert client.get(answer.location).json == {"messages": [MESSAGE]}
            assert client.get(answer.location).json == {"messages": []}
        assert shop.count() == 1

    @pytest.mark.parametrize("interface", [SecureCookieSessionInterface, WithoutTuples])
    def test_a_message_that_was_not_yet_shown_is_shown_once(self, shop, interface):
        shop.app.session_interface = interface()
        add_payments(shop)
        client, field = shop.client, load(shop.client)
        send(client, field)
        assert client.get(send(client, field).location).json == {"messages": [MESSAGE]}

    def test_a_message_that_the_response_shows_itself_is_not_flashed_again(self, shop):
        @idempotent
        def pay():
            flash("shown")
            return {"messages": get_flashed_messages()}

        shop.app.add_url_rule("/payments", "pay", pay, methods=["POST"])
        client, field = shop.client, load(shop.client)
        for _ in range(2):
            answer = send(client, field)
            assert answer.json == {"messages": ["shown"]}
            with client.session_transaction() as cookie:
                assert "_flashes" not in cookie

    def test_nothing_else_of_the_session_is_replayed(self, shop):
        @idempotent
        def pay():
            session["basket"] = 7
            flash(Markup("<b>Paid</b>"))
            return redirect("/thanks", 303)

        shop.app.add_url_rule("/payments", "pay", pay, methods=["POST"])
        client, field = shop.client, load(shop.client)
        send(client, field)
        client.delete_cookie("session")
        replay = send(client, field)
        with client.session_transaction() as cookie:
            assert dict(cookie) == {"_flashes": [("message", Markup("<b>Paid</b>"))]}
            assert isinstance(cookie["_flashes"][0][1], Markup)
        assert not [name for name, _ in replay.headers if "flashes" in name.lower()]

    def test_a_replay_without_messages_leaves_the_session_alone(self, shop):
        add_payments(shop)
        shop.app.add_url_rule("/quiet", "quiet", idempotent(dict), methods=["POST"])
        field = load(shop.client)
        for _ in range(2):
            answer = send(shop.client, field, "/quiet")
            assert "Vary" not in answer.headers
            assert "Set-Cookie" not in answer.headers

    def test_a_view_cannot_store_messages_under_another_name(self, shop):
        """A header that a view copies from somewhere puts nothing into anybody's session."""
        headers = {"flask-idempotency-flashes": '[{" t":["bad","canary"]}]'}
        view = idempotent(lambda: ({}, 200, headers))
        shop.app.add_url_rule("/payments", "pay", view, methods=["POST"])
        field = load(shop.client)
        send(shop.client, field)
        assert "Set-Cookie" not in send(shop.client, field).headers


# The server is a fork of this process, of which Python 3.12 warns where there are threads.
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
class TestADoubleClick:
    @pytest.fixture
    def app(self, shop):
        """Its view waits for a lock, which the test has."""

        def wait():
            shop.db.session.execute(sa.select(sa.func.pg_advisory_xact_lock(1)))

        add_payments(shop, during=wait, wait=10)
        shop.app.config["SERVER_NAME"] = "localhost"  # pytest-flask's own is not where it listens
        return shop.app

    def test_it_shows_the_message_of_the_first(self, shop, live_server, background):
        """The browser drops the first answer, cookie and all, and shows the second."""
        with shop.app.app_context():
            engine = shop.db.engine
        with requests.Session() as browser, requests.Session() as dropped:
            browser.trust_env = dropped.trust_env = False
            field = field_of(browser.get(live_server.url("/form"), headers=ALICE).text)
            form = {"amount": 5, "idempotency_key": field}
            with engine.begin() as connection:
                connection.execute(sa.select(sa.func.pg_advisory_xact_lock(1)))
                first = background(dropped.post, live_server.url("/payments"), form, headers=ALICE)
                shop.wait_until_blocked()
                second = background(browser.post, live_server.url("/payments"), form, headers=ALICE)
                shop.wait_until_blocked(2)
            page = second.result()
            assert page.history[0].headers["Idempotent-Replayed"] == "true"
            assert page.history[0].status_code == 303
            assert page.json() == {"messages": [MESSAGE]}
            assert first.result().json() == {"messages": [MESSAGE]}
        assert shop.count() == 1
