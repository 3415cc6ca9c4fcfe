"""The group of commands, and what it says of arguments that are wrong: nothing is done then."""

from __future__ import annotations

import pytest
from flask import Flask

import servers
from flask_idempotency.cli import cli
from tests.integration.commands.running import ANSWER, build, once, runner
from tests.integration.commands.shop import Shop

RELEASE = ["release", "DIGITS", "--why=asked"]
GIVEN = ["--status=201", "--why=asked", "--yes"]
RESOLVE = ["resolve", "DIGITS", *GIVEN]
NO_JSON, MALFORMED = "the body is not JSON", "is malformed, or one that is never stored"
ONE_TYPE, NOT_DIGITS = "a response has one Content-Type", "DIGITS are the 8 digits"
TO_LIST = "`flask idempotency list --key KEY --operation NAME"
BY_KEY = "a record is found by its key and operation"

WRONG: list[tuple[int, str, list[str]]] = [
    *((2, "Invalid value for '--limit'", ["list", "--limit", n]) for n in ("0", "9" * 20)),
    (2, "Invalid value for '--state'", ["list", "--state", "unheard-of"]),
    *((2, "Invalid value for '--every'", ["purge", "--every", n]) for n in ("inf", "nan", "1e300")),
    *((1, BY_KEY, ["list", *which])
      for which in (["--key=canary"], ["--key=canary", "--scope=s"],
                    ["--namespace=n", "--operation=order"], ["--namespace=n", "--scope=alice"])),
    *((1, NOT_DIGITS, ["show", wrong]) for wrong in ("", "0123abc", "0123abcde", "%" * 8)),
    (1, "there is no record whose digits are 0123abcd", ["show", "0123ABCD"]),
    (1, TO_LIST, ["show", "canary-key"]),
    (1, TO_LIST, ["release", "canary-key", "--why=asked"]),
    (1, "no record of this scope\n", ["list", "--scope", "nobody"]),
    (1, "no record of this scope\n", ["forget", "--scope", "nobody"]),
    (1, "no record of this scope; no protected route is named 'ordre': there are OPERATIONS\n",
     ["forget", "--scope", "nobody", "--operation", "ordre"]),
    *(
        (1, f"{words}\n", [*command, *options])
        for command in (["list", "--key=canary"], ["forget", "--yes", "--key=canary"])
        for words, options in (
            ("no protected route is named 'ordre': there are OPERATIONS",
             ["--operation=ordre", "--scope=alice"]),
            ("this application has scopes: give --scope", ["--operation=order"]),
            ("no record of this key, operation, scope and namespace",
             ["--operation=order", "--scope=alice"]),
        )
    ),
    *((2, "give --scope; or --key and --operation", ["forget", *options])
      for options in ([], ["--operation=order"], ["--key=a"])),
    (2, "with --json, --yes is needed", ["forget", "--scope=alice", "--json"]),
    (2, "with --json, --yes is needed", [*RESOLVE[:-1], "--json"]),
    (1, "Aborted!", RESOLVE[:-1]),
    (1, "Aborted!", [*RESOLVE[:-1], "--body", "-"]),
    *((1, "no operation is named so", [*command, "--operation", operation])
      for command in (["list"], ["list", "--scope=7"], ["forget", "--scope=7", "--yes"])
      for operation in ("\0", "order\0", "\udcff", "x" * 256)),
    *((2, "Missing option '--why'", [*command, "DIGITS"])
      for command in (["release"], ["release", "--fail"], ["resolve", "--status=201", "--yes"])),
    *((1, "Say why, in at most 500", [*command, "--why", why])
      for command in (RELEASE, [*RELEASE, "--fail"], RESOLVE)
      for why in ("", "  ", "\u2003", "\u200b", "\ufe0f", 501 * "x")),
    *((1, "interrupted now, in attempt 1. That is not what", [*command, "--attempt=2"])
      for command in (RELEASE, [*RELEASE, "--fail"], RESOLVE)),
    *((2, "Invalid value for '--status'", [*RESOLVE, "--status", each])
      for each in ("100", "199", "600")),
    *((1, NO_JSON, [*RESOLVE, "--body", body])
      for body in ("paid", '{"amount": NaN}', "[" * 900 + "]" * 900, "\udcff")),
    *((1, f"{header.partition(':')[0]!r} {MALFORMED}", [*RESOLVE, "--header", header])
      for header in ("Set-Cookie: a=b", "nonsense", "X: a\nY: b")),
    *((1, f"'Content-Type' {MALFORMED}", [*RESOLVE, "--body=x", "--content-type", each])
      for each in ("text/plain\nX: y", "é€")),
    (1, ONE_TYPE, [*RESOLVE, "--body=x", "--header=content-type: a/b", "--content-type=a/b"]),
    (1, ONE_TYPE, [*RESOLVE, "--body=x", "--header=Content-Type: a/b", "--header=Content-Type: a/c"]),
    (1, "the status 204 has no body", [*RESOLVE, "--status=204", "--body", "{}"]),
    (1, "larger than IDEMPOTENCY_MAX_RESPONSE_BYTES", [*RESOLVE, f'--body="{"x" * 3000}"']),
]  # fmt: skip


