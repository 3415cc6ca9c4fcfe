"""Is it the same request again? Each part of it changed alone, and each way to compare."""

import io

import pytest
from flask import request

from flask_idempotency import ConfigurationError, idempotent


@pytest.fixture
def compare(world):
    """Adds a view, and says whether a request with the same key counts as the first one again."""

    def add(read=lambda: request.form, **options):
        @world.app.route("/shops/<shop>/orders", methods=["POST", "PUT", "PATCH"])
        @idempotent(**options)
        def order(shop):
            return {"read": read()}

        def same(first, second):
            key = f"key-{len(world.records())}"
            assert ask(world, key, **first).status_code == 200
            response = ask(world, key, **second)
            assert response.status_code in {200, 422}
            return response.status_code == 200

        return same

    def ask(world, key, path="/shops/a/orders", **kwargs):
        return world.post(path, key, **kwargs)

    return add


BASE = {
    "path": "/shops/a/orders?q=1&q=2&r=3",
    "data": b'{"a": 1}',
    "content_type": "application/json",
}


def test_each_part_of_a_request_changed_alone_makes_another(compare):
    same = compare()
    assert same(BASE, BASE)
    assert not same(BASE, {**BASE, "method": "PUT"})
    assert not same(BASE, {**BASE, "method": "PATCH"})
    assert not same(BASE, {**BASE, "path": "/shops/b/orders?q=1&q=2&r=3"})
    assert not same(BASE, {**BASE, "path": "/shops/a/orders?q=1&q=2&r=4"})
    assert not same(BASE, {**BASE, "path": "/shops/a/orders?q=1&q=2"})
    assert not same(BASE, {**BASE, "path": "/shops/a/orders?q=2&q=1&r=3"})
    assert not same(BASE, {**BASE, "path": "/shops/a/orders"})
    assert not same(*({**BASE, "path": f"/shops/a/orders?q={space}"} for space in ("+", "%20")))
    assert not same(BASE, {**BASE, "data": b'{"a": 2}'})
    assert not same(BASE, {**BASE, "data": b'{"a":1}'})
    assert not same(BASE, {**BASE, "data": b""})
    assert not same(BASE, {**BASE, "content_type": "text/plain"})


def test_what_says_nothing_about_the_request_is_not_compared(compare):
    same = compare()
    assert same(BASE, {**BASE, "path": "/shops/a/orders?r=3&q=1&q=2"})
    assert same(BASE, {**BASE, "content_type": "application/json; charset=utf-8"})
    assert same(BASE, {**BASE, "headers": {"User-Agent": "other", "X-Trace": "2"}})
    assert same(BASE, {**BASE, "base_url": "https://other.example"})


def json_request(text, content_type="application/json"):
    return {"data": text.encode(), "content_type": content_type}


def test_json_may_be_compared_by_its_meaning(compare):
    same = compare(fingerprint="json")
    first = json_request('{"a": 1, "b": "\\u00fc"}')
    assert same(first, json_request('{"b":"ü", "a":1}', "application/json;charset=utf-8"))
    assert not same(first, json_request('{"a": 1.0, "b": "ü"}'))
    assert not same(first, {**first, "path": "/shops/b/orders"})


def test_only_some_fields_may_be_compared(compare):
    same = compare(fingerprint=["/order/id", "/amount"])
    first = json_request('{"order": {"id": 7, "at": "noon"}, "amount": 5}')
    assert same(first, json_request('{"amount":5,"order":{"at":"later","id":7},"x":1}'))
    assert not same(first, json_request('{"order": {"id": 8, "at": "noon"}, "amount": 5}'))
    assert not same(first, {**first, "method": "PUT"})


def test_the_application_may_say_what_a_request_is(compare):
    def order():
        return request.headers["X-Order"].encode()

    same = compare(fingerprint=order)
    first = {"data": b"one", "headers": {"X-Order": "7"}}
    assert same(first, {"data": b"two", "headers": {"X-Order": "7"}, "path": "/shops/b/orders"})
    assert not same(first, {"data": b"one", "headers": {"X-Order": "8"}})


def test_a_callable_that_gives_no_bytes_is_a_mistake_that_is_named(app, world, add_view):
    app.testing = True
    runs = add_view(world, fingerprint=lambda: "text")
    with pytest.raises(ConfigurationError, match="must return bytes, not str"):
        world.post()
    assert runs == []
    assert world.records() == []


MALFORMED = [b'{"canary": 1, "canary": 2}', b"\xff", b"[" * 100_000]


@pytest.mark.parametrize("fingerprint", ["json", ["/order/id"]], ids=str)
def test_a_body_that_is_not_the_json_it_claims_is_malformed(
    world, add_view, assert_problem, fingerprint
):
    runs = add_view(world, fingerprint=fingerprint)
    for body in MALFORMED:
        response = world.post(data=body, content_type="application/json")
        assert_problem(response, 400, "body-malformed")
    assert runs == []
    assert world.records() == []


