"""What a route leaves out of the comparison, and what it adds to it."""

import pytest
from flask import request

from flask_idempotency import idempotent
from tests.stores import BOTH
from tests.web.observed.heard import of

URLENCODED = "application/x-www-form-urlencoded"


@pytest.fixture
def compare(world):
    """Adds a view, and says whether a request with the same key counts as the first one again."""

    def add(**options):
        @world.app.post("/orders")
        @idempotent(**options)
        def order():
            return {"files": sorted(request.files)}

        def same(first, second):
            key = f"key-{len(world.records())}"
            first, second = ({"path": "/orders", "key": key, **sent} for sent in (first, second))
            assert world.post(**first).status_code == 200
            response = world.post(**second)
            assert response.status_code in {200, 422}
            return response.status_code == 200

        return same

    return add


def body(text, content_type="application/json", **more):
    return {"data": text.encode(), "content_type": content_type, **more}


def upload(csrf="a", amount="5", thumbnail="small"):
    fields = {"csrf_token": csrf, "amount": amount, 'thumbnail"; filename="a.png': thumbnail}
    head = "--B\r\nContent-Disposition: form-data; name="
    parts = [f'{head}"{name}"\r\n\r\n{value}\r\n' for name, value in fields.items()]
    return body("".join(parts) + "--B--\r\n", "multipart/form-data; boundary=B")


SAMENESS = {
    "members": (
        {"fingerprint": "json", "exclude": ["/sent_at"]},
        body('{"amount":5,"sent_at":1}'),
        body('{"sent_at":2, "amount":5}'),
        body('{"amount":6,"sent_at":1}'),
    ),
    "parameters": (
        {"exclude": ["query:utm source"]},
        body("x", path="/orders?utm+source=a&id=1"),
        body("x", path="/orders?id=1&utm%20source=b"),
        body("x", path="/orders?utm+source=a&id=2"),
    ),
    "fields": (
        {"exclude": ["form:csrf_token"]},
        body("csrf_token=a&amount=5", URLENCODED),
        body("amount=5&csrf%5Ftoken=c", URLENCODED),
        body("csrf_token=a&amount=6", URLENCODED),
    ),
    "parts": (
        {"exclude": ["form:csrf_token", "form:thumbnail"]},
        upload(),
        upload(csrf="b", thumbnail="smaller"),
        upload(amount="6"),
    ),
    "parameters beside fields that count": (
        {"fingerprint": ["/id"], "exclude": ["query:at"]},
        body('{"id":1}', path="/orders?at=1"),
        body('{"id":1,"x":1}', path="/orders?at=2"),
        body('{"id":1}', path="/orders?on=1"),
    ),
    "how a number is written": (
        {"fingerprint": "json-values"},
        body('{"amount": 1}'),
        body('{"amount":1.0}'),
        body('{"amount": "1"}'),
    ),
    "other headers": (
        {"fingerprint": ["", "header:accept-language", "header:Prefer"]},
        body('{"a": 1}', headers={"Accept-Language": "de"}),
        body('{"a":1}', headers={"accept-language": "de", "User-Agent": "other"}),
        body('{"a": 1}', headers={"Accept-Language": "de", "Prefer": ""}),
    ),
}


@pytest.mark.parametrize(("options", "first", "again", "other"), SAMENESS.values(), ids=SAMENESS)
def test_what_is_left_out_does_not_count_and_the_rest_does(compare, options, first, again, other):
    """Each way to leave out in all its detail: ``tests/unit/test_left_out.py``."""
    same = compare(**options)
    assert same(first, again)
    assert not same(first, other)


def test_the_view_still_gets_what_is_left_out(world):
    @world.app.post("/orders")
    @idempotent(fingerprint="json", exclude=["/sent_at", "query:at"])
    def order():
        return {**request.json, **request.args}

    assert world.post("/orders?at=1", json={"sent_at": 2}).json == {"at": "1", "sent_at": 2}


