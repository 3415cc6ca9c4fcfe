"""The hidden field of a form: the key of clients that send no header, and what a browser sees."""

from __future__ import annotations

import re
import time

import pytest
import requests
from flask import (
    Blueprint,
    flash,
    get_flashed_messages,
    redirect,
    render_template_string,
    request,
    session,
)
from flask_wtf import CSRFProtect, FlaskForm
from markupsafe import Markup
from werkzeug.serving import make_server
from wtforms import IntegerField
from wtforms.validators import NumberRange

from flask_idempotency import ConfigurationError, current_operation, idempotent
from flask_idempotency.cli import cli
from flask_idempotency.wtf import IdempotencyField

ALICE = {"X-User": "alice"}
BOB = {"X-User": "bob"}
MESSAGE = ["good", "Paid 5"]


@pytest.fixture
def store():
    return "postgres"  # what is tested here is the same in front of every store


@pytest.fixture
def config():
    return {}


@pytest.fixture
def world(make_world, config):
    return make_world(SECRET_KEY="canary-secret", PROPAGATE_EXCEPTIONS=True, **config)


@pytest.fixture
def shop(world):
    """A page with a form, the view it is sent to, and the page that this redirects to."""
    add_page(world, "/form", "{{ idempotency_field() }}")
    return world


def add_page(world, path, form):
    text = f'<form method="post">{form}<input name="amount"></form>'
    world.app.add_url_rule(path, path, lambda: render_template_string(text))


def add_payments(world, path="/payments", during=lambda: None, **options):
    runs = []

    @idempotent(**options)
    def pay():
        runs.append(current_operation.key if current_operation else None)
        world.db.session.add(world.Payment(amount=int(request.form["amount"])))
        world.db.session.commit()
        flash(f"Paid {request.form['amount']}", "good")
        during()
        return redirect("/thanks", 303)

    def thanks():
        return {"messages": get_flashed_messages(with_categories=True)}

    world.app.add_url_rule(path, path, pay, methods=["POST"])
    world.app.add_url_rule("/thanks", f"thanks {path}", thanks)
    return runs


def field_of(page):
    """The value of the field on a page."""
    (value,) = re.findall(
        r'<input type="hidden" name="idempotency_key" value="([\w.-]+)" autocomplete="off">', page
    )
    return value


def load(client, path="/form", headers=ALICE):
    return field_of(client.get(path, headers=headers).text)


def send(client, field, path="/payments", headers=ALICE, **fields):
    values = {"amount": "5", **fields}
    if field is not None:
        values["idempotency_key"] = field
    return client.post(path, data=values, headers=headers)


@pytest.mark.parametrize("media_type", ["application/x-www-form-urlencoded", "multipart/form-data"])
def test_a_form_that_is_sent_twice_is_one_operation(shop, media_type):
    runs, client = add_payments(shop), shop.client
    data = {"amount": 5, "idempotency_key": load(client)}
    answers = [
        client.post("/payments", data=data, content_type=media_type, headers=ALICE) for _ in range(3)
    ]
    assert [answer.status_code for answer in answers] == [303] * 3
    assert [answer.headers.get("Idempotent-Replayed") for answer in answers] == [None, "true", "true"]
    assert len(runs) == shop.count() == 1
    assert re.fullmatch(r"[\w-]{22}", runs[0])


def test_a_form_that_is_loaded_twice_is_two_operations(shop):
    runs, client = add_payments(shop), shop.client
    for _ in range(2):
        assert send(client, load(client)).status_code == 303
    assert len(set(runs)) == shop.count() == 2


def test_a_form_that_was_changed_after_it_was_sent_is_refused(shop, assert_problem):
    add_payments(shop)
    client, field = shop.client, load(shop.client)
    send(client, field)
    assert_problem(send(client, field, amount="6"), 422, "key-reused")


def test_without_a_field_the_key_is_missing(shop, assert_problem):
    add_payments(shop)
    add_payments(shop, "/open", required=False)
    assert_problem(send(shop.client, None), 400, "key-required")
    assert send(shop.client, None, "/open").status_code == 303
    assert shop.records() == []


def test_a_header_comes_before_the_field(shop):
    runs = add_payments(shop)
    for key, field in ("key-1", load(shop.client)), ("key-2", "forged"):
        answer = send(shop.client, field, headers={**ALICE, "Idempotency-Key": key})
        assert answer.status_code == 303
    assert runs == ["key-1", "key-2"]


def flipped(field, place):
    """The field with another character there."""
    return field[:place] + ("A" if field[place] != "A" else "B") + field[place + 1 :]


