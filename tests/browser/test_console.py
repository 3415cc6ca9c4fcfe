"""The console as a person uses it: by eye, by keyboard, by screen reader, on a phone."""

from __future__ import annotations

import pytest

from tests.browser.conftest import DARK, LIGHT, ROOT, assert_no_faults


@pytest.mark.parametrize("scheme", [LIGHT, DARK])
def test_no_page_has_a_fault_that_axe_finds_or_is_wider_than_a_phone(page, interrupted, completed):
    paths = [
        completed,
        f"{completed}/forget",
        f"{ROOT}/records/{'f' * 16}",  # is not there
        f"{ROOT}/",
        f"{ROOT}/records",
        f"{ROOT}/records?state=failed",
        interrupted,
        *(f"{interrupted}/{action}" for action in ("release", "resolve", "fail")),
    ]
    for path in paths:
        page.goto(path)
        assert_no_faults(page)
        for width in 390, 320:
            page.set_viewport_size({"width": width, "height": 800})
            assert page.evaluate("document.documentElement.scrollWidth") <= width, path


def test_the_stylesheet_is_loaded_and_follows_the_scheme(page):
    colours = set()
    for scheme in LIGHT, DARK:
        page.emulate_media(color_scheme=scheme)
        page.goto(f"{ROOT}/")
        colours.add(page.evaluate("getComputedStyle(document.body.parentElement).backgroundColor"))
    assert len(colours) == 2


def tab_to(page, name):
    """Press Tab until what has this name has the focus, which can be seen."""
    for _ in range(80):
        page.keyboard.press("Tab")
        found = page.evaluate(
            """() => {
              const it = document.activeElement, style = getComputedStyle(it);
              return [(it.labels && it.labels[0] || it).innerText.trim(), style.outlineStyle,
                      it.matches(":focus-visible")];
            }"""
        )
        if found[0] == name:
            assert found[1:] == ["solid", True], "the focus must be seen"
            return
    raise AssertionError(f"Tab never came to {name}")


def enter(page):
    """Press Enter, and wait for the page to which that leads."""
    with page.expect_navigation():
        page.keyboard.press("Enter")


def test_the_first_tab_offers_to_skip_the_navigation(page):
    page.goto(f"{ROOT}/")
    tab_to(page, "Skip to the content")
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"


@pytest.mark.parametrize(
    ("button", "fields", "title", "said"),
    [
        ("Release…", {}, "Let it run again", "Released: its next retry runs the view again"),
        ("Fail…", {}, "Fail it for good", "It has failed, and every retry gets that response"),
        ("Resolve…", {"Status": "201", "Body": '{"id": 7}'}, "", "Every retry gets its response"),
    ],
    ids=["release", "fail", "resolve"],
)
def test_an_operator_decides_by_keyboard_alone(page, interrupted, button, fields, title, said):
    page.goto(f"{ROOT}/")
    for name in interrupted.rpartition("/")[2][:8], button:
        tab_to(page, name)
        enter(page)
    for name, value in {**fields, "Why": "the provider was asked"}.items():
        tab_to(page, name)
        page.keyboard.type(value)
    if title:
        tab_to(page, title)
    enter(page)
    assert said in page.locator("main").inner_text()
    assert "ada@example.org: the provider was asked" in page.locator("main").inner_text()


def test_an_operator_erases_a_record_by_keyboard_alone(page, completed):
    page.goto(completed)
    for name in "Forget…", "Erase it":
        tab_to(page, name)
        enter(page)
    assert "A retry runs the view again" in page.get_by_role("status").inner_text()


def test_what_is_wrong_is_told_at_its_field(page, interrupted):
    page.goto(f"{interrupted}/resolve")
    page.get_by_label("Body").fill("{")
    page.get_by_label("Why").fill("it was charged")
    page.get_by_role("button", name="Give it its response").click()
    body = page.get_by_label("Body")
    assert body.get_attribute("aria-invalid") == "true"
    described = body.get_attribute("aria-describedby").split()
    assert any("JSON" in page.locator(f"#{each}").inner_text() for each in described)
    assert body.evaluate("it => it === document.activeElement")
    assert body.input_value() == "{"
    assert page.get_by_label("Why").input_value() == "it was charged"
    assert page.get_by_role("alert").is_visible()


def test_a_record_is_found_and_its_body_shown_only_when_asked_for(page):
    page.goto(f"{ROOT}/records")
    page.get_by_label("Key", exact=True).fill("key-3")
    search = page.locator("form", has=page.get_by_label("Scope"))
    search.get_by_label("Operation").fill("pay")
    search.get_by_label("Scope").fill("alice")
    search.get_by_role("button", name="Find").click()
    assert "key-3" not in page.url
    main = page.locator("main")
    assert "canary" not in main.inner_text()
    page.get_by_role("button", name="Show the body").click()
    assert "<i>canary</i>" in page.get_by_role("region", name="Body").inner_text()
    assert page.locator("main i").count() == 0


def elsewhere(page, body):
    """Let there be a page that has this."""
    page.route("**/elsewhere", lambda route: route.fulfill(content_type="text/html", body=body))


def test_a_form_of_another_site_does_nothing(page, url, interrupted):
    page.goto(f"{ROOT}/")
    action = f"{url}{interrupted}/release"
    elsewhere(page, f'<form method="post" action="{action}"><input name="why"><button>Go</button>')
    # A page of the application's own, written by a user perhaps, does not know what it is about.
    for origin, status in (url.replace("127.0.0.1", "localhost"), 403), (url, 409):
        page.goto(f"{origin}/elsewhere")
        with page.expect_response(action) as response:
            page.get_by_role("button", name="Go").click()
        assert response.value.status == status
    page.said.clear()
    page.goto(interrupted)
    assert "interrupted" in page.locator("h1").inner_text()


def test_no_page_can_be_framed(page, url):
    elsewhere(page, f'<iframe src="{url}{ROOT}/"></iframe>')
    with page.expect_event("console") as said:
        page.goto(f"{url}/elsewhere")
    assert "frame" in said.value.text
    assert page.frames[-1].locator("main").count() == 0
    page.said.clear()
