"""Is it the same request again? Each part of it changed alone, and each way to compare."""

import pytest
from flask import request

from flask_idempotency import ConfigurationError, idempotent

FIELDS = "application/x-www-form-urlencoded"


@pytest.fixture
def compare(world):
    """Adds a view, and says whether a request with the same key counts as the first one again."""

    def add(read=lambda: "", **options):
        @world.app.route("/shops/<shop>/orders", methods=["POST", "PUT", "PATCH"])
        @idempotent(**options)
        def order(shop):
            return {"read": read()}

        def same(first, second):
            key = f"key-{len(world.records())}"
            sent = [{"path": "/shops/a/orders", **each} for each in (first, second)]
            assert world.post(key=key, **sent[0]).status_code == 200
            status = world.post(key=key, **sent[1]).status_code
            assert status in {200, 422}
            return status == 200

        return same

    return add


def sent(text, kind="application/json"):
    return {"data": text.encode("utf-8", "surrogateescape"), "content_type": kind}


BASE = {"path": "/shops/a/orders?q=1&q=2&r=3", **sent('{"a": 1, "b": "\\u00fc"}')}
CHANGES = {
    "nothing": {},
    "order of the query's names": {"path": "/shops/a/orders?r=3&q=1&q=2"},
    "the charset": {"content_type": "application/json; charset=utf-8"},
    "another header": {"headers": {"User-Agent": "other", "X-Trace": "2"}},
    "the host": {"base_url": "https://other.example"},
    "how JSON is written": sent('{"b":"ü", "a":1}', "application/json;charset=utf-8"),
    "another field of JSON": sent('{"a": 1, "b": "other"}'),
    "the field of JSON": sent('{"a": 2, "b": "ü"}'),
    "how a number is written": sent('{"a": 1.0, "b": "ü"}'),
    "method": {"method": "PUT"},
    "path": {"path": "/shops/b/orders?q=1&q=2&r=3"},
    "query": {"path": "/shops/a/orders?q=1&q=2&r=4"},
    "order of a name's values": {"path": "/shops/a/orders?q=2&q=1&r=3"},
    "no query": {"path": "/shops/a/orders"},
    "no body": {"data": b""},
    "media type": {"content_type": "text/plain"},
}
SAME = {"request": 5, "json": 6, ("/a", "/none"): 7}
"""How many of the changes, from the first on, leave it the same request."""


@pytest.mark.parametrize("fingerprint", SAME, ids=str)
def test_each_part_of_a_request_changed_alone(compare, fingerprint):
    same = compare(fingerprint=fingerprint)
    found = {name: same(BASE, {**BASE, **change}) for name, change in CHANGES.items()}
    assert [name for name, is_same in found.items() if is_same] == [*CHANGES][: SAME[fingerprint]]


def test_the_application_may_say_what_a_request_is(app, world, compare):
    same = compare(fingerprint=lambda: request.headers["X-Order"].encode() or "text")
    first = {"data": b"one", "headers": {"X-Order": "7"}}
    assert same(first, {"data": b"two", "headers": {"X-Order": "7"}, "path": "/shops/b/orders"})
    assert not same(first, {"data": b"one", "headers": {"X-Order": "8"}})
    app.testing = True
    with pytest.raises(ConfigurationError, match="must return bytes, not str"):
        world.post("/shops/a/orders", "other", headers={"X-Order": ""})
    assert len(world.records()) == 2


def form(boundary="a", *, content="receipt", file="r.txt", kind="text/plain", name="n", amount="5"):
    named = f'; name="{name}"' if name else ""
    parts = (
        f"--{boundary}\r\nContent-Disposition: form-data{named}\r\n\r\n{amount}\r\n"
        f'--{boundary}\r\nContent-Disposition: form-data; name="file"; filename="{file}"\r\n'
        f"Content-Type: {kind}\r\n\r\n{content}\r\n--{boundary}--\r\n"
    )
    return sent(parts, f"multipart/form-data; boundary={boundary}")


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
    assert same(form("a"), form("b"))
    assert same(form(name=""), form(name=""))
    assert not same(form(name=""), form(name="", amount="6"))
    for changed in {"amount": "6"}, {"content": "receipt 2"}, {"file": "s"}, {"kind": "text/html"}:
        assert not same(form(), form(**changed))
    first = sent("a=x%20y&b=1&b=2", FIELDS)
    assert same(first, sent("a=x+y&b=%31&b=2", FIELDS))
    for changed in "a=x+z&b=1&b=2", "a=x+y&b=2&b=1", "a=x+y&b=1", "c=x+y&b=1&b=2", "":
        assert not same(first, sent(changed, FIELDS))


@pytest.mark.parametrize("kind", ["multipart/form-data", "multipart/form-data; boundary=x", FIELDS])
def test_a_form_that_cannot_be_read_is_compared_by_its_bytes(app, world, add_view, kind):
    """Werkzeug finds it empty. An old one refuses to read it, with us as without us."""
    add_view(world)
    app.post("/plain")(lambda: {"form": request.form})
    one, two = sent("a=\udce4", kind), sent("a=\udce4&b=\udcf6", kind)  # not UTF-8
    is_read = world.post("/plain", **one).status_code == 200
    assert [world.post(**each).status_code for each in (one, two)] == (
        [201, 422] if is_read else [413, 413]
    )


@pytest.mark.parametrize("code", [1, 5, 6 + 16 * 7], ids=["request", "json", "fields"])
def test_a_record_of_an_older_release_is_replayed_and_logged(
    world, add_view, assert_replayed, caplog, code
):
    add_view(world)
    first = world.post()
    world.sql("update idempotency_record set fingerprint_version = :code", code=code)
    assert_replayed(first, world.post())
    assert "the stored fingerprint was made in another way" in caplog.text
