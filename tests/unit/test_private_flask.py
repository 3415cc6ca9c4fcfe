"""What is private in Flask, or differs between its releases: one file uses it, and it is as expected.

``make lowest`` asks Flask 3.0, ``make test`` 3.1, and ``make newest`` the branch that becomes 3.2.
"""

import ast
import re
import sys
from functools import cache
from pathlib import Path

import flask
import pytest
import werkzeug
from flask import Flask, after_this_request, g, request

import flask_idempotency
from flask_idempotency.private import (
    functions_after_request,
    needed_request,
    present_context,
    present_request,
)

PACKAGE = Path(flask_idempotency.__file__).parent
THE_FILE = PACKAGE / "private.py"
OTHERS = ("flask.", "werkzeug.")

DIFFERS = {"app_ctx", "request_ctx", "AppContext", "RequestContext"}
"""Public, but one thing in Flask 3.2 and two before, or deprecated there."""

DIFFERS |= {f"do_teardown_{of}" for of in ("appcontext", "request")}
DIFFERS |= {"handle_exception", "handle_http_exception", "handle_user_exception", "log_exception"}
DIFFERS |= {"dispatch_request", "full_dispatch_request", "preprocess_request", "process_response"}
DIFFERS |= {"finalize_request", "make_default_options_response"}
"""The methods of an application whose first argument is the context from Flask 3.2 on."""


@pytest.fixture
def plain():
    """Not called ``app``: pytest-flask pushes a context for that."""
    return Flask(__name__)


def test_the_present_request_and_its_context_are_those_of_flasks_proxies(plain):
    assert present_request() is present_context() is None
    with plain.app_context():
        assert present_request() is None
        assert present_context() is g._get_current_object()
        with plain.test_request_context():
            here = present_request()
            assert here is needed_request() is request._get_current_object()
            assert present_context() is g._get_current_object()
            with plain.app_context(), plain.app_context():
                assert present_request() is here
                assert present_context() is g._get_current_object()
        with pytest.raises(RuntimeError, match="request"):
            needed_request()


def test_a_request_keeps_what_was_registered_for_after_it_in_one_list_in_their_order(plain):
    with plain.test_client() as client:

        @plain.get("/")
        def view():
            functions = functions_after_request()
            assert functions == []
            added = [lambda response: response, lambda _response: pytest.fail("it was taken away")]
            for function in added:
                after_this_request(function)
            assert functions_after_request() is functions
            assert functions == added
            functions.clear()
            return "as it was"

        assert client.get("/").text == "as it was"


@cache
def private_names():
    """Every private name in the sources of Flask and Werkzeug."""
    sources = (path for one in (flask, werkzeug) for path in Path(one.__file__).parent.rglob("*.py"))
    return {name for path in sources for name in re.findall(r"\b_[a-z]\w*", path.read_text("utf-8"))}


def used_names(path):
    """What a file imports from Flask, and what it reads from anything that is not itself."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        match node:
            case ast.ImportFrom(module=str(module), names=names) if module.startswith(OTHERS):
                yield from (alias.name for alias in names)
            case ast.Attribute(value=ast.Name(id="self" | "cls") | ast.Call(func=ast.Name(id="super"))):
                pass
            case ast.Attribute(attr=attr):
                yield attr


def test_only_one_file_uses_what_is_private_in_flask_or_differs():
    asked = (private_names() - set(dir(sys))) | DIFFERS
    used = {path: set(used_names(path)) & asked for path in sorted(PACKAGE.rglob("*.py"))}
    assert {"_cv_app", "_after_request_functions"} <= used.pop(THE_FILE)
    assert {path.name: names for path, names in used.items() if names} == {}