def test_by_default_nothing_has_to_be_json(world, add_view):
    runs = add_view(world)
    for number, body in enumerate(MALFORMED):
        response = world.post(key=f"k{number}", data=body, content_type="application/json")
        assert response.status_code == 201
    assert len(runs) == len(MALFORMED)


def form(boundary, *, content=b"receipt", filename="r.txt", content_type="text/plain", amount="5"):
    parts = (
        f'--{boundary}\r\nContent-Disposition: form-data; name="amount"\r\n\r\n{amount}\r\n'
        f'--{boundary}\r\nContent-Disposition: form-data; name="file"; filename="{filename}"\r\n'
        f"Content-Type: {content_type}\r\n\r\n"
    )
    data = parts.encode() + content + f"\r\n--{boundary}--\r\n".encode()
    return {"data": data, "content_type": f"multipart/form-data; boundary={boundary}"}


def test_a_form_is_compared_by_its_parts(compare):
    same = compare()
    first = form("aaaa")
    assert same(first, form("bbbb"))
    assert not same(first, form("bbbb", amount="6"))
    assert not same(first, form("bbbb", content=b"changed"))
    assert not same(first, form("bbbb", filename="s.txt"))
    assert not same(first, form("bbbb", content_type="text/html"))
    assert not same(form("a", content=b""), form("a", content=b"x"))


FIELDS = "application/x-www-form-urlencoded"


@pytest.mark.parametrize("read_first", [False, True])
def test_urlencoded_fields_are_compared_as_they_are_parsed(app, compare, read_first):
    @app.before_request
    def before():
        if read_first:
            assert request.form is not None

    same = compare()
    first = {"data": b"a=x%20y&b=1&b=2", "content_type": FIELDS}
    assert same(first, {**first, "data": b"a=x+y&b=%31&b=2"})
    for changed in b"a=x+z&b=1&b=2", b"a=x+y&b=2&b=1", b"a=x+y&b=1", b"c=x+y&b=1&b=2", b"":
        assert not same(first, {**first, "data": changed})


def test_a_form_that_the_application_has_parsed_is_compared_with_its_files(app, compare):
    @app.before_request
    def scan():
        assert request.files["file"].read(3)

    same = compare(read=lambda: request.files["file"].read().decode())
    first = form("aaaa")
    assert same(first, form("bbbb"))
    assert not same(first, form("bbbb", content=b"receipt of another"))
    assert not same(first, form("bbbb", amount="6"))


def test_a_file_that_was_read_from_is_left_where_it_was(app, world):
    @app.before_request
    def scan():
        assert request.files["file"].read(3) == b"rec"

    @app.post("/upload")
    @idempotent
    def upload():
        return request.files["file"].read()

    data = {"amount": "5", "file": (io.BytesIO(b"receipt"), "r.txt")}
    assert world.post("/upload", data=data).data == b"eipt"


SEEN = {"data": lambda: request.data, "form": lambda: request.form, "values": lambda: request.values}


@pytest.mark.parametrize("read", SEEN.values(), ids=SEEN)
def test_the_view_finds_a_form_as_if_nobody_had_compared_it(app, world, read):
    app.post("/plain", endpoint="plain")(lambda: repr(read()))
    app.post("/pay", endpoint="pay")(idempotent(lambda: repr(read())))
    sent = {"data": b"a=1&b=2", "content_type": FIELDS}
    assert world.post("/pay", **sent).text == world.post("/plain", **sent).text


def test_the_view_still_finds_the_form_and_the_file(app, world):
    @app.post("/upload")
    @idempotent
    def upload():
        return {**request.form, "file": request.files["file"].read().decode()}

    data = {"amount": "5", "file": (io.BytesIO(b"receipt"), "r.txt")}
    assert world.post("/upload", data=data).json == {"amount": "5", "file": "receipt"}


UNREADABLE = {
    "multipart without a boundary": ("multipart/form-data", b"one", b"two"),
    "multipart without its boundary": ("multipart/form-data; boundary=x", b"one", b"two"),
    "form that is not UTF-8": ("application/x-www-form-urlencoded", b"a=\xe4", b"a=\xe4&b=\xf6"),
}


@pytest.mark.parametrize("case", UNREADABLE.values(), ids=UNREADABLE)
def test_a_form_that_cannot_be_read_is_compared_by_its_bytes(compare, case):
    """As a form Werkzeug finds it empty, or refuses to read it (before 3.0.6)."""
    content_type, first, second = case
    same = compare(read=lambda: len(request.get_data()))
    assert not same(
        {"data": first, "content_type": content_type},
        {"data": second, "content_type": content_type},
    )


OLDER = {"request": 1, "json": 5, "fields": 6 + 16 * 7}


@pytest.mark.parametrize("code", OLDER.values(), ids=OLDER)
def test_a_record_of_an_older_release_is_replayed_and_logged(
    world, add_view, assert_replayed, caplog, code
):
    runs = add_view(world)
    first = world.post()
    world.sql("update idempotency_record set fingerprint_version = :code", code=code)
    assert_replayed(first, world.post())
    assert "the stored fingerprint was made in another way" in caplog.text
    assert len(runs) == 1
