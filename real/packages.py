"""The packages whose own test suites run: pinned, so that two runs differ by our code alone."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Package:
    """A source distribution that contains its tests, and how they run on PostgreSQL.

    ``repository`` is where it comes from if the one on the package index has no tests: its tag, ``v``
    and the version, is cloned.

    ``needs`` is what its tests import. Of ``arguments`` and ``environment``, ``{database}`` becomes the
    URL of an empty database, ``{server}`` the same without the database's name, ``{url.host}`` and the
    like its parts, and ``{redis.port}`` and the like those of a Redis. ``tests`` are files that write
    much, and ``only`` a choice from them (pytest's ``-k``): a mode is to take minutes, and there are
    five.
    """

    name: str
    version: str
    tests: tuple[str, ...]
    needs: tuple[str, ...]
    only: str = ""
    extras: str = ""
    arguments: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    repository: str = ""


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
    # An application: budgets that people share, with forms and an API. SQLAlchemy-Continuum keeps each
    # row's versions, and pytest-flask holds a request's context open around each test.
    Package(
        "ihatemoney",
        "7.2.1",
        tests=tuple(
            f"ihatemoney/tests/{name}_test.py"
            for name in ("api", "budget", "history", "import", "main")
        ),
        needs=("pytest-flask",),
        # The others ask the DNS about addresses.
        only="not test_notifications and not test_invite and not invitation_email",
        environment=(("TESTING_SQLALCHEMY_DATABASE_URI", "{database}"),),
    ),
    # An application: what an animation studio makes, on psycopg 3. Its tests put a session of their
    # own, on a connection whose transaction they roll back, in the place of db.session: that wants
    # app.testing.
    Package(
        "zou",
        "1.0.67",
        tests=tuple(
            f"tests/blueprints/{name}"
            for name in ("auth", "comments", "playlists", "projects", "tasks")
        ),
        extras="[test]",
        needs=(),
        # The others ask the DNS about addresses, or for a large file.
        only="not test_admin_can_create_person and not preview_processing",
        environment=(
            *(("DB_HOST", "{url.host}"), ("DB_PORT", "{url.port}"), ("DB_DATABASE", "{url.database}")),
            *(("DB_USERNAME", "{url.username}"), ("DB_PASSWORD", "{url.password}")),
            *(("KV_HOST", "{redis.host}"), ("KV_PORT", "{redis.port}"), ("REAL_TESTING", "1")),
        ),
        repository="https://github.com/cgwire/zou",
    ),
)
