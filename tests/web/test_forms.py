"""The hidden field of a form: its key, whatever header comes with it, unless it is refused.

A page with a form, the view it is sent to, and a browser's part: load the page, send its form.
"""

import re
import time

import pytest
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
from wtforms import IntegerField

from flask_idempotency import ConfigurationError, current_operation, idempotent
from flask_idempotency.integrations.wtf import IdempotencyField
from flask_idempotency.testing import age

FIELD = re.compile(r'<input[^>]* name="idempotency_key"[^>]* value="([\w.-]+)"[^>]*>')
FORM_TYPES = ["application/x-www-form-urlencoded", "multipart/form-data"]
HEADERS = [None, '"one"', '"one", "two"', "", '"1";a=b']
"""What some browsers send with each form: another one each time, or one that is malformed."""

pytestmark = pytest.mark.parametrize("store", ["postgres"], indirect=True)


class Shop:
    """Its client is a browser, which follows no redirects but keeps its cookies."""

    def __init__(self, world):
        self.world, self.app, self.browser = world, world.app, world.app.test_client()
        self.runs = []
        self.add_page("/form", "{{ idempotency_field() }}")
        self.app.add_url_rule("/thanks", "thanks", get_flashed_messages)

    def add_page(self, path, field):
        text = f'<form method="post">{field}<input name="amount"></form>'
        self.app.add_url_rule(path, path, lambda: render_template_string(text))

    def add_payments(self, path="/payments", **options):
        @idempotent(**options)
        def pay():
            self.runs.append(current_operation.key if current_operation else None)
            self.world.db.session.add(self.world.Payment(amount=int(request.form["amount"])))
            self.world.db.session.commit()
            flash("Paid")
            session["basket"] = 7
            return redirect("/thanks", 303)

        self.app.add_url_rule(path, path, pay, methods=["POST"])

    def load(self, path="/form", user="alice"):
        page = self.browser.get(path, headers={"X-User": user}).text
        (tag,) = FIELD.finditer(page)
        assert 'type="hidden"' in tag[0]
        assert 'autocomplete="off"' in tag[0]
        return tag[1]

    def send(self, field, path="/payments", user="alice", header=None, **kwargs):
        """The response to a form; some browsers have a ``header`` of their own for each request."""
        data = {"amount": "5", **kwargs.pop("data", {})}
        if field is not None:
            data["idempotency_key"] = field
        headers = {"X-User": user, **({} if header is None else {"Idempotency-Key": header})}
        return self.browser.post(path, data=data, headers=headers, **kwargs)


@pytest.fixture
def make_shop(make_world):
    def make(**config):
        return Shop(make_world(SECRET_KEY="canary-secret", PROPAGATE_EXCEPTIONS=True, **config))

    return make


@pytest.fixture
def shop(make_shop):
    return make_shop()


@pytest.mark.parametrize(("media_type", "required"), [*zip(FORM_TYPES, [True, False], strict=True)])
def test_a_form_that_is_sent_again_is_one_operation_whatever_header_comes_with_it(
    shop, media_type, required
):
    """Its message is shown once, and nothing of the session is replayed."""
    shop.add_payments(required=required)
    field, shown = shop.load(), []
    for number, header in enumerate(HEADERS):
        answer = shop.send(field, header=header, content_type=media_type)
        assert answer.status_code == 303
        assert answer.headers.get("Idempotent-Replayed") == ("true" if number else None)
        assert ("Set-Cookie" in answer.headers) == (not number)
        shown.append(shop.browser.get(answer.location).json)
    assert shown == [["Paid"], *[[]] * 4]
    assert len(shop.runs) == shop.world.count() == 1
    assert re.fullmatch(r"[\w-]{22}", shop.runs[0])
    assert shop.send(shop.load()).status_code == 303
    assert len(set(shop.runs)) == shop.world.count() == 2, "loaded again, it is another one"