@pytest.mark.parametrize("required", [True, False])
def test_a_forged_field_is_refused(shop, assert_problem, required):
    runs = add_payments(shop, required=required)
    real = load(shop.client)
    places = [0, real.index(".") + 1, real.rindex(".") - 2, real.rindex(".") + 2]
    forged = [flipped(real, place) for place in places]
    forged += ["", "canary", "a.b.c.d", "\u00fc.\u2028", real[:-1], real + ".x"]
    for field in forged:
        answer = assert_problem(send(shop.client, field), 400, "key-malformed")
        assert "not made by this application" in answer["detail"]
    assert runs == shop.records() == []


def test_a_field_is_refused_when_it_is_there_twice(shop, assert_problem):
    add_payments(shop)
    fields = [load(shop.client), load(shop.client)]
    answer = assert_problem(send(shop.client, fields), 400, "key-malformed")
    assert "more than once" in answer["detail"]


def test_a_field_of_another_application_is_forged(shop, assert_problem):
    add_payments(shop)
    field = load(shop.client)
    shop.app.secret_key = "another"
    assert_problem(send(shop.client, field), 400, "key-malformed")
    shop.app.secret_key = None
    assert_problem(send(shop.client, field), 400, "key-malformed")


def test_a_field_outlives_a_change_of_the_secret_key(shop):
    add_payments(shop)
    field = load(shop.client)
    shop.app.config.update(SECRET_KEY="new", SECRET_KEY_FALLBACKS=["canary-secret"])
    assert send(shop.client, field).status_code == 303
    assert send(shop.client, load(shop.client)).status_code == 303


def test_a_form_of_one_user_is_refused_from_another(shop, assert_problem):
    runs = add_payments(shop)
    field = load(shop.client)
    answer = assert_problem(send(shop.client, field, headers=BOB), 400, "key-malformed")
    assert "another user" in answer["detail"]
    assert_problem(send(shop.client, field, headers={}), 401, "scope-unknown")
    assert runs == shop.records() == []
    send(shop.client, field)  # also when there is something to find
    assert_problem(send(shop.client, field, headers=BOB), 400, "key-malformed")


def test_a_field_for_one_view_is_refused_by_another(shop, assert_problem):
    add_payments(shop, name="pay")
    add_payments(shop, "/refunds")
    add_page(shop, "/named", "{{ idempotency_field('/payments') }}")
    field = load(shop.client, "/named")
    assert_problem(send(shop.client, field, "/refunds"), 400, "key-malformed")
    assert send(shop.client, field).status_code == 303


def test_a_field_has_the_scope_of_the_view_it_names(shop, assert_problem):
    add_payments(shop, scope=lambda: "shop-1")
    add_page(shop, "/named", "{{ idempotency_field('/payments') }}")
    assert send(shop.client, load(shop.client, "/named"), headers=BOB).status_code == 303
    assert_problem(send(shop.client, load(shop.client)), 400, "key-malformed")


def test_the_named_view_may_be_in_the_same_blueprint(world):
    blueprint = Blueprint("shop", __name__)
    blueprint.add_url_rule(
        "/page", "page", lambda: render_template_string("{{ idempotency_field('.pay') }}")
    )
    blueprint.add_url_rule("/pay", "pay", dict, methods=["POST"])
    world.idempotency.protect(blueprint)
    world.app.register_blueprint(blueprint)
    field = load(world.client, "/page")
    assert send(world.client, field, "/pay").status_code == 200
    assert send(world.client, field, "/pay").headers["Idempotent-Replayed"] == "true"


def test_the_named_view_must_be_protected(shop):
    add_page(shop, "/wrong", "{{ idempotency_field('nowhere') }}")
    with pytest.raises(ConfigurationError, match="nowhere is not a protected endpoint"):
        shop.client.get("/wrong", headers=ALICE)


def test_a_field_needs_a_secret_key(shop):
    shop.app.secret_key = None
    with pytest.raises(ConfigurationError, match="SECRET_KEY"):
        shop.client.get("/form", headers=ALICE)


