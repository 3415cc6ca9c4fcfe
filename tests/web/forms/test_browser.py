"""What a browser sees, which follows redirects and keeps cookies: pages, messages, its session."""

import pytest
import requests
import sqlalchemy as sa
from flask import flash, redirect, session

from flask_idempotency import idempotent
from tests.web.forms.pages import ALICE, MESSAGE, add_payments, field_of, load, send


class TestInABrowser:
    def test_a_message_is_shown_once_and_not_again_on_a_replay(self, shop):
        add_payments(shop)
        client, field = shop.client, load(shop.client)
        shown = [client.get(send(client, field).location).json["messages"] for _ in range(3)]
        assert shown == [[MESSAGE], [], []]
        assert shop.count() == 1

    def test_nothing_of_the_session_is_replayed(self, shop):
        @idempotent
        def pay():
            session["basket"] = 7
            flash("Paid")
            return redirect("/thanks", 303)

        shop.app.add_url_rule("/payments", "pay", pay, methods=["POST"])
        client, field = shop.client, load(shop.client)
        send(client, field)
        client.delete_cookie("session")
        send(client, field)
        with client.session_transaction() as cookie:
            assert dict(cookie) == {}

    def test_a_replay_leaves_the_session_alone(self, shop):
        add_payments(shop)
        shop.app.add_url_rule("/quiet", "quiet", idempotent(dict), methods=["POST"])
        field = load(shop.client)
        for _ in range(2):
            answer = send(shop.client, field, "/quiet")
            assert "Vary" not in answer.headers
            assert "Set-Cookie" not in answer.headers


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

    def test_it_shows_the_page_that_the_first_led_to(self, shop, live_server, background):
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
            assert page.json() == {"messages": []}
            assert first.result().json() == {"messages": [MESSAGE]}
        assert shop.count() == 1