@BOTH
def test_an_equal_request_with_another_time_stamp_is_the_same_key(world, assert_replayed):
    runs = []
    options = {"key": "request", "ttl": 30, "fingerprint": "json", "exclude": ["/sent_at"]}
    view = idempotent(**options)(lambda: runs.append(1) or {"run": len(runs)})
    world.app.add_url_rule("/orders", "order", view, methods=["POST"])
    first, again, other = (
        world.post("/orders", key=None, json={"amount": amount, "sent_at": at})
        for amount, at in ((5, 1), (5, 2), (6, 1))
    )
    assert_replayed(first, again)
    assert other.json == {"run": 2}


@pytest.mark.parametrize("store", ["postgres"], indirect=True)
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"exclude": ["/sent_at", "query:at"]}, " (compared without: /sent_at, query:at)"),
        ({"exclude": []}, ""),
    ],
)
def test_a_rejection_says_by_name_what_was_left_out(world, add_view, assert_problem, options, said):
    add_view(world, fingerprint="json", **options)
    world.post(json={"amount": 5, "sent_at": "canary"})
    response = world.post(json={"amount": 6, "sent_at": "canary"})
    assert_problem(response, 422, "key-reused")
    assert response.json["detail"] == (
        f"This idempotency key was used for another request{said}; find out first what became of that"
        " one."
    )


def test_what_is_only_observed_is_compared_in_the_same_way(world, heard):
    @world.app.post("/orders")
    @idempotent(enforce=False, fingerprint="json", exclude=["/sent_at"])
    def order():
        return {"amount": request.json["amount"]}

    for amount, at in ((5, 1), (5, 2), (6, 1)):
        world.post("/orders", json={"amount": amount, "sent_at": at})
    executed, replayed, rejected = of(heard)
    assert (executed.would, replayed.would, rejected.would) == ("executed", "replayed", "rejected")
    assert "(compared without: /sent_at)" in rejected.error.detail


BEFORE_AND_AFTER = [
    ({}, {"exclude": ["query:at"]}),
    ({"exclude": ["query:at"]}, {"exclude": ["query:at", "query:by"]}),
    ({"fingerprint": "json"}, {"fingerprint": "json", "exclude": ["/sent_at"]}),
    ({"fingerprint": "json"}, {"fingerprint": "json-values"}),
    ({"fingerprint": ["/amount"]}, {"fingerprint": ["/amount", "/sent_at"]}),
    ({"fingerprint": ["/amount"]}, {"fingerprint": ["/amount", "header:Prefer"]}),
    ({"fingerprint": ["/amount"]}, {"fingerprint": ["/amount"], "exclude": ["query:at"]}),
]


@BOTH
@pytest.mark.parametrize(("old", "new"), BEFORE_AND_AFTER)
def test_two_releases_with_two_lists_give_the_stored_response_and_log_that(
    make_world, assert_replayed, caplog, old, new
):
    before = make_world()
    after = make_world(SQLALCHEMY_DATABASE_URI=before.app.config["SQLALCHEMY_DATABASE_URI"])
    for world, options in ((before, old), (after, new)):
        view = idempotent(**options)(lambda: {"amount": request.json["amount"]})
        world.app.add_url_rule("/orders", "order", view, methods=["POST"])
    sent = {"json": {"amount": 5, "sent_at": 1}}
    for key, releases in (("new", (before, after)), ("old", (after, before))):
        caplog.clear()
        first, again = (world.post("/orders?at=1", key, **sent) for world in releases)
        assert_replayed(first, again)
        assert "cannot be compared, so the stored response is replayed" in caplog.text
    caplog.clear()
    for world in before, after:
        assert_replayed(*(world.post("/orders?at=1", f"key-{id(world)}", **sent) for _ in range(2)))
    assert caplog.text == ""


def test_a_part_of_a_form_may_have_no_name(world):
    @world.app.post("/payments")
    @idempotent(exclude=["form:sent_at"])
    def view():
        return {}, 201

    body = b"--B\r\nContent-Disposition: form-data\r\n\r\n1\r\n--B--\r\n"
    for replayed in None, "true":
        answer = world.post(data=body, json=None, content_type="multipart/form-data; boundary=B")
        assert (answer.status_code, answer.headers.get("Idempotent-Replayed")) == (201, replayed)
