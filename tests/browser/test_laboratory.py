"""The laboratory as a visitor uses it. The books are read from both databases, never from the page."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from example.seed import ALICE
from laboratory.page import create_app
from laboratory.stage import Stage, open_stage
from laboratory.stories import STORIES
from tests.acceptance.test_laboratory import WITH, WITHOUT, books
from tests.browser.conftest import DARK, LIGHT, assert_no_faults, watched_page
from tests.served import served
from tests.waiting import wait_until

PRICE = 1250
SECONDS = 60  # for a story; it takes a few, on a machine that has nothing else to do


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with open_stage() as stage:
        yield stage


@pytest.fixture
def options() -> dict[str, Any]:
    return {"width": 1280}


@pytest.fixture
def visit(chromium: Browser, stage: Stage, options: dict[str, Any]) -> Iterator[Page]:
    """The laboratory's page, whose policy refuses the way in which axe asks for its script."""
    stage.start_over()
    with served(create_app(stage)) as url, watched_page(chromium, url, "script-src", **options) as page:
        page.set_default_timeout(SECONDS * 1000)
        page.goto("/")
        yield page


def is_seen(page: Page, what: Locator) -> bool:
    place = what.bounding_box()
    return place["y"] >= 0 and place["y"] + place["height"] <= page.viewport_size["height"]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("kill-worker", {"width": 320, "color_scheme": DARK}),
        ("provider-charged", {"width": 1280, "color_scheme": LIGHT}),
    ],
    ids=["kill-worker", "provider-charged"],
)
def test_a_button_shows_both_verdicts_without_a_fault_that_axe_finds(
    stage: Stage, visit: Page, name: str, options: dict[str, Any]
) -> None:
    assert_no_faults(visit)
    button = STORIES[name].button
    visit.get_by_role("button", name=button, exact=True).click()
    expect(visit.locator(".verdict")).to_have_text(["Running …"] * 2)
    expect(visit.locator("button[aria-current]")).to_have_text(button, timeout=SECONDS * 1000)
    assert books(stage, "without") == WITHOUT[name]
    assert books(stage, "with") == WITH[name]
    for lane, verdict in zip(("without", "with"), visit.locator(".verdict").all(), strict=True):
        times, because = STORIES[name].lanes[lane]
        expect(verdict).to_contain_text(because)
        assert verdict.get_attribute("class") == f"verdict {'once' if times == 1 else 'twice'}"
        expect(visit.get_by_role("status")).to_contain_text(verdict.locator("strong").inner_text())
        assert is_seen(visit, verdict)
    if options["width"] == 1280:
        assert all(is_seen(visit, row) for row in visit.locator(".book td").all())
    visit.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    assert_no_faults(visit)
    assert visit.evaluate("document.documentElement.scrollWidth") <= options["width"]


def test_by_keyboard_alone(stage: Stage, visit: Page) -> None:
    button = visit.get_by_role("button", name=STORIES["lost-response"].button)
    for _ in range(20):
        visit.keyboard.press("Tab")
        if button.evaluate("it => it === document.activeElement"):
            break
    assert button.evaluate("it => getComputedStyle(it).outlineStyle") == "solid"
    visit.keyboard.press("Enter")
    expect(button).to_have_attribute("aria-current", "true")
    expect(button).to_be_focused()
    assert books(stage, "with") == WITH["lost-response"]


@pytest.mark.parametrize("options", [{"width": 1280, "java_script_enabled": False}], ids=["off"])
def test_without_javascript(stage: Stage, visit: Page) -> None:
    visit.get_by_role("button", name=STORIES["lost-response"].button).click()
    expect(visit.locator("button[aria-current]")).to_have_text(STORIES["lost-response"].button)
    assert books(stage, "without") == WITHOUT["lost-response"]
    assert books(stage, "with") == WITH["lost-response"]
    visit.get_by_role("button", name="Start over").click()
    expect(visit.locator(".verdict").first).to_contain_text("Nothing has happened yet")


def test_a_second_press_while_a_story_runs_does_nothing(stage: Stage, visit: Page) -> None:
    visit.get_by_role("button", name=STORIES["pay"].button, exact=True).dblclick()
    expect(visit.locator("button[aria-current]")).to_have_text("Pay")
    expect(visit.locator("[aria-busy]")).to_have_count(0)
    assert books(stage, "with") == ([PRICE], [], [])


@pytest.fixture
def shopper(chromium: Browser, stage: Stage, lane: str) -> Iterator[Page]:
    """Alice in the shop of a lane, signed in, on a network that can be slowed down."""
    stage.start_over()
    network = stage.lane(lane).network
    context = chromium.new_context(base_url=network.url)
    page = context.new_page()
    page.set_default_timeout(SECONDS * 1000)
    page.goto("/login")
    page.get_by_label("Name").fill(ALICE.name)
    page.get_by_label("Password").fill(ALICE.password)
    page.locator("main").get_by_role("button").click()
    page.wait_for_url("**/account")
    yield page
    network.delay = 0
    context.close()


@pytest.mark.parametrize(("lane", "times"), [("without", 2), ("with", 1)])
def test_a_double_click_in_the_browser(stage: Stage, shopper: Page, lane: str, times: int) -> None:
    shopper.goto("/checkout/1")
    sent = []
    shopper.on("request", lambda request: request.method == "POST" and sent.append(request))
    stage.lane(lane).network.delay = 1  # longer than from click to click
    shopper.locator("main form button").dblclick(delay=60, no_wait_after=True)
    wait_until(lambda: shopper.wait_for_timeout(20) or len(sent) == 2, "both clicks are heard of")
    wait_until(lambda: len(stage.lane(lane).payments()) >= times, "the payments are made")
    shopper.wait_for_load_state("networkidle")
    assert books(stage, lane) == ([PRICE] * times, [], [])