class TestAge:
    """A field is valid as long as a record of it lives, so it never runs twice."""

    @pytest.fixture
    def config(self):
        return {"IDEMPOTENCY_TTL": 100}

    @pytest.fixture
    def an_old_field(self, shop, monkeypatch):
        def load_before(seconds):
            with monkeypatch.context() as patch:
                now = time.time() - seconds
                patch.setattr(time, "time", lambda: now)
                return load(shop.client)

        return load_before

    def test_a_field_that_outlived_its_record_is_refused(self, shop, an_old_field, assert_problem):
        runs = add_payments(shop)
        answer = assert_problem(send(shop.client, an_old_field(102)), 400, "key-malformed")
        assert "too old" in answer["detail"]
        assert runs == []
        assert send(shop.client, an_old_field(90)).status_code == 303

    def test_the_route_says_how_long_that_is(self, shop, an_old_field, assert_problem):
        add_payments(shop, ttl=1000)
        assert send(shop.client, an_old_field(900)).status_code == 303
        assert_problem(send(shop.client, an_old_field(1002)), 400, "key-malformed")

    def test_a_host_whose_clock_is_ahead_may_have_made_it(self, shop, an_old_field):
        add_payments(shop)
        assert send(shop.client, an_old_field(-5)).status_code == 303


class TestSetting:
    @pytest.fixture
    def config(self, request):
        return {"IDEMPOTENCY_FORM_FIELD": request.param}

    @pytest.mark.parametrize("config", ["once"], indirect=True)
    def test_the_field_may_have_another_name(self, shop, assert_problem):
        add_payments(shop)
        (value,) = re.findall('name="once" value="(.*?)"', shop.client.get("/form", headers=ALICE).text)
        assert send(shop.client, None, once=value).status_code == 303
        assert_problem(send(shop.client, value), 400, "key-required")

    @pytest.mark.parametrize("config", [None], indirect=True)
    def test_without_one_no_body_is_looked_at(self, shop, assert_problem):
        @idempotent(required=False)
        def raw():
            return request.stream.read()

        shop.app.add_url_rule("/raw", "raw", raw, methods=["POST"])
        assert send(shop.client, "forged", "/raw").data == b"amount=5&idempotency_key=forged"
        with pytest.raises(ConfigurationError, match="IDEMPOTENCY_FORM_FIELD"):
            shop.client.get("/form", headers=ALICE)


def test_a_body_that_breaks_off_is_refused_before_its_field_is_looked_for(shop, assert_problem):
    runs = add_payments(shop)
    answer = shop.client.post(
        "/payments",
        data="amount=5",
        content_type="application/x-www-form-urlencoded",
        headers=ALICE,
        environ_overrides={"CONTENT_LENGTH": "100"},
    )
    assert_problem(answer, 400, "body-incomplete")
    assert runs == []


def test_a_form_in_json_has_no_field(shop, assert_problem):
    add_payments(shop)
    answer = shop.client.post("/payments", json={"idempotency_key": load(shop.client)}, headers=ALICE)
    assert_problem(answer, 400, "key-required")


def test_a_resumed_form_may_be_older_than_its_field(shop, monkeypatch):
    """Its key goes along as a header, which has no age."""
    attempts = []

    class Killed(BaseException):
        pass

    @idempotent(atomic=False, resumable=True, on_interrupted="retry", scope=None, ttl=100)
    def pay():
        attempts.append(current_operation.key)
        if len(attempts) == 1:
            raise Killed
        return {}

    shop.app.add_url_rule("/payments", "pay", pay, methods=["POST"])
    add_page(shop, "/named", "{{ idempotency_field('pay') }}")
    with pytest.raises(Killed):
        send(shop.client, load(shop.client, "/named"))
    later = time.time() + 1000
    monkeypatch.setattr(time, "time", lambda: later)
    past = "now() - interval '1 hour'"
    shop.sql(f"update idempotency_record set lease_expires_at = {past}, created_at = {past}")
    result = shop.app.test_cli_runner().invoke(cli, ["resume"])
    assert result.exit_code == 0, result.output
    assert len(attempts) == 2
    assert len(set(attempts)) == 1


