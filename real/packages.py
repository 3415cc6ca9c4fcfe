"""The packages whose own test suites run: pinned, so that two runs differ by our code alone."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Package:
    """A source distribution that contains its tests, and how they run on PostgreSQL.

    ``needs`` is what its tests import. Of ``arguments`` and ``environment``, ``{database}`` becomes the
    URL of an empty database, and ``{server}`` the same without the database's name. ``tests`` are
    files that write much, and ``only`` a choice from them (pytest's ``-k``): a mode is to take
    minutes, and there are five.
    """

    name: str
    version: str
    tests: tuple[str, ...]
    needs: tuple[str, ...]
    only: str = ""
    extras: str = ""
    arguments: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()


PACKAGES = (
    Package(
        "flask-appbuilder",
        "5.3.0",
        tests=("tests/test_api.py", "tests/test_security_api.py"),
        only="item or user or role or group",
        # Newer ones than it knows: with them its own models do not become schemas.
        needs=(
            *("sqlalchemy<2.1", "marshmallow<4", "marshmallow-sqlalchemy<1.4.1"),
            *("hiro", "parameterized", "authlib", "jmespath"),
        ),
        environment=(("SQLALCHEMY_DATABASE_URI", "{database}"),),
    ),
    Package(
        "flask-security",
        "5.9.2",
        tests=tuple(
            f"tests/test_{name}.py"
            for name in (
                "basic",
                "changeable",
                "confirmable",
                "recoverable",
                "registerable",
                "two_factor",
            )
        ),
        extras="[babel,common,fsqla,mfa]",
        needs=(
            *("sqlalchemy<2.1", "sqlalchemy-utils", "flask-sqlalchemy-lite", "flask[async]", "authlib"),
            *("argon2-cffi", "cbor2", "freezegun", "requests", "zxcvbn"),
        ),
        # Its other data stores do without Flask-SQLAlchemy.
        only="not mongo and not peewee and not lite and not session",
        arguments=("--realdburl", "{server}/"),
    ),
)
