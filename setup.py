"""The metadata that depends on ``owner.cfg``. All the rest is in ``setup.cfg``."""

import configparser
import re
from collections.abc import Mapping
from pathlib import Path

HERE = Path(__file__).parent
URLS = {"home_page": "Homepage", "documentation": "Documentation"}


def read(name: str, section: str) -> dict[str, str]:
    """A section of a file that lies beside this one."""
    parser = configparser.ConfigParser(interpolation=None)
    parser.read(HERE / name, encoding="utf-8")
    return dict(parser[section])


def known(owner: Mapping[str, str]) -> dict[str, str]:
    """The facts that the owner has given."""
    return {name: value for name, value in owner.items() if not value.startswith("PLACEHOLDER")}


def described(readme: str, version: str, owner: Mapping[str, str]) -> str:
    """README for an index of packages, where relative links lead nowhere.

    They lead to the tag's files instead. While their address is not known, a link becomes its text
    and a picture is left out.
    """

    def absolute(found: re.Match[str]) -> str:
        picture, text, target = found.groups()
        address = owner.get("picture_url" if picture else "file_url")
        if address is None:
            return "" if picture else text
        return f"{picture}[{text}]({address.format(version=version, path=target)})"

    text = re.sub(r"(!?)\[([^\]]+)\]\((?!https?:|#)([^)\s]+)\)", absolute, readme)
    return text.replace("\n\n\n\n", "\n\n")  # where a picture was


if __name__ == "__main__":
    from setuptools import setup

    facts = known(read("owner.cfg", "owner"))
    setup(
        long_description=described(
            (HERE / "README.md").read_text("utf-8"), read("setup.cfg", "metadata")["version"], facts
        ),
        project_urls={title: facts[name] for name, title in URLS.items() if name in facts},
    )