class TestInABrowser:
    """Redirects are followed, cookies are kept."""

    def test_a_form_sent_again_says_the_same_again(self, shop):
        add_payments(shop)
        client, field = shop.client, load(shop.client)
        for _ in range(3):
            answer = send(client, field)
            assert client.get(answer.location).json == {"messages": [MESSAGE]}
            assert client.get(answer.location).json == {"messages": []}
        assert shop.count() == 1

    def test_a_message_that_was_not_yet_shown_is_shown_once(self, shop):
        add_payments(shop)
        client, field = shop.client, load(shop.client)
        send(client, field)
        assert client.get(send(client, field).location).json == {"messages": [MESSAGE]}

    def test_a_double_click_shows_the_message_of_the_first(self, shop, gate, background):
        """The browser drops the first answer, cookie and all, and shows the second."""
        add_payments(shop, during=gate, wait=10)
        server = make_server("127.0.0.1", 0, shop.app, threaded=True)
        serving = background(server.serve_forever)
        try:
            url = f"http://127.0.0.1:{server.port}"
            with requests.Session() as browser, requests.Session() as dropped:
                browser.trust_env = dropped.trust_env = False
                field = field_of(browser.get(f"{url}/form", headers=ALICE).text)
                form = {"amount": 5, "idempotency_key": field}
                first = background(dropped.post, f"{url}/payments", form, headers=ALICE)
                gate.wait_until_reached()
                second = background(browser.post, f"{url}/payments", form, headers=ALICE)
                shop.wait_until_blocked()
                gate.open()
                page = second.result()
                assert page.history[0].headers["Idempotent-Replayed"] == "true"
                assert page.history[0].status_code == 303
                assert page.json() == {"messages": [MESSAGE]}
                assert first.result().json() == {"messages": [MESSAGE]}
        finally:
            server.shutdown()
            serving.result()
            server.server_close()
        assert shop.count() == 1

    def test_a_message_that_the_answer_shows_itself_is_not_flashed_again(self, shop):
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


class TestFlaskWtf:
    """The field of a form class, beside the token against cross-site requests."""

    @pytest.fixture
    def forms(self, world):
        CSRFProtect(world.app)

        class PaymentForm(FlaskForm):
            idempotency_key = IdempotencyField(endpoint="pay")
            amount = IntegerField(validators=[NumberRange(min=1)])

        def page(form=None):
            form = form or PaymentForm()
            return render_template_string("<form>{{ form.hidden_tag() }}</form>", form=form)

        @idempotent
        def pay():
            form = PaymentForm()
            if not form.validate_on_submit():
                return page(form), 400
            payment = world.Payment()
            form.populate_obj(payment)
            assert not hasattr(payment, "idempotency_key")
            world.db.session.add(payment)
            world.db.session.commit()
            return redirect("/thanks", 303)

        world.app.add_url_rule("/form", "form", page)
        world.app.add_url_rule("/payments", "pay", pay, methods=["POST"])
        return world

    @staticmethod
    def values(page):
        token = re.findall(r'name="csrf_token" type="hidden" value="(.*?)"', page)
        key = re.findall(r'name="idempotency_key" type="hidden" value="([\w.-]+)"', page)
        assert len(token) == len(key) == 1
        assert 'autocomplete="off"' in page
        return {"csrf_token": token[0], "idempotency_key": key[0]}

    def test_it_is_sent_and_checked(self, forms):
        client = forms.client
        values = self.values(client.get("/form", headers=ALICE).text)
        for replayed in None, "true":
            answer = client.post("/payments", data={"amount": 5, **values}, headers=ALICE)
            assert answer.status_code == 303
            assert answer.headers.get("Idempotent-Replayed") == replayed
        assert forms.count() == 1

    def test_a_form_to_be_corrected_is_another_operation(self, forms):
        client = forms.client
        values = self.values(client.get("/form", headers=ALICE).text)
        again = client.post("/payments", data={"amount": 0, **values}, headers=ALICE)
        assert again.status_code == 400
        values = self.values(again.text)
        assert client.post("/payments", data={"amount": 5, **values}, headers=ALICE).status_code == 303

    def test_a_replay_needs_the_token_too(self, forms):
        client = forms.client
        values = self.values(client.get("/form", headers=ALICE).text)
        client.post("/payments", data={"amount": 5, **values}, headers=ALICE)
        client.delete_cookie("session")
        answer = client.post("/payments", data={"amount": 5, **values}, headers=ALICE)
        assert answer.status_code == 400
        assert "CSRF" in answer.text

    def test_it_must_have_the_name_that_is_looked_for(self, forms):
        class Misnamed(FlaskForm):
            once = IdempotencyField()

        forms.app.add_url_rule("/misnamed", "misnamed", lambda: str(Misnamed().once()))
        with pytest.raises(ConfigurationError, match="'once'.*'idempotency_key'"):
            forms.client.get("/misnamed", headers=ALICE)

    def test_without_flask_wtf_the_import_says_what_is_missing(self, monkeypatch):
        import importlib
        import sys

        monkeypatch.setitem(sys.modules, "wtforms", None)
        monkeypatch.delitem(sys.modules, "flask_idempotency.wtf")
        with pytest.raises(ImportError, match=r"flask-idempotency\[wtf\]"):
            importlib.import_module("flask_idempotency.wtf")