def test_what_comes_with_a_field_or_without_one_is_judged_by_it(shop, assert_problem):
    shop.add_payments()
    shop.add_payments("/open", required=False)
    shop.add_payments("/natural", key=lambda: request.form["amount"])
    field = shop.load()
    shop.send(field)
    assert_problem(shop.send(field, data={"amount": "6"}), 422, "key-reused")
    assert_problem(shop.send(None), 400, "key-required")
    assert_problem(shop.send(None, header="a,b"), 400, "key-malformed")
    assert_problem(shop.send("forged", header="key-1"), 400, "key-malformed")
    twice = assert_problem(shop.send([shop.load(), shop.load()]), 400, "key-malformed")
    assert "more than once" in twice["detail"]
    assert_problem(shop.send("forged", user=""), 401, "scope-unknown")
    answer = shop.world.post(json={"idempotency_key": shop.load()}, key=None)
    assert_problem(answer, 400, "key-required")
    assert len(shop.runs) == len(shop.world.records()) == 1
    for path, header in ("/open", None), ("/payments", "key-1"), ("/payments", "key-1"):
        assert shop.send(None, path, header=header).status_code == 303
    for header in "key-2", "key-3":
        assert shop.send(None, "/natural", header=header).status_code == 303
    assert shop.runs[1:] == [None, "key-1", "5"]


def test_a_field_needs_a_protected_view_which_may_be_in_a_blueprint_and_a_secret_key(shop):
    blueprint = Blueprint("shop", __name__)
    page = "{{ idempotency_field('shop.pay') }}"
    blueprint.add_url_rule("/page", "page", lambda: render_template_string(page))
    blueprint.add_url_rule("/pay", "pay", lambda: "paid", methods=["POST"])
    shop.world.idempotency.protect(blueprint)
    shop.app.register_blueprint(blueprint)
    shop.add_page("/wrong", "{{ idempotency_field('nowhere') }}")
    field = shop.load("/page")
    assert shop.send(field, "/pay").status_code == 200
    again = shop.send(field, "/pay").headers
    assert again["Idempotent-Replayed"] == "true"
    assert not {"Vary", "Set-Cookie"} & set(again.keys()), "it leaves the session alone"
    with pytest.raises(ConfigurationError, match="nowhere is not a protected endpoint"):
        shop.browser.get("/wrong")
    shop.app.secret_key = None
    with pytest.raises(ConfigurationError, match="SECRET_KEY"):
        shop.browser.get("/form")


def test_the_field_of_a_form_class_stands_beside_the_token_against_cross_site_requests(shop):
    """It has the name that is looked for, whatever the form calls it."""
    CSRFProtect(shop.app)

    class PaymentForm(FlaskForm):
        once = IdempotencyField(endpoint="pay")
        amount = IntegerField()

    def page():
        return render_template_string("{{ form.hidden_tag() }}", form=PaymentForm())

    def pay():
        form, payment = PaymentForm(), shop.world.Payment()
        assert form.validate_on_submit()
        form.populate_obj(payment)
        assert not hasattr(payment, "once")
        shop.world.db.session.add(payment)
        shop.world.db.session.commit()
        return redirect("/thanks", 303)

    shop.app.add_url_rule("/wtf", "wtf", page)
    shop.app.add_url_rule("/payments", "pay", idempotent(pay), methods=["POST"])
    field = shop.load("/wtf")
    text = shop.browser.get("/wtf", headers={"X-User": "alice"}).text
    (token,) = re.findall(r'name="csrf_token" type="hidden" value="(.*?)"', text)
    for is_replay in False, True:
        answer = shop.send(field, data={"csrf_token": token})
        assert (answer.status_code, "Idempotent-Replayed" in answer.headers) == (303, is_replay)
    shop.browser.delete_cookie("session")
    refused = shop.send(field, data={"csrf_token": "forged"})
    assert (refused.status_code, "CSRF" in refused.text) == (400, True), "a replay needs it, too"
    assert shop.world.count() == 1


# Fields that are refused: forged, too old, or made for another user, view or application.


