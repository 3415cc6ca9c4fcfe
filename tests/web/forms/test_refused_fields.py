"""Fields that are refused: forged, too old, or made for another user, view or application."""

import time

import pytest

from flask_idempotency.testing import age
from tests.web.forms.pages import BOB, add_page, add_payments, load, send


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
        assert "was changed" in answer["detail"]
    assert runs == shop.records() == []


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


def replay_of(shop, field, *, later):
    """The response to the same form so many seconds later, by the clock of this host."""
    with pytest.MonkeyPatch.context() as patch:
        now = time.time() + later
        patch.setattr(time, "time", lambda: now)
        return send(shop.client, field)


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

    def test_what_a_host_with_a_fast_clock_made_runs_once(self, shop, an_old_field, monkeypatch):
        runs = add_payments(shop)
        field = an_old_field(-299)
        assert send(shop.client, field).status_code == 303
        age(shop.app, 350)  # the retention is over, and by the host's clock the field is young
        now = time.time() + 350
        monkeypatch.setattr(time, "time", lambda: now)
        again = send(shop.client, field)
        assert (again.status_code, again.headers["Idempotent-Replayed"]) == (303, "true")
        assert len(runs) == 1

    @pytest.mark.parametrize(
        "config", [{"IDEMPOTENCY_TTL": 100, "IDEMPOTENCY_REFUSE_OLD_KEYS": "require"}]
    )
    def test_its_time_is_the_birth_of_its_key(self, shop, an_old_field, assert_problem):
        """The records decide, so one that lives is replayed however old its field is."""
        runs = add_payments(shop)
        assert_problem(send(shop.client, an_old_field(102)), 409, "key-expired")
        assert runs == []
        field = an_old_field(90)
        assert send(shop.client, field).status_code == 303
        with_its_record = replay_of(shop, field, later=20)
        assert with_its_record.headers["Idempotent-Replayed"] == "true"
        assert len(runs) == 1
