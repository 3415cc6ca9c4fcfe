"""The tables of settings and options are what the library reads.

Where a page has another text, the message of the test has the one to paste.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from flask_idempotency.cli import cli
from flask_idempotency.web.settings import OPTIONS, PREFIX, SETTINGS, RouteOptions
from tests.docs.pages import PAGES, ROOT, name_of

DEFAULTS = {
    "key": "the header `IDEMPOTENCY_HEADER`",
    "scope": "the application's",
    "store": "all except 401, 403, 408, 425 and 429, and in atomic operations those of 500 and above",
    "max_request_bytes": "the application's limits",
    "name": "the endpoint",
    "authorize_replay": "every replay is allowed",
    "other_binds": "none",
}
"""Where neither a setting of the same name nor the value in ``Route`` says it."""


def listed(heading: str) -> list[str]:
    """The rows of the page's table with this heading."""
    page = (ROOT / "docs/configuration.md").read_text(encoding="utf-8")
    head = re.escape(f"| {heading} | Default | Meaning |\n|---|---|---|\n")
    (found,) = re.findall(rf"(?m)^{head}((?:\|.*\n)+)", page)
    return str(found).splitlines()


def row(name: str, default: str, meaning: str, rule: Any) -> str:
    return f"| `{name}` | {default} | {meaning} Allowed: {rule.metadata['allowed']}. |"


def shown(value: Any) -> str:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    unit = " (one day)" if value == 86400 else ""
    if isinstance(value, int) and value and value % 1024**2 == 0:
        unit = f" ({value // 1024**2} MiB)"
    return f"`{value!r}`{unit}"


def test_each_setting_has_its_name_default_and_what_is_allowed():
    """What it means, the page alone says."""
    meaning = re.compile(r"^((?:\|[^|]*){2}\| ).*Allowed: ")
    without = [meaning.sub(r"\1… Allowed: ", each) for each in listed("Setting")]
    assert without == [row(name, shown(each.default), "…", each) for name, each in SETTINGS.items()]


def options() -> Iterator[str]:
    for name, meaning in re.findall(
        r"\* ``(\w+)``: (.*?)(?=\n\s*\n|\n\s*\* ``|\Z)", RouteOptions.__doc__ or "", re.DOTALL
    ):
        setting = f"{PREFIX}{name.upper()}"
        value = setting if setting in SETTINGS else repr(OPTIONS[name].default)
        text = " ".join(meaning.split())
        yield row(name, DEFAULTS.get(name, f"`{value}`"), text[0].upper() + text[1:], OPTIONS[name])


def test_each_option_is_what_the_code_says():
    assert "\n".join(listed("Option")) == "\n".join(options())
    assert [re.findall(r"`(\w+)`", each)[0] for each in listed("Option")] == list(OPTIONS)
    assert set(OPTIONS) == set(RouteOptions.__annotations__)


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=name_of)
def test_no_page_names_a_setting_or_a_command_that_is_not_there(page):
    text = page.read_text(encoding="utf-8")
    assert set(re.findall(r"\bIDEMPOTENCY_[A-Z_]*[A-Z]", text)) <= set(SETTINGS)
    named = re.findall(r"""flask"?,? ["\w, -]*idempotency"?,? "?([a-z-]+)""", text)
    assert set(named) <= set(cli.commands)
