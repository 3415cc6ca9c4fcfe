"""The recipes of ``docs/forms.md``, as they stand there, pay once, whatever a browser meets."""

from __future__ import annotations

import random
from functools import cache
from html.parser import HTMLParser
from typing import Any
from urllib.parse import urljoin

import pytest
import requests
from flask import render_template_string, session
from flask_wtf.csrf import CSRFProtect, generate_csrf

from flask_idempotency import idempotent
from tests.docs.pages import RECIPES, ROOT, blocks
from tests.recipes.conftest import TROUBLES as AT_WORK
from tests.recipes.conftest import Shop

TROUBLES = [*AT_WORK, "database is away", 401, 429]
URLENCODED, MULTIPART = "application/x-www-form-urlencoded", "multipart/form-data"


class Forms(HTMLParser):
    """The first form of a page: where it is sent, and its fields."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.action: str | None = None
        self.enctype, self.fields = URLENCODED, list[tuple[str, str]]()
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = dict(attributes)
        if tag == "form":
            self.action, self.enctype = given.get("action") or "", given.get("enctype") or URLENCODED
        elif tag == "input":
            self.fields.append((given["name"] or "", given.get("value", "5") or ""))


class Browser:
    """What a browser does, and a user who does what the page says."""

    def __init__(self, shop: Shop, path: str) -> None:
        self.shop, self.path = shop, path
        self.tab = requests.Session()
        self.tab.trust_env = False
        self.tab.headers.update({"Accept": "text/html", "Sec-Fetch-Site": "same-origin"})
        self.sent: tuple[str, list[tuple[str, str]]] | None = None
        self.enctype = URLENCODED
        self.page: requests.Response | None = None

    def open_form(self) -> None:
        self.sent, self.page = None, self.tab.get(self.shop.url + self.path, timeout=20)

    def press(self) -> None:
        """Send the page's form; of a page without one, reload, which sends the last form again."""
        form = Forms(self.page.text) if self.page is not None else None
        if form and form.action is not None:
            self.sent, self.enctype = (urljoin(self.page.url, form.action), form.fields), form.enctype
        assert self.sent
        url, fields = self.sent
        parts = [(name, (None, value)) for name, value in fields]
        form_data = {"files": parts} if self.enctype == MULTIPART else {"data": fields}
        try:
            self.page = self.tab.post(url, **form_data, timeout=20)
        except requests.ConnectionError:
            self.page = None  # the browser's own page, with its button "Reload"

    @property
    def has_paid(self) -> bool:
        return self.page is not None and self.page.ok

    def go_on(self) -> None:
        """What the page says: load the form again, or its button."""
        if self.page is not None and "load the form again" in self.page.text:
            self.open_form()
        self.press()

    def go_on_until_paid(self, most: int = 15) -> None:
        for _ in range(most):
            if self.has_paid:
                assert len(self.shop.payments()) == 1
                return
            self.go_on()
        raise AssertionError(self.page and self.page.text)


def forms(shop: Shop) -> None:
    """The code of the page, and its forms."""
    names = {**vars(shop), "idempotent": idempotent}
    page, recipes = ROOT / "docs/forms.md", RECIPES / "form-pages.md"
    for block in [*blocks(page, "python"), *blocks(recipes, "python")]:
        if not block.mark:
            source = block.source.replace("wait=10", "wait=2")  # a duplicate need not be so patient
            exec(compile(source, block.name, "exec"), names)  # noqa: S102
    form, order_form = [block.text for block in blocks(page, "html")]
    shop.app.add_url_rule("/form", "form", lambda: render_template_string(form))
    shop.app.add_url_rule("/order-form", "order_form", lambda: render_template_string(order_form))
    shop.app.add_url_rule("/payments", "payments", lambda: "<p>Your payments</p>")


def csrf_forms(shop: Shop) -> None:
    """The same with tokens, which end with the session; ``/sign-in`` begins another one."""
    forms(shop)
    CSRFProtect(shop.app)

    def order_form() -> str:
        session["user"] = "alice"
        return render_template_string(
            '<form method="post" action="/orders">{{ idempotency_field() }}'
            '<input type="hidden" name="csrf_token" value="{{ csrf_token() }}"><input name="amount">'
        )

    def sign_in_again() -> str:
        session.clear()
        return generate_csrf()

    shop.app.add_url_rule("/csrf-form", "csrf_form", order_form)
    shop.app.add_url_rule("/sign-in", "sign_in", sign_in_again)


@pytest.fixture(scope="module")
def shops(start) -> Any:
    """A function that opens one of the shops, once."""
    return cache(start)


@pytest.fixture
def path() -> str:
    return "/form"


@pytest.fixture
def shop(shops, path) -> Shop:
    return shops(csrf_forms if path == "/csrf-form" else forms).emptied()


@pytest.fixture
def browser(shop, path) -> Any:
    browser = Browser(shop, path)
    browser.open_form()
    yield browser
    browser.tab.close()


