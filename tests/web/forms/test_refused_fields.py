"""Fields that are refused: forged, too old, or made for another user, view or application."""

import time

import pytest

from flask_idempotency.testing import age


def flipped(field, place):
    """The field with another character there."""
    return field[:place] + ("A" if field[place] != "A" else "B") + field[place + 1 :]


@pytest.mark.parametrize("required", [True, False])
def test_a_forged_field_is_refused(shop, assert_problem, required):
    shop.add_payments(required=required)
    real = shop.load()
    places = [0, real.index(".") + 1, real.rindex(".") - 2, real.rindex(".") + 2]
    forged = [flipped(real, place) for place in places]
    for field in [*forged, "", "canary", "a.b.c.d", "\u00fc.\u2028", real[:-1], real + ".x"]:
        answer = assert_problem(shop.send(field), 400, "key-malformed")
        assert "was changed" in answer["detail"]
    assert shop.runs == shop.world.records() == []


def test_a_field_is_good_for_its_secret_key_and_its_fallbacks(shop, assert_problem):
    shop.add_payments()
    field = shop.load()
    for other in "another", None:
        shop.app.secret_key = other
        assert_problem(shop.send(field), 400, "key-malformed")
    shop.app.config.update(SECRET_KEY="new", SECRET_KEY_FALLBACKS=["canary-secret"])
    assert [shop.send(each).status_code for each in (field, shop.load())] == [303, 303]


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
    assert shop.runs == []
    field = at(-90, shop.load)
    assert shop.send(field).status_code == 303
    assert at(20, shop.send, field).headers["Idempotent-Replayed"] == "true"
    assert len(shop.runs) == 1
