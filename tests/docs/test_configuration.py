"""The lists of settings and options are what the library reads."""

from __future__ import annotations

import re

import pytest

from flask_idempotency.cli import cli
from flask_idempotency.web.settings import OPTIONS, SETTINGS, RouteOptions
from tests.docs import reference
from tests.docs.pages import PAGES, ROOT, name_of


def rows(heading: str) -> list[str]:
    """The rows of the page's table with this heading."""
    page = (ROOT / "docs/configuration.md").read_text(encoding="utf-8")
    head = re.escape(f"| {heading} | Default | Meaning |\n|---|---|---|\n")
    (found,) = re.findall(rf"(?m)^{head}((?:\|.*\n)+)", page)
    return str(found).splitlines()


class TestConfiguration:
    def test_each_setting_has_its_name_default_and_what_is_allowed(self):
        listed = rows("Setting")
        assert [reference.without_prose(row) for row in listed] == list(reference.settings())
        assert [re.findall(r"`(\w+)`", row)[0] for row in listed] == list(SETTINGS)

    def test_each_option_is_what_the_code_says(self):
        listed = rows("Option")
        assert "\n".join(listed) == "\n".join(reference.options())
        assert [re.findall(r"`(\w+)`", row)[0] for row in listed] == list(OPTIONS)
        assert set(OPTIONS) == set(RouteOptions.__annotations__)

    @pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=name_of)
    def test_no_page_names_a_setting_or_a_command_that_is_not_there(self, page):
        text = page.read_text(encoding="utf-8")
        settings = set(re.findall(r"\bIDEMPOTENCY_[A-Z_]*[A-Z]", text))
        assert settings <= set(SETTINGS)
        named = re.findall(r"flask idempotency ([a-z-]+)", text)
        assert set(named) <= set(cli.commands)
