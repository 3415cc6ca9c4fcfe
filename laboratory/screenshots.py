"""Take the pictures of the console and of the dashboard, in a shop with traffic (make screenshots).

``docs/figures/console-overview.png``, ``console-record.png`` and ``dashboard.png``: the first two are
the pages as Chromium shows them. For the third, a Prometheus scrapes the shop, is asked what Grafana
would ask it for each panel of ``docs/monitoring/dashboard.json``, and ``dashboard.py`` draws that.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import random
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from playwright.sync_api import Browser, Page, sync_playwright

from example.seed import BOB
from laboratory import stories
from laboratory.client import Client, Meeting
from laboratory.dashboard import Prometheus, drawn
from laboratory.lanes import Lane
from laboratory.png import in_few_colours
from laboratory.running import CannotStart
from laboratory.shops import BE_SLOW, KILL_AFTER_CHARGE, LEASE_SECONDS
from laboratory.stage import OPERATOR_PASSWORD, Stage, open_stage

ROOT = Path(__file__).resolve().parent.parent
FIGURES = ROOT / "docs" / "figures"
DASHBOARD = ROOT / "docs" / "monitoring" / "dashboard.json"
EDGE = 12  # pixels below what a picture ends with
OPERATOR = "ada@example.org"
WHY = "the provider has one charge for it, so a retry with the same key is safe"
CUSTOMERS = 8  # at once
PAUSE = 0.4  # seconds of one customer between two visits, on average


def pay_and_lose_the_response(client: Client) -> None:
    client.insist(client.pay)
    client.insist(client.pay)


def pay_twice_at_once(client: Client) -> None:
    with ThreadPoolExecutor(2) as pool:
        for _ in range(2):
            pool.submit(client.insist, lambda: client.pay(fault=BE_SLOW))


def pay_slowly(client: Client) -> None:
    client.insist(lambda: client.pay(fault=BE_SLOW))


def pay_too_much(client: Client) -> None:
    client.pay(10_000_00, who=BOB)


def order(client: Client) -> None:
    client.insist(client.order)


VISITS: dict[Callable[[Client], None], int] = {  # and how many of a hundred are such
    stories.pay: 52,
    pay_and_lose_the_response: 15,
    pay_slowly: 8,
    order: 12,
    pay_twice_at_once: 6,
    stories.double_click: 3,
    stories.other_amount: 2,
    pay_too_much: 2,
}


@contextlib.contextmanager
def traffic(stage: Stage, lane: Lane, seconds: float) -> Iterator[None]:
    """Customers come and go until the block ends; most of them in the middle of these seconds."""
    end, started = threading.Event(), time.monotonic()

    def customer(number: int) -> None:
        dice = random.Random(number)  # noqa: S311  # which visits, the same ones each time
        while not end.is_set():
            [visit] = dice.choices(list(VISITS), list(VISITS.values()))
            visit(new_client(stage, lane))
            way = (time.monotonic() - started) / seconds
            busy = 0.55 + 0.45 * math.sin(math.pi * min(way, 0.85))
            end.wait(dice.expovariate(busy / PAUSE))

    with ThreadPoolExecutor(CUSTOMERS) as pool:
        done = [pool.submit(customer, number) for number in range(CUSTOMERS)]
        try:
            yield
        finally:
            end.set()
    for each in done:
        each.result()


def new_client(stage: Stage, lane: Lane) -> Client:
    return Client(lane, Meeting(1), stage.servers)


def break_things(stage: Stage, lane: Lane, seconds: float) -> None:
    """What goes wrong in these seconds: workers die, and Redis is away for a tenth of them."""
    redis, part = stage.servers["redis"], seconds / 10

    def kill(*killed: Callable[[Client], None]) -> None:
        for story in killed:
            story(new_client(stage, lane))

    time.sleep(2 * part)
    kill(stories.kill_worker, stories.provider_charged)
    time.sleep(2 * part)
    redis.stop()
    time.sleep(part)
    redis.start()
    time.sleep(2 * part)
    kill(stories.provider_charged, stories.kill_worker, stories.kill_worker)
    for _ in range(3):  # connections to the database that break inside a view
        lane.cable.lose_answer(b"INSERT INTO payment")
        time.sleep(2)
    time.sleep(2 * part)


def console(stage: Stage, lane: Lane, browser: Browser) -> None:
    """Two orders that nobody has asked for again, then a third, which an operator releases."""
    who = {"username": OPERATOR, "password": OPERATOR_PASSWORD}
    login = {**who, "origin": lane.url, "send": "always"}
    for _ in range(2):
        new_client(stage, lane).order(fault=KILL_AFTER_CHARGE)
    time.sleep(LEASE_SECONDS + 1)
    page = opened(browser, "light", 1000, login)
    page.goto(f"{lane.url}/operations/")
    take(page, "console-overview.png", "section[aria-labelledby=interrupted]")
    client = new_client(stage, lane)
    client.order(fault=KILL_AFTER_CHARGE)
    time.sleep(LEASE_SECONDS + 1)
    [newest] = lane.rows(
        "SELECT encode(key, 'hex') AS key FROM idempotency_record"
        " WHERE state = 'in_progress' AND lease_expires_at < now() ORDER BY created_at DESC LIMIT 1"
    )
    page = opened(browser, "dark", 1000, login)
    page.goto(f"{lane.url}/operations/records/{newest['key'][:16]}/release")
    page.get_by_label("Why").fill(WHY)
    with page.expect_navigation():
        page.get_by_role("button", name="Let it run again").click()
    client.insist(client.order)
    page.reload()
    take(page, "console-record.png", "section[aria-labelledby=steps]")


def opened(browser: Browser, scheme: str, width: int, login: dict[str, str] | None = None) -> Page:
    """A page of this width, which grows to its content's height."""
    page = browser.new_page(
        color_scheme="dark" if scheme == "dark" else "light",
        viewport={"width": width, "height": 400},
        device_scale_factor=1.5,
        http_credentials=login,  # type: ignore[arg-type]  # a TypedDict of Playwright's own
    )
    page.set_default_timeout(10_000)
    return page


