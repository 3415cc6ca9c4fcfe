"""The page of the example shop pays once, too, when its button is pressed again after a failure."""

from __future__ import annotations

import re
import subprocess

import pytest

from tests.docs.pages import ROOT
from tests.recipes.test_clients import NODE

PAGE = """
const parts = {};
const part = () => ({ append() {}, prepend() {}, remove() {}, replaceChildren() {}, children: [] });
globalThis.document = {
  getElementById: (id) => (parts[id] ??= part()),
  createElement: part,
};
const network = globalThis.fetch;
const nothing = { balance: 0, payments: [] };
globalThis.fetch = (path, options) =>
  options.method === "POST" ? network(URL + path, options) : { json: () => nothing };
"""


@pytest.fixture(scope="module")
def shop(start):
    return start("api")


@pytest.fixture
def press(shop, tmp_path):
    """Loads the page and presses buttons."""
    text = (ROOT / "example/templates/index.html").read_text("utf-8")
    [script] = re.findall("<script>(.*?)</script>", text, re.DOTALL)
    script = script.replace("{{ account.token|tojson }}", "'canary'")
    shop.sql("DELETE FROM payment")

    def press(*buttons):
        presses = "".join(f"\nawait byId('{button}').onclick();" for button in buttons)
        (tmp_path / "page.mjs").write_text(f"const URL = '{shop.url}';{PAGE}{script}{presses}", "utf-8")
        subprocess.run([NODE, "page.mjs"], cwd=tmp_path, check=True, timeout=60)
        return len(shop.payments())

    return press


@pytest.mark.parametrize("trouble", [401, 409, 503, "response is lost", "nobody is signed in"])
def test_pressed_again_after_a_failure_it_pays_once(shop, press, trouble):
    shop.meets("response is lost", trouble)
    assert press("pay", "pay", "pay") == 1


def test_pressed_again_after_a_payment_it_pays_again(shop, press):
    shop.meets()
    assert press("pay", "misuse", "pay", "many", "retry", "pay") == 4


def test_a_refused_payment_is_followed_by_another(shop, press):
    shop.meets("card is declined")
    assert press("pay", "pay", "pay") == 1
