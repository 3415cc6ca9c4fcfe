"""The lists of settings, options and commands are what the library reads."""

from __future__ import annotations

import re

import pytest

from flask_idempotency.cli import cli
from flask_idempotency.web.setup.options import OPTIONS, RouteOptions
from flask_idempotency.web.setup.settings import SETTINGS, Settings
from tests.docs.pages import PAGES, ROOT, name_of
from tests.docs.reference import reference


class TestConfiguration:
    def test_every_setting_is_listed_once(self):
        listed = [entry.name for entry in reference().settings()]
        assert listed == ["IDEMPOTENCY_" + field.upper() for field in Settings.__annotations__]
        assert len(set(listed)) == len(SETTINGS)

    def test_every_option_is_listed_once_and_has_its_words(self):
        entries = list(reference().options())
        assert [entry.name for entry in entries] == list(OPTIONS)
        assert set(OPTIONS) == set(RouteOptions.__annotations__)
        assert all(entry.meaning and entry.allowed and entry.default for entry in entries)

    def test_the_page_shows_both_lists(self):
        text = (ROOT / "docs/configuration.md").read_text(encoding="utf-8")
        assert text.count("```{settings}") == text.count("```{options}") == 1

    @pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=name_of)
    def test_no_page_names_a_setting_or_a_command_that_is_not_there(self, page):
        text = page.read_text(encoding="utf-8")
        settings = set(re.findall(r"\bIDEMPOTENCY_[A-Z_]*[A-Z]", text))
        assert settings <= {"IDEMPOTENCY_" + setting.name for setting in SETTINGS}
        named = re.findall(r"flask idempotency (?:--bind \w+ )?([a-z-]+)", text)
        assert set(named) <= set(cli.commands)