def take(page: Page, name: str, last: str) -> None:
    """From the top of the page to the end of its last part that matters."""
    path, box = FIGURES / name, page.locator(last).bounding_box()
    assert box is not None
    clip = {"x": 0, "y": 0, "width": page.evaluate("innerWidth"), "height": box["y"] + box["height"]}
    clip["height"] += EDGE
    page.screenshot(path=path, full_page=True, clip=clip)  # type: ignore[arg-type]


def program(package: str, *names: str) -> str:
    """Where a program is that no package of Python's brings."""
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        raise CannotStart(f"{names[0]} is not installed; it is in Debian's package {package}")
    return found


def run(minutes: float) -> None:
    scraper = program("prometheus", "prometheus")
    chromium = program("chromium", "chromium", "chromium-browser", "google-chrome")
    with contextlib.ExitStack() as stack:
        stage = stack.enter_context(open_stage())
        lane = stage.lane("with")
        lane.rows("UPDATE account SET balance = 10000000 WHERE name = 'Alice'")
        lane.rows("UPDATE product SET stock = 100000")
        prometheus = stack.enter_context(Prometheus(scraper, lane.url, "prometheus", OPERATOR_PASSWORD))
        playwright = stack.enter_context(sync_playwright())
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        stack.callback(browser.close)
        started = time.time()
        with traffic(stage, lane, minutes * 60):
            break_things(stage, lane, minutes * 60)
            console(stage, lane, browser)
            dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
            page = opened(browser, "light", 1120)
            page.set_content(drawn(dashboard, prometheus, started, time.time()))
            take(page, "dashboard.png", "main")
    for path in sorted(FIGURES.glob("*.png")):  # not before: it takes all of this process's time
        path.write_bytes(in_few_colours(path.read_bytes()))
        print(f"{path.relative_to(ROOT)}: {path.stat().st_size:,} bytes")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m laboratory.screenshots")
    parser.add_argument("--minutes", type=float, default=6, help="of traffic, before the pictures")
    try:
        run(parser.parse_args().minutes)
    except CannotStart as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