@pytest.fixture(scope="module")
def store() -> str:
    return "sql"


@pytest.fixture(scope="module")
def waiting(lasting_shop: Shop) -> tuple[Shop, str]:
    """A shop, and the digits of an operation that waits for a decision."""
    return lasting_shop, lasting_shop.begun("order", "key")


@pytest.mark.parametrize(("code", "said", "arguments"), WRONG)
def test_what_is_wrong_is_named_and_nothing_is_done(waiting, code, said, arguments):
    shop, digits = waiting
    before = shop.show(digits)
    operations = "brief, cut, free, half, long, lost, ok, order, seen, slow, wrong"
    result = shop.run(*(digits if each == "DIGITS" else each for each in arguments))
    said = said.replace("OPERATIONS", operations)
    assert (result.exit_code, said in result.output) == (code, True), result.output
    assert "canary" not in result.output.replace(ANSWER, "")
    assert shop.show(digits) == before


NEEDED = {
    "check": [], "create-table": [], "list": [], "purge": [],
    "show": ["0123abcd"],
    "release": ["0123abcd", "--why=asked"],
    "resolve": ["0123abcd", *GIVEN],
    "forget": ["--scope=1", "--yes"],
}  # fmt: skip
"""All commands, with what they cannot do without."""


def test_every_command_explains_itself_and_writes_json():
    run = runner(Flask("any"))
    assert cli.commands.keys() == NEEDED.keys()
    for name, command in cli.commands.items():
        assert name in run("--help").output
        assert len(run(name, "--help").output) > 300
        assert "--json" in [option for each in command.params for option in each.opts]


@pytest.mark.parametrize("name", NEEDED)
def test_what_a_command_needs_is_named_where_it_is_missing(tmp_path, name):
    """The extension, the server, the table."""
    result = runner(Flask("bare"))(name, *NEEDED[name])
    assert result.exit_code == 1
    assert result.output.startswith("Error: this application has no Idempotency: call")
    app = build(f"postgresql+psycopg2://me:hush@127.0.0.1:{servers.free_port()}/shop")
    result = once(app, name, *NEEDED[name])
    assert (result.exit_code, "refused" in result.output, "hush" in result.output) == (1, True, False)
    if name != "check":
        assert (result.output[:7], result.output.count("\n")) == ("Error: ", 1)
    if name not in ("check", "create-table"):
        app = build(f"sqlite:///{tmp_path}/shop.db", IDEMPOTENCY_STORE="sql")
        result = once(app, name, *NEEDED[name])
        assert result.exit_code == 1
        assert "Error: the table idempotency_record is missing or not up to date" in result.output
        assert "flask idempotency create-table" in result.output
