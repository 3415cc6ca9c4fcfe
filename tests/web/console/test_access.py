"""Who gets in, and what protects the pages from other sites."""

import itertools
import re

import pytest
from flask import Flask, Response, abort, redirect
from flask_wtf import CSRFProtect

from flask_idempotency import ConfigurationError, Idempotency
from flask_idempotency.console import access
from flask_idempotency.flask_context import ask_before_request

from .conftest import INVISIBLE

DIGITS = "0123456789abcdef"

PAGES = [
    ("GET", "/"),
    ("GET", "/records"),
    ("GET", f"/records/{DIGITS}"),
    ("GET", "/static/console.css"),
    ("GET", "/static/icon.svg"),
    ("POST", "/search"),
    ("POST", f"/records/{DIGITS}/body"),
    ("GET", f"/records/{DIGITS}/release"),
    ("POST", f"/records/{DIGITS}/release"),
    ("OPTIONS", "/"),
]


def console(make_world, authorize):
    world = make_world(SECRET_KEY="secret")
    world.app.register_blueprint(world.idempotency.console_blueprint(authorize=authorize))
    return world


def token_in(page):
    return re.search('name="token" value="([^"]+)"', page.text)[1]


def test_every_page_is_listed_here(world):
    rules = [rule for rule in world.app.url_map.iter_rules() if rule.endpoint.startswith("operations.")]
    names = {DIGITS: "<digits>", "release": "<action>"}
    listed = {
        (method, "/".join(names.get(part, part) for part in path.split("/"))) for method, path in PAGES
    }
    static = "/static/<path:filename>"
    for rule in rules:
        for method in rule.methods - {"HEAD", "OPTIONS"}:
            path = rule.rule.removeprefix("/operations")
            assert path == static or (method, path) in listed


def test_nobody_gets_in_without_being_authorized(world):
    for method, path in PAGES:
        response = world.client.open(f"/operations{path}", method=method)
        assert (response.status_code, response.mimetype) == (403, "text/plain"), path
        assert response.headers["Cache-Control"] == "no-store"
        assert "Set-Cookie" not in response.headers


def test_false_none_and_no_text_refuse(make_world):
    nobodies = [False, None, "", " \t", "\u200b", "\0", "\n\u2028", *INVISIBLE]
    client = console(make_world, lambda: nobodies[-1]).client
    while nobodies:
        assert client.get("/operations/").status_code == 403, repr(nobodies[-1])
        nobodies.pop()


def test_a_response_of_authorize_is_sent_as_it_is(make_world):
    response = console(make_world, lambda: redirect("/sign-in")).client.get("/operations/")
    assert (response.status, response.location) == (redirect("/").status, "/sign-in")


def test_the_applications_own_page_keeps_its_headers(make_world):
    theirs = {"Content-Security-Policy": "default-src 'self'", "Cache-Control": "private"}
    page = Response("<h1>Sign in</h1>", headers=theirs)
    response = console(make_world, lambda: page).client.get("/operations/")
    assert {name: response.headers[name] for name in theirs} == theirs
    assert "X-Frame-Options" not in response.headers
    assert "Set-Cookie" not in response.headers


def test_a_name_is_one_line(make_world):
    """It comes from an account, perhaps from what its owner has typed."""
    world = console(make_world, lambda: "ada\n2026-11-23 operation pay: erased by bob\x1b[2J")
    with world.app.test_request_context("/operations/"):
        ask_before_request(world.app)
        assert access.who() == "ada 2026-11-23 operation pay: erased by bob [2J"


def test_a_name_has_an_end(make_world):
    assert console(make_world, lambda: "é" * 200).client.get("/operations/").status_code == 200
    world = console(make_world, lambda: "é" * 201)
    world.app.testing = True
    with pytest.raises(ConfigurationError, match="a name of 201 characters; at most 200 are noted"):
        world.client.get("/operations/")


def test_authorize_may_abort(make_world):
    assert console(make_world, lambda: abort(401)).client.get("/operations/").status_code == 401


def test_what_only_looks_true_lets_nobody_in(make_world):
    strange = [("no", 401), 1, {"error": "no"}, object()]
    world = console(make_world, strange.pop)
    world.app.testing = True
    while strange:
        with pytest.raises(ConfigurationError, match="authorize returned a"):
            world.client.get("/operations/")


def test_authorize_may_be_async_and_true(make_world):
    async def authorize():
        return True

    assert console(make_world, authorize).client.get("/operations/records").status_code == 200


def test_there_is_no_console_without_authorize():
    with pytest.raises(TypeError, match="authorize"):
        Idempotency().console_blueprint()
    with pytest.raises(ConfigurationError, match="authorize is True"):
        Idempotency().console_blueprint(authorize=True)


def test_an_application_without_the_extension_gets_no_console():
    blueprint = Idempotency().console_blueprint(authorize=lambda: True)
    with pytest.raises(ConfigurationError, match="no Idempotency"):
        Flask("other").register_blueprint(blueprint)


def test_without_a_secret_key_there_are_no_pages(make_world):
    world = make_world(PROPAGATE_EXCEPTIONS=True)
    world.app.register_blueprint(world.idempotency.console_blueprint(authorize=lambda: True))
    with pytest.raises(ConfigurationError, match="set SECRET_KEY"):
        world.client.get("/operations/")