@pytest.mark.parametrize(
    "troubles",
    [
        *(["response is lost", trouble] for trouble in TROUBLES),
        *(random.Random(seed).choices(TROUBLES, k=8) for seed in range(2)),
    ],
)
def test_whatever_happens_one_payment_is_made(browser, shop, troubles):
    shop.troubles += troubles
    browser.press()
    browser.go_on_until_paid()


def test_a_payment_that_outlasts_the_wait_is_made_once(browser, shop):
    """The page says that it still runs; its button asks again for the same one."""
    shop.troubles += ["connection breaks, work goes on"]
    browser.press()
    browser.go_on()
    assert browser.page.status_code == 409
    assert Forms(browser.page.text).fields == browser.sent[1]
    shop.may_end.set()
    browser.go_on_until_paid()


@pytest.mark.parametrize("enctype", [URLENCODED, MULTIPART])
@pytest.mark.parametrize("amount", ["7", " \u00fc&=+\n", '"><b>', ""])
def test_what_was_sent_again_is_the_same_form(browser, shop, amount, enctype):
    """Fields of one name need not follow each other: line items, or a checkbox with a hidden field."""
    shop.troubles += ["response is lost"]
    form = Forms(browser.page.text)
    note = [("note", amount), ("quantity", "1"), ("note", "other"), *form.fields, ("quantity", "2")]
    browser.sent, browser.page, browser.enctype = (f"{shop.url}/payments", note), None, enctype
    browser.press()
    shop.troubles += ["nobody is signed in"]
    browser.press()
    assert browser.page.status_code == 401
    browser.press()
    assert browser.has_paid
    assert browser.sent[1] == note
    assert len(shop.payments()) == 1


def test_a_changed_form_leads_to_the_payments_and_not_to_a_new_form(browser, shop):
    shop.troubles += ["response is lost"]
    form = Forms(browser.page.text)
    browser.press()
    changed = [(name, "6" if name == "amount" else value) for name, value in form.fields]
    browser.sent, browser.page = (f"{shop.url}/payments", changed), None
    browser.press()
    assert browser.page.status_code == 422
    assert 'href="/payments"' in browser.page.text
    assert "<form" not in browser.page.text
    assert "load" not in browser.page.text


@pytest.mark.parametrize("path", ["/form", "/csrf-form"])
@pytest.mark.parametrize("site", ["cross-site", "same-site", "none", None])
def test_a_form_that_another_site_sent_is_not_offered_again(browser, shop, site, path):
    """Not even with a field of this user, nor a token: no page of ours may become a button for it."""
    browser.tab.headers["Sec-Fetch-Site"] = site
    browser.tab.cookies.clear()  # it does not come with them, and the token is worth nothing
    shop.troubles += ["nobody is signed in"]
    browser.press()
    assert browser.page.status_code == (401 if path == "/form" else 400)
    assert "<form" not in browser.page.text
    assert "csrf_token" not in browser.page.text
    assert shop.payments() == []


def test_a_form_with_a_file_is_to_be_reloaded(browser, shop):
    """A hidden field cannot be a file, not even one that was left empty."""
    shop.troubles += ["nobody is signed in"]
    parts = {name: (None, value) for name, value in Forms(browser.page.text).fields}
    parts["file"] = ("", b"")
    page = browser.tab.post(f"{shop.url}/payments", files=parts, timeout=20)
    assert (page.status_code, "<form" in page.text) == (401, False)
    assert "Reload this page" in page.text


@pytest.mark.parametrize("path", ["/csrf-form"])
@pytest.mark.parametrize("signs_in", ["in the same session", "in another session", "before"])
def test_a_session_that_ended_with_its_token_leads_to_no_second_payment(browser, shop, signs_in):
    shop.troubles += ["response is lost", "nobody is signed in"]
    browser.press()
    token = dict(browser.sent[1])["csrf_token"]
    browser.tab.cookies.clear()
    if signs_in == "before":
        browser.tab.get(f"{shop.url}/sign-in", timeout=20)
    browser.press()
    assert browser.page.status_code == 400
    fields = Forms(browser.page.text).fields
    assert [name for name, _ in fields] == [name for name, _ in browser.sent[1]]
    assert dict(fields)["csrf_token"] != token
    if signs_in == "in another session":
        browser.tab.get(f"{shop.url}/sign-in", timeout=20)
        browser.press()
        assert browser.page.status_code == 400
    browser.press()
    assert browser.has_paid
    assert len(shop.payments()) == 1


@pytest.mark.parametrize("path", ["/order-form"])
@pytest.mark.parametrize("trouble", TROUBLES)
def test_a_user_who_opens_the_form_of_one_purchase_each_time_pays_once(browser, shop, trouble):
    shop.troubles += ["response is lost", trouble, trouble]
    while not browser.has_paid or browser.sent is None:
        browser.open_form()
        browser.press()
    assert len(shop.payments()) == 1
    browser.open_form()
    browser.press()
    assert len(shop.payments()) == 1
