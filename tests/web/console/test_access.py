"""Who gets in, and what protects the pages from other sites."""

import pytest
from flask import Flask, Response, abort, redirect
from flask_wtf import CSRFProtect

from flask_idempotency import ConfigurationError, Idempotency

from .conftest import INVISIBLE

DIGITS = "0123456789abcdef"

PAGES = [
    ("GET", "/"),
    ("GET", "/records"),
    ("GET", f"/records/{DIGITS}"),
    ("GET", "/static/console.css"),
    ("GET", "/static/icon.svg"),
    ("POST", "/records"),
    ("POST", f"/records/{DIGITS}/body"),
    ("GET", f"/records/{DIGITS}/release"),
    ("POST", f"/records/{DIGITS}/release"),
    ("OPTIONS", "/"),
]


OURS = {"Sec-Fetch-Site": "same-origin"}


ACTION = "<any(release, resolve, fail, forget):action>"


def console(make_world, authorize):
    world = make_world()
    world.app.register_blueprint(world.idempotency.console_blueprint(authorize=authorize))
    return world


def test_every_page_is_listed_here(world):
    rules = [rule for rule in world.app.url_map.iter_rules() if rule.endpoint.startswith("operations.")]
    names = {DIGITS: "<digits>", "release": ACTION}
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


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Sec-Fetch-Site": "same-origin"}, 404),
        (
            {"Sec-Fetch-Site": "same-origin", "Origin": "https://evil.example"},
            404,
        ),  # no page can say so
        ({"Origin": "http://localhost"}, 404),
        ({}, 403),
        ({"Sec-Fetch-Site": "same-site"}, 403),
        ({"Sec-Fetch-Site": "cross-site", "Origin": "http://localhost"}, 403),
        ({"Sec-Fetch-Site": "none"}, 403),
        ({"Sec-Fetch-Site": ""}, 403),
        ({"Origin": "https://localhost"}, 403),
        ({"Origin": "http://localhost:8080"}, 403),
        ({"Origin": "http://localhost.evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": ""}, 403),
    ],
)
def test_a_form_is_taken_from_a_page_of_the_same_origin_only(world, interrupted, headers, status):
    digits, headers = interrupted(), {"X-Operator": "ada", **headers}
    response = world.client.post("/operations/records", data={"digits": "f" * 16}, headers=headers)
    assert response.status_code == status
    refused = "was not sent from a page of this console"
    assert (refused in response.text) == (status == 403)
    response = world.client.post(f"/operations/records/{digits}/body", headers=headers)
    assert response.status_code == (403 if status == 403 else 200)


def test_no_page_sets_a_cookie(browser, interrupted):
    for path in "/", "/records", f"/records/{interrupted()}":
        assert "Set-Cookie" not in browser.get(path).headers


def test_the_origin_is_that_of_the_scheme_and_port_in_use(world):
    shop, headers = "https://shop.example:8443", {"X-Operator": "ada"}
    for origin, status in (shop, 404), ("https://shop.example", 403), ("http://shop.example:8443", 403):
        sent = {**headers, "Origin": origin}
        data = {"digits": DIGITS}
        response = world.client.post("/operations/records", base_url=shop, headers=sent, data=data)
        assert response.status_code == status


def test_a_mounted_application_has_its_links_below_the_mount(world):
    page = {"headers": {"X-Operator": "ada"}, "base_url": "http://localhost/shop"}
    assert 'href="/shop/operations/records"' in world.client.get("/operations/", **page).text


def test_a_wrong_method_changes_nothing(browser):
    for method, path in ("PUT", "/"), ("DELETE", "/"), ("POST", "/"), ("DELETE", "/records"):
        response = browser._client.open(
            f"/operations{path}", method=method, headers={"X-Operator": "ada", **OURS}
        )
        assert response.status_code == 405


def test_the_views_of_the_console_are_not_protected_by_protect(make_world):
    world = console(make_world, lambda: True)
    world.idempotency.protect(world.app)
    client = world.client
    response = client.post("/operations/records", data={"digits": DIGITS}, headers=OURS)
    assert response.status_code == 404, "no 400 without a key"


def test_beside_flask_wtf_the_blueprint_is_exempt_from_its_check(make_world):
    world = make_world(SECRET_KEY="of Flask-WTF")
    blueprint = world.idempotency.console_blueprint(authorize=lambda: True)
    world.app.register_blueprint(blueprint)
    csrf = CSRFProtect(world.app)
    client = world.client
    form = {"data": {"digits": DIGITS}, "headers": OURS}
    assert client.post("/operations/records", **form).status_code == 400
    csrf.exempt(blueprint)
    assert client.post("/operations/records", **form).status_code == 404


def test_two_consoles_of_one_application_have_their_own_doors(make_world):
    world = make_world()
    for name, door in ("open", True), ("closed", False):
        blueprint = world.idempotency.console_blueprint(authorize=lambda door=door: door, name=name)
        world.app.register_blueprint(blueprint)
    assert world.client.get("/open/records").status_code == 200
    assert world.client.get("/closed/records").status_code == 403
