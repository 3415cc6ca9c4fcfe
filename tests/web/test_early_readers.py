"""Who reads a request's body before ``before_request`` functions do: kept all the same, or refused."""

import io
from contextlib import ExitStack

import pytest
from flask import Blueprint, Request, request, request_started
from flask import request as flask_request
from flask.sessions import SecureCookieSessionInterface
from flask_wtf import FlaskForm
from wtforms import IntegerField

from flask_idempotency import ConfigurationError, current_operation, idempotent

BODIES = {
    "form": {"data": {"amount": "5"}},
    "multipart": {"data": {"amount": "5"}, "content_type": "multipart/form-data"},
    "upload": {"data": {"amount": "5", "scan": (b"content", "scan.txt")}},
    "json": {"json": {"amount": 5}},
}


class Payment(FlaskForm):
    class Meta:
        csrf = False

    amount = IntegerField()


READERS = {
    "a form": lambda: Payment().amount.data,
    "values": lambda: request.values.get("amount"),
    "json": lambda: request.get_json(silent=True),
    "data": lambda: request.get_data(parse_form_data=False),
}


def body(kind):
    sent = {name: value for name, value in BODIES[kind].items() if name != "json"}
    if "data" in sent:
        sent["data"] = {
            name: (io.BytesIO(value[0]), value[1]) if isinstance(value, tuple) else value
            for name, value in sent["data"].items()
        }
    return sent or BODIES[kind]


@pytest.fixture
def seen():
    return []


@pytest.fixture
def blueprint(seen):
    """A view below two blueprints, which tells what its request still has."""

    @idempotent
    def pay():
        amount = (request.get_json(silent=True) or request.form or {}).get("amount")
        seen.append((str(amount), len(request.files)))
        return {"key": current_operation.key}, 201

    outer, inner = Blueprint("outer", __name__), Blueprint("inner", __name__)
    inner.add_url_rule("/<kind>/payments", "pay", pay, methods=["POST"])
    return outer, inner


def preprocess(app, outer, inner, where, read):
    """Have ``read`` called as ihatemoney calls its form: when the URL's values are known."""

    def pull(_endpoint, values):
        values.pop("kind")
        read()

    {
        "app": app.url_value_preprocessor,
        "blueprint, for the app": inner.app_url_value_preprocessor,
        "outer blueprint": outer.url_value_preprocessor,
        "blueprint": inner.url_value_preprocessor,
    }[where](pull)


WHERE = ["blueprint, for the app", "outer blueprint", "blueprint"]


@pytest.mark.parametrize(
    ("where", "read"), [*(("app", read) for read in READERS), *((where, "a form") for where in WHERE)]
)
def test_a_url_value_preprocessor_may_read_the_body(
    world, blueprint, seen, where, read, assert_replayed, assert_problem
):
    outer, inner = blueprint
    preprocess(world.app, outer, inner, where, READERS[read])
    outer.register_blueprint(inner)
    world.app.register_blueprint(outer)
    for kind in BODIES:
        seen.clear()
        sent = {"path": "/en/payments", "key": kind}
        first = world.post(**sent, **body(kind))
        assert first.status_code == 201
        if read != "data" or kind == "json":  # it is read before the form
            assert seen == [("5", int(kind == "upload"))]
        assert_replayed(first, world.post(**sent, **body(kind)))
        changed = {"json": {"amount": 6}} if kind == "json" else {"data": {"amount": "6"}}
        assert_problem(world.post(**sent, **changed), 422, "key-reused")
        assert len(seen) == 1


@pytest.fixture
def stack():
    with ExitStack() as stack:
        yield stack


@pytest.fixture(params=["receiver", "requests", "sessions"])
def early(request, world, stack):
    """Has a function called before any that Flask calls for a request; gives the reader's name."""

    def have(read):
        class Sessions(SecureCookieSessionInterface):
            def open_session(self, app, request):
                read(request)
                return super().open_session(app, request)

        class Requests(Request):
            def __init__(self, *args, **kwargs):
                super().__init__(*args, **kwargs)
                read(self)

        def measure(_app):
            read(flask_request)

        if request.param == "receiver":
            stack.enter_context(request_started.connected_to(measure, world.app))
            return "measure, a receiver of request_started,"
        if request.param == "requests":
            world.app.request_class = Requests
        else:
            world.app.session_interface = Sessions()
        return "the application's class of requests or of sessions"

    return have


USED_UP = {
    "form": (["form", "multipart", "upload"], lambda request: request.form),
    "stream": (list(BODIES), lambda request: request.stream.read()),
    "data": (list(BODIES), lambda request: request.get_data(cache=False)),
}


@pytest.mark.parametrize("read", USED_UP)
class TestTooEarly:
    """What nobody can undo is refused, and told before it is."""

    def test_it_is_a_500_that_says_why(self, world, add_view, early, read):
        world.app.config["PROPAGATE_EXCEPTIONS"] = True
        kinds, reader = USED_UP[read]
        early(reader)
        runs = add_view(world)
        for kind in kinds:
            with pytest.raises(ConfigurationError, match=r"before the idempotent view.*get_data\(\)"):
                world.post(**body(kind))
        assert runs == []

    def test_observing_says_so(self, world, add_view, early, read, heard):
        kinds, reader = USED_UP[read]
        early(reader)
        runs = add_view(world, enforce=False)
        for kind in kinds:
            del heard[:]
            assert world.post(**body(kind)).status_code == 201
            [event] = [event for name, event in heard if name == "operation_observed"]
            assert (event.would, type(event.error)) == ("rejected", ConfigurationError)
        assert len(runs) == len(kinds)


HARMLESS = {
    "data": lambda request: request.get_data(),
    "data, then the form": lambda request: request.get_data() and request.form,
    "json": lambda request: request.get_json(silent=True),
    "length": lambda request: request.content_length,
}


@pytest.mark.parametrize("read", HARMLESS)
def test_what_leaves_the_body_there_is_no_reason_to_refuse(
    world, add_view, early, read, heard, assert_replayed
):
    early(HARMLESS[read])
    add_view(world)
    add_view(world, "/observed", endpoint="observed", during=lambda: flask_request.form, enforce=False)
    for kind in "multipart", "json":
        key = {"key": f"key-{kind}"}
        assert_replayed(*(world.post(**key, **body(kind)) for _ in range(2)))
        for _ in range(2):
            assert world.post(path="/observed", **key, **body(kind)).status_code == 201
    told = [event.would for name, event in heard if name == "operation_observed"]
    assert told == ["executed", "replayed"] * 2


def test_the_form_of_what_is_no_form_is_no_reason_either(
    world, add_view, early, heard, assert_replayed
):
    early(lambda request: request.form)
    add_view(world)
    add_view(world, "/observed", endpoint="observed", enforce=False)
    assert_replayed(*(world.post() for _ in range(2)))
    for _ in range(2):
        assert world.post(path="/observed").status_code == 201
    told = [event.would for name, event in heard if name == "operation_observed"]
    assert told == ["executed", "replayed"]
