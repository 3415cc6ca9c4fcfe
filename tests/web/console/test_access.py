"""Who gets in, and what protects the pages from other sites."""

import pytest
from flask import Flask, Response, abort, redirect
from flask_wtf import CSRFProtect

from flask_idempotency import ConfigurationError, Idempotency

DIGITS = "0123456789abcdef"
OURS = {"Sec-Fetch-Site": "same-origin"}
SOUGHT = {"data": {"digits": DIGITS}, "headers": OURS}


INVISIBLE = "\u115f", "\u1160", "\u2800", "\u3164", "\uffa0", "\u034f", "\ufe0f"
"""Characters that Python calls printable, and of which nothing can be seen."""


def test_nobody_gets_in_without_being_authorized(world):
    values = {"digits": DIGITS, "action": "release", "filename": "console.css"}
    pages = world.app.url_map.bind("localhost")
    rules = [rule for rule in world.app.url_map.iter_rules() if rule.endpoint.startswith("operations.")]
    assert len(rules) >= 7
    for rule in rules:
        given = {name: values[name] for name in rule.arguments}
        for method in rule.methods:
            path = pages.build(rule.endpoint, given)
            response = world.client.open(path, method=method)
            assert (response.status_code, response.mimetype) == (403, "text/plain"), path
            assert response.headers["Cache-Control"] == "no-store"
            assert "Set-Cookie" not in response.headers


def test_what_authorize_returns_lets_in_refuses_or_is_sent_as_it_is(make_world):
    world, found = make_world(TESTING=True), []
    authorize = lambda: abort(401) if found[-1] == "abort" else found[-1]  # noqa: E731
    world.app.register_blueprint(world.idempotency.console_blueprint(authorize=authorize))

    def get(returned):
        found.append(returned)
        return world.client.get("/operations/")

    for nobody in False, None, "", " \t", "\u200b", "\0", "\n\u2028", *INVISIBLE:
        assert get(nobody).status_code == 403, repr(nobody)
    for strange in ("no", 401), 1, {"error": "no"}, object():
        with pytest.raises(ConfigurationError, match="authorize returned a"):
            get(strange)
    theirs = {"Content-Security-Policy": "default-src 'self'", "Cache-Control": "private"}
    headers = get(Response("<h1>Sign in</h1>", headers=theirs)).headers
    assert {name: headers[name] for name in theirs} == theirs
    assert "X-Frame-Options" not in headers
    assert get(redirect("/sign-in")).location == "/sign-in"
    assert get("abort").status_code == 401
    assert get("ada").status_code == 200


def test_there_is_no_console_without_authorize_or_the_extension():
    with pytest.raises(TypeError, match="authorize"):
        Idempotency().console_blueprint()
    with pytest.raises(ConfigurationError, match="authorize is True"):
        Idempotency().console_blueprint(authorize=True)
    with pytest.raises(ConfigurationError, match="no Idempotency"):
        Flask("other").register_blueprint(Idempotency().console_blueprint(authorize=bool))


SAID = {
    "default-src 'none'": True,
    "frame-ancestors 'none'": True,
    "unsafe": False,
    "script-src": False,
}
SENT = {
    "X-Frame-Options": "DENY",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
    "Referrer-Policy": "same-origin",
    "Set-Cookie": None,
}


def test_a_page_needs_nothing_from_elsewhere_and_is_kept_out_of_frames_caches_and_other_sites(
    browser, interrupted
):
    for path in "/", "/records", f"/records/{interrupted}", "/records/ffffffff":
        page = browser.get(path)
        policy = page.headers["Content-Security-Policy"]
        for part, is_there in SAID.items():
            assert (part in policy) == is_there
        assert {name: page.headers.get(name) for name in SENT} == SENT
        for forbidden in ("<script", "<style", " style=", "http://", "https://", " onclick", "//cdn"):
            assert forbidden not in page.text


SHOP = "https://shop.example:8443"


@pytest.mark.parametrize(
    ("headers", "base", "status"),
    [
        (OURS, None, 404),
        ({"Origin": "http://localhost"}, None, 404),
        ({"Origin": SHOP}, SHOP, 404),
        ({}, None, 403),
        ({"Sec-Fetch-Site": "same-site"}, None, 403),
        ({"Sec-Fetch-Site": "cross-site", "Origin": "http://localhost"}, None, 403),
        ({"Origin": "https://localhost"}, None, 403),
        ({"Origin": "http://localhost.evil.example"}, None, 403),
        ({"Origin": "null"}, None, 403),
        ({"Origin": "https://shop.example"}, SHOP, 403),
    ],
)
def test_a_form_is_taken_from_a_page_of_the_same_origin_only(world, completed, headers, base, status):
    sent = {"headers": {"X-Operator": "ada", **headers}, "base_url": base}
    response = world.client.post("/operations/records", data={"digits": "f" * 16}, **sent)
    assert response.status_code == status
    assert ("was not sent from a page of this console" in response.text) == (status == 403)
    response = world.client.post(f"/operations/records/{completed}/body", **sent)
    assert ("canary" in response.text) == (status == 404)


def test_a_mounted_application_has_its_links_below_the_mount(world):
    page = {"headers": {"X-Operator": "ada"}, "base_url": "http://localhost/shop"}
    assert 'href="/shop/operations/records"' in world.client.get("/operations/", **page).text


def test_protect_leaves_the_console_out_and_flask_wtf_may(make_world):
    world = make_world(SECRET_KEY="of Flask-WTF")
    blueprint = world.idempotency.console_blueprint(authorize=lambda: True)
    world.app.register_blueprint(blueprint)
    world.idempotency.protect(world.app)
    csrf = CSRFProtect(world.app)
    assert world.client.post("/operations/records", **SOUGHT).status_code == 400
    csrf.exempt(blueprint)
    assert world.client.post("/operations/records", **SOUGHT).status_code == 404, "no 400: no key"


def test_two_consoles_of_one_application_have_their_own_doors(make_world):
    """Either may be async."""
    world = make_world()

    async def opens():
        return True

    for name, door in ("open", opens), ("closed", lambda: False):
        blueprint = world.idempotency.console_blueprint(authorize=door, name=name)
        world.app.register_blueprint(blueprint)
    assert world.client.get("/open/records").status_code == 200
    assert world.client.get("/closed/records").status_code == 403
