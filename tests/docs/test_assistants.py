"""``example/recipes/assistants.md``: its test passes, and fails for each mistake that it is for."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest

from tests.docs.pages import RECIPES, ROOT, blocks, commands, looks_like
from tests.docs.test_tutorials import PLUGIN, Shell

DOCS = ROOT / "docs"
PAGE = RECIPES / "assistants.md"


def files() -> dict[str, str]:
    """The files that the page's reader writes, by name."""
    found: dict[str, str] = {}
    for block in blocks(PAGE, "python"):
        kind, _, name = block.mark.partition(": ")
        if kind in {"file", "append"}:
            found[name] = found.get(name, "") + "\n\n" * (kind == "append") + block.text
    return found


class TestItsTest:
    @pytest.fixture
    def run(self, tmp_path) -> Iterator[Callable[..., str]]:
        """Runs the page's test as its reader does, on these files."""
        shell = Shell(tmp_path, port="0", **PLUGIN)

        def run(**changed: str) -> str:
            for name, text in {**files(), **changed}.items():
                (tmp_path / name).write_text(text, encoding="utf-8")
            return shell.type("pytest -q --tb=line -p no:cacheprovider test_shop.py")

        yield run
        shell.close()

    def test_it_passes(self, run):
        [block] = [block for block in blocks(PAGE, "console") if not block.mark]
        [(_, shown)] = commands(block.text)
        assert looks_like(run(), shown)

    @pytest.mark.parametrize(
        ("protected", "mistake"),
        [
            ("@idempotent\n", ""),
            ("scope=lambda: g.account)", "scope=None)"),
            ("db.session.commit()  #", "db.session.flush(); db.engine.raw_connection().commit()  #"),
            ('operation.derive_key("charge")', "str(operation.attempt)"),
            ("amount, atomic=True", "amount"),
        ],
    )
    def test_it_fails_for_a_mistake(self, run, protected, mistake):
        shop = files()["shop.py"]
        assert shop.count(protected) == 1
        assert re.search(r"(?m)^\d failed", run(**{"shop.py": shop.replace(protected, mistake)}))
