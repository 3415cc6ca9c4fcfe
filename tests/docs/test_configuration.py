"""The lists of settings and options are what the library reads."""

from __future__ import annotations

import re

import pytest

from flask_idempotency.cli import cli
from flask_idempotency.web.options import OPTIONS, RouteOptions
from flask_idempotency.web.settings import SETTINGS, Settings
from tests.docs import reference
from tests.docs.pages import PAGES, ROOT, name_of

EACH_SETTING = ["IDEMPOTENCY_" + field.upper() for field in Settings.__annotations__]


def rows(heading: str) -> list[str]:
    """The rows of the page's table with this heading."""
    page = (ROOT / "docs/configuration.md").read_text(encoding="utf-8")
    head = re.escape(f"| {heading} | Default | Meaning |\n|---|---|---|\n")
    (found,) = re.findall(rf"(?m)^{head}((?:\|.*\n)+)", page)
    return str(found).splitlines()


class TestConfiguration:
    @pytest.mark.parametrize(
        ("heading", "in_code", "names"),
        [
            ("Setting", reference.settings, EACH_SETTING),
            ("Option", reference.options, list(OPTIONS)),
        ],
    )
    def test_each_row_is_what_the_code_says(self, heading, in_code, names):
        listed = rows(heading)
        assert "\n".join(listed) == "\n".join(in_code())
        assert [re.findall(r"`(\w+)`", row)[0] for row in listed] == names

    def test_no_setting_and_no_option_is_missing_in_the_code(self):
        assert len(set(EACH_SETTING)) == len(SETTINGS)
        assert set(OPTIONS) == set(RouteOptions.__annotations__)

    @pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=name_of)
    def test_no_page_names_a_setting_or_a_command_that_is_not_there(self, page):
        text = page.read_text(encoding="utf-8")
        settings = set(re.findall(r"\bIDEMPOTENCY_[A-Z_]*[A-Z]", text))
        assert settings <= {"IDEMPOTENCY_" + setting.name for setting in SETTINGS}
        named = re.findall(r"flask idempotency ([a-z-]+)", text)
        assert set(named) <= set(cli.commands)