def test_a_page_is_kept_out_of_frames_caches_and_other_sites(browser):
    for path in "/", "/records", f"/records/{DIGITS}":
        headers = browser.get(path).headers
        policy = headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        assert "script-src" not in policy
        assert headers["X-Frame-Options"] == "DENY"
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Cache-Control"] == "no-store"
        assert headers["Referrer-Policy"] == "same-origin"


def test_a_page_needs_no_script_and_nothing_from_elsewhere(browser):
    for path in "/", "/records":
        text = browser.get(path).text
        for forbidden in ("<script", "<style", " style=", "http://", "https://", " onclick", "//cdn"):
            assert forbidden not in text


def test_the_cookie_is_only_for_the_console_and_not_for_scripts(browser):
    cookie = browser.get().headers["Set-Cookie"]
    assert "Path=/operations/" in cookie
    assert "HttpOnly" in cookie
    assert "SameSite=Lax" in cookie  # not with another site's form, but with its link
    assert "Set-Cookie" not in browser.get().headers


def test_the_cookie_is_only_for_tls_where_there_is_tls(world):
    headers = {"X-Operator": "ada"}
    client, page = world.app.test_client(), {"base_url": "https://shop.example", "headers": headers}
    cookie = client.get("/operations/", **page).headers["Set-Cookie"]
    assert cookie.startswith("__Secure-idempotency_console=")
    assert "; Secure" in cookie
    assert "Set-Cookie" not in client.get("/operations/", **page).headers
    planted = {**headers, "Cookie": "idempotency_console=planted"}  # by a page without TLS
    response = world.client.get("/operations/", headers=planted, base_url="https://shop.example")
    assert "planted" not in response.headers["Set-Cookie"]


def test_a_form_of_another_site_leaves_those_that_are_open_alone(world, browser):
    browser.get()
    response = world.client.post("/operations/search", headers={"X-Operator": "ada"}, data={"x": 1})
    assert response.status_code == 403
    assert "Set-Cookie" not in response.headers
    assert browser.post("/search", digits=DIGITS).status_code == 404


def test_a_form_without_the_token_is_refused(browser):
    browser.get()
    for token in "", None, "nonsense", "a.b.c":
        response = browser.post("/search", digits=DIGITS, token=token)
        assert response.status_code == 403
        assert "was not sent from a page of this console" in response.text


def test_a_token_is_worth_nothing_to_others(browser, another):
    browser.get()
    for other in another("ada"), another("bob"):
        other.get()
        assert other.post("/search", digits=DIGITS, token=browser.token).status_code == 403
    mallory = another("mallory")
    mallory._client.set_cookie("idempotency_console", browser._client.get_cookie(
        "idempotency_console", path="/operations/").value, path="/operations/")  # fmt: skip
    assert mallory.post("/search", digits=DIGITS, token=browser.token).status_code == 403


def test_a_token_ends_with_the_shift(browser, monkeypatch):
    browser.get()
    monkeypatch.setattr("flask_idempotency.console.access.TOKEN_SECONDS", -1)
    assert browser.post("/search", digits=DIGITS).status_code == 403


def test_a_token_outlives_the_rotation_of_the_secret_key(browser, world):
    browser.get()
    world.app.config.update(SECRET_KEY="newer", SECRET_KEY_FALLBACKS=["secret"])
    assert browser.post("/search", digits=DIGITS).status_code == 404


def test_a_wrong_method_changes_nothing(browser):
    for method, path in itertools.product(("PUT", "DELETE", "POST"), ("/", "/records")):
        response = browser._client.open(
            f"/operations{path}", method=method, headers={"X-Operator": "ada"}
        )
        assert response.status_code == 405


def test_the_views_of_the_console_are_not_protected_by_protect(make_world):
    world = console(make_world, lambda: True)
    world.idempotency.protect(world.app)
    client = world.client
    sent = {"token": token_in(client.get("/operations/records")), "digits": DIGITS}
    assert client.post("/operations/search", data=sent).status_code == 404, "no 400 without a key"


def test_beside_flask_wtf_the_blueprint_is_exempt_from_its_check(make_world):
    world = make_world(SECRET_KEY="secret")
    blueprint = world.idempotency.console_blueprint(authorize=lambda: True)
    world.app.register_blueprint(blueprint)
    csrf = CSRFProtect(world.app)
    client = world.client
    token = token_in(client.get("/operations/records"))
    assert client.post("/operations/search", data={"token": token}).status_code == 400
    csrf.exempt(blueprint)
    assert client.post("/operations/search", data={"token": token}).status_code == 404


def test_a_mounted_application_has_its_cookie_and_links_below_the_mount(browser, world):
    response = world.client.get(
        "/operations/", headers={"X-Operator": "ada"}, base_url="http://localhost/shop"
    )
    assert "Path=/shop/operations/" in response.headers["Set-Cookie"]
    assert 'href="/shop/operations/records"' in response.text


def test_two_consoles_of_one_application_have_their_own_doors(make_world):
    world = make_world(SECRET_KEY="secret")
    for name, door in ("open", True), ("closed", False):
        blueprint = world.idempotency.console_blueprint(authorize=lambda door=door: door, name=name)
        world.app.register_blueprint(blueprint)
    assert world.client.get("/open/records").status_code == 200
    assert world.client.get("/closed/records").status_code == 403