def flipped(field, place):
    return field[:place] + ("A" if field[place] != "A" else "B") + field[place + 1 :]


@pytest.mark.parametrize("required", [True, False])
def test_a_forged_field_is_refused_and_one_is_good_for_its_secret_key_and_its_fallbacks(
    shop, assert_problem, required
):
    shop.add_payments(required=required)
    real = shop.load()
    places = [0, real.index(".") + 1, real.rindex(".") - 2, real.rindex(".") + 2]
    forged = [flipped(real, place) for place in places]
    for field in [*forged, "", "canary", "a.b.c.d", "\u00fc.\u2028", real[:-1], real + ".x"]:
        answer = assert_problem(shop.send(field), 400, "key-malformed")
        assert "was changed" in answer["detail"]
    for other in "another", None:
        shop.app.secret_key = other
        assert_problem(shop.send(real), 400, "key-malformed")
    assert shop.runs == shop.world.records() == []
    shop.app.config.update(SECRET_KEY="new", SECRET_KEY_FALLBACKS=["canary-secret"])
    assert [shop.send(each).status_code for each in (real, shop.load())] == [303, 303]


@pytest.mark.parametrize("options", [{}, {"scope": lambda: "shop-1"}])
def test_a_field_is_for_one_user_and_for_the_view_that_it_names_with_its_scope(
    shop, assert_problem, options
):
    shop.add_payments(**options)
    shop.add_payments("/refunds")
    shop.add_page("/named", "{{ idempotency_field('/payments') }}")
    field = shop.load("/named")
    assert_problem(shop.send(field, "/refunds"), 400, "key-malformed")
    assert shop.send(field, user="bob" if options else "alice").status_code == 303
    if options:
        assert_problem(shop.send(shop.load()), 400, "key-malformed")
        return
    refused = assert_problem(shop.send(field, user="bob"), 400, "key-malformed")  # there is one to find
    assert "another user" in refused["detail"]
    assert_problem(shop.send(field, user=""), 401, "scope-unknown")
    assert len(shop.runs) == 1


@pytest.fixture
def at(monkeypatch):
    """Calls a function so many seconds later, by the clock of this host."""

    def at(later, function, *args):
        with monkeypatch.context() as patch:
            now = time.time() + later
            patch.setattr(time, "time", lambda: now)
            return function(*args)

    return at


@pytest.mark.parametrize(("options", "ttl"), [({}, 100), ({"ttl": 1000}, 1000)])
def test_a_field_is_valid_as_long_as_a_record_of_it_lives(make_shop, at, assert_problem, options, ttl):
    """So it never runs twice. One of a host whose clock is ahead is young."""
    shop = make_shop(IDEMPOTENCY_TTL=100)
    shop.add_payments(**options)
    answer = assert_problem(shop.send(at(-ttl - 2, shop.load)), 400, "key-malformed")
    assert "too old" in answer["detail"]
    assert shop.runs == []
    assert shop.send(at(-ttl + 10, shop.load)).status_code == 303
    field = at(299, shop.load)
    assert shop.send(field).status_code == 303
    age(shop.app, ttl + 250)  # the retention is over, and by the host's clock the field is young
    again = at(ttl + 250, shop.send, field)
    assert (again.status_code, again.headers["Idempotent-Replayed"]) == (303, "true")
    assert len(shop.runs) == 2


def test_its_time_is_the_birth_of_its_key(make_shop, at, assert_problem):
    """The records decide, so one that lives is replayed however old its field is."""
    shop = make_shop(IDEMPOTENCY_TTL=100, IDEMPOTENCY_REFUSE_OLD_KEYS="require")
    shop.add_payments()
    assert_problem(shop.send(at(-102, shop.load)), 409, "key-expired")
    field = at(-90, shop.load)
    assert shop.send(field).status_code == 303
    assert at(20, shop.send, field).headers["Idempotent-Replayed"] == "true"
    assert len(shop.runs) == 1
