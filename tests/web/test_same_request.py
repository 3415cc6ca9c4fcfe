"""Is it the same request again? A replay or a 422, by what has changed: a row of ``CHANGES``.

How the parts of a request become a fingerprint: ``tests/unit/test_fingerprint.py``.
"""

import pytest
from flask import Request, request
from werkzeug.datastructures import ImmutableDict

from flask_idempotency import ConfigurationError, idempotent


@pytest.fixture
def compare(world):
    """Adds a view, and says whether a request with the same key counts as the first one again."""

    def add(read=lambda: "", **options):
        order = idempotent(**options)(lambda shop: {"read": read()})
        methods = ["POST", "PUT", "PATCH"]
        world.app.add_url_rule("/shops/<shop>/orders", "order", order, methods=methods)

        def same(*requests):
            key = f"key-{len(world.records())}"
            sent = [{"path": "/shops/a/orders", "key": key, **each} for each in requests]
            first, again = (world.post(**each) for each in sent)
            is_replay = "Idempotent-Replayed" in again.headers
            assert (first.status_code, again.status_code) == (200, 200 if is_replay else 422)
            return is_replay

        return same

    return add


def sent(text, kind="application/json"):
    return {"data": text.encode("utf-8", "surrogateescape"), "content_type": kind}


BASE = {"path": "/shops/a/orders?q=1&q=2&r=3", **sent('{"a": 1, "b": "\\u00fc"}')}
CHANGES = {
    "order of the query's names": {"path": "/shops/a/orders?r=3&q=1&q=2"},
    "the charset": {"content_type": "application/json; charset=utf-8"},
    "the host and another header": {"base_url": "https://other.example", "headers": {"X-Trace": "2"}},
    "how JSON is written": sent('{"b":"ü", "a":1}', "application/json;charset=utf-8"),
    "another field of JSON": sent('{"a": 1, "b": "other"}'),
    "the field of JSON": sent('{"a": 2, "b": "ü"}'),
    "method": {"method": "PUT"},
    "path": {"path": "/shops/b/orders?q=1&q=2&r=3"},
    "where it is mounted": {"environ_overrides": {"SCRIPT_NAME": "/v2"}},
    "query": {"path": "/shops/a/orders?q=1&q=2&r=4"},
    "no body": {"data": b""},
    "media type": {"content_type": "text/plain"},
}
SAME = {"request": 3, "json": 4, ("/a", "/none"): 5}
"""How many of the changes, from the first on, leave it the same request."""


@pytest.mark.parametrize("fingerprint", SAME, ids=str)
def test_each_part_of_a_request_changed_alone(compare, fingerprint):
    same = compare(fingerprint=fingerprint)
    found = [name for name, change in CHANGES.items() if same(BASE, {**BASE, **change})]
    assert found == [*CHANGES][: SAME[fingerprint]]


def test_the_application_may_say_what_a_request_is(app, world, compare):
    def order():
        assert request.stream.read()  # which is left to the view
        return request.headers["X-Order"].encode() or "text"

    same = compare(lambda: request.stream.read(1).decode(), fingerprint=order)
    first = {"data": b"one", "headers": {"X-Order": "7"}}
    assert same(first, {**first, "data": b"two", "path": "/shops/b/orders"})
    assert not same(first, {**first, "headers": {"X-Order": "8"}})
    app.testing = True
    with pytest.raises(ConfigurationError, match="must return bytes, not str"):
        world.post("/shops/a/orders", "other", headers={"X-Order": ""})
    assert len(world.records()) == 2


def form(boundary="a", *, content="receipt", name="n", amount="5"):
    named = f'; name="{name}"' if name else ""
    parts = (
        f"--{boundary}\r\nContent-Disposition: form-data{named}\r\n\r\n{amount}\r\n"
        f'--{boundary}\r\nContent-Disposition: form-data; name="file"; filename="r.txt"\r\n'
        f"Content-Type: text/plain\r\n\r\n{content}\r\n--{boundary}--\r\n"
    )
    return sent(parts, f"multipart/form-data; boundary={boundary}")


FORM = "application/x-www-form-urlencoded"
CODED = sent("a=x%20y&b=1&b=2", FORM)
FORM_CHANGES = [
    (form("a"), form("b"), True),
    (form(name=""), form(name=""), True),
    (form(name=""), form(name="", amount="6"), False),
    (form(), form(amount="6"), False),
    *((form(), form(content=changed), False) for changed in ("receipt 2", "deceipt")),
    (CODED, sent("a=x+y&b=%31&b=2", FORM), True),
    *((CODED, sent(changed, FORM), False) for changed in ("a=x+z&b=1&b=2", "a=x+y&b=2&b=1", "")),
]


def test_a_form_whose_class_keeps_one_value_of_each_name(app, compare):
    app.request_class = type("Request", (Request,), {"parameter_storage_class": ImmutableDict})
    same = compare(lambda: request.form.get("a"))
    assert same(CODED, CODED)
    assert not same(CODED, sent("a=x+z&b=1&b=2", FORM))


@pytest.mark.parametrize("is_read_before", [False, True])
def test_a_form_is_compared_by_its_parts(app, compare, is_read_before):
    @app.before_request
    def scan():
        if is_read_before and "file" in request.files:
            assert request.files["file"].read(3)

    def read():  # the file is left where it was
        if file := request.files.get("file"):
            assert file.tell() == (3 if is_read_before else 0)
            assert b"eipt" in file.read()

    same = compare(read)
    for first, again, is_same in FORM_CHANGES:
        assert same(first, again) == is_same, again
