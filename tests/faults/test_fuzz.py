"""Whatever a client, a database or a Redis sends: a clean answer, and never somebody else's."""

from __future__ import annotations

import base64
import json
import re
from typing import Any

import pytest
import redis
from flask import g
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flask_idempotency import idempotent
from flask_idempotency.core.keys import hash_key

fuzz = settings(
    max_examples=80,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)

MINE, OTHERS = "canary-of-mine", "canary-of-others"


def add_view(world: Any) -> list[Any]:
    """A view whose answer says whose it is; gives the list of its runs."""
    runs: list[Any] = []

    @world.app.post("/payments")
    @idempotent
    def pay() -> Any:
        world.db.session.add(world.Payment(amount=1))
        world.db.session.commit()
        runs.append(g.account_id)
        return {"of": g.account_id, "run": len(runs)}, 201

    return runs


def give(world: Any, key: str | None, user: str = MINE, **environ: str) -> Any:
    """One request, which must leave the pool full; a refusal quotes nothing."""
    response = world.post(key=key, user=user, environ_overrides=environ)
    with world.app.app_context():
        assert world.db.engine.pool.checkedout() == 0
    if response.status_code >= 400 and "Idempotent-Replayed" not in response.headers:
        assert b"Traceback" not in response.data
        assert b"canary" not in response.data
    return response


latin = st.text(st.characters(max_codepoint=255), max_size=40)
ascii_text = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=40)
quoted = st.builds(
    '{}"{}"{}'.format, st.sampled_from(["", " "]), ascii_text, st.sampled_from(["", " "])
)
escaped = ascii_text.map(lambda text: '"' + re.sub(r'(["\\])', r"\\\1", text) + '"')
headers = latin | ascii_text | quoted | escaped | st.text("ab\"\\,; '", max_size=6)


def meant(header: str) -> str:
    """The key that an accepted header means."""
    text = header.strip(" ")
    return re.sub(r"\\(.)", r"\1", text[1:-1]) if text.startswith('"') else text


def test_any_key_header_is_a_key_or_refused_and_never_finds_another_scopes_response(world):
    runs = add_view(world)
    answers: dict[tuple[str, str], bytes] = {}

    @fuzz
    @given(header=headers, scopes=st.permutations(["a", "b", "a:b", "1", "ä"]))
    def check(header: str, scopes: list[str]) -> None:
        for scope in scopes[:2]:
            name = scope.encode().decode("latin-1")
            before = len(runs)
            response = give(world, None, name, HTTP_IDEMPOTENCY_KEY=header)
            if response.status_code == 400:
                assert response.json["type"].endswith("key-malformed")
                assert len(runs) == before
                continue
            assert response.status_code == 201
            assert response.json["of"] == name
            place = scope, meant(header)
            assert (len(runs) > before) == (place not in answers)
            assert answers.setdefault(place, response.data) == response.data

    check()
    assert len(answers) > 20, "most headers were refused: this tests nothing"


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-9, 9)
    | ascii_text
    | st.sampled_from(["a\r\nb: c", "é", ""]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(ascii_text, inner, max_size=2),
    max_leaves=6,
)
pairs = st.lists(st.tuples(latin, latin).map(list), max_size=3)
tampered = st.fixed_dictionaries(
    {},
    optional={
        "status": st.none() | st.integers(-(2**15), 2**15 - 1) | st.sampled_from([0, 100, 200, 204, 304]),  # noqa: E501
        "state": st.sampled_from(["in_progress", "completed", "", "done", "external", "Completed"]),
        "headers": st.none() | (json_values | pairs).map(
            lambda value: json.dumps(value).replace("\\u0000", "")
        ),
        "body": st.none() | st.binary(max_size=80),
        "fingerprint": st.binary(max_size=32),
        "fingerprint_version": st.integers(-(2**15), 2**15 - 1),
        "attempt": st.integers(-(2**31), 2**31 - 2),
        "name": st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=9),
    },
)  # fmt: skip
COLUMNS = (
    "status",
    "state",
    "headers",
    "body",
    "fingerprint",
    "fingerprint_version",
    "attempt",
    "name",
)


@pytest.mark.parametrize("sealed", [False, True])
def test_a_tampered_record_is_a_clean_error_or_its_own_response(make_world, sealed):
    keys = [base64.urlsafe_b64encode(bytes(32)).decode()] if sealed else []
    world = make_world(IDEMPOTENCY_ENCRYPTION_KEYS=keys)
    runs = add_view(world)
    first = give(world, "mine")
    give(world, "others", OTHERS)
    mine, others = world.records()
    seen: set[int] = set()

    def write(values: dict[str, Any]) -> None:
        changes = ", ".join(f"{name} = :{name}" for name in values)
        world.sql(f"update idempotency_record set {changes} where key = :key", **values, key=mine.key)

    whole = {name: getattr(mine, name) for name in COLUMNS}
    whole["headers"] = None if mine.headers is None else json.dumps(mine.headers)

    @fuzz
    @given(values=tampered.filter(bool), swapped=st.booleans())
    def check(values: dict[str, Any], swapped: bool) -> None:
        if swapped and sealed:
            values = {**values, "body": bytes(others.body), "headers": None}
        write(values)
        before = len(runs)
        response = give(world, "mine")
        seen.add(response.status_code)
        assert OTHERS.encode() not in response.data
        if response.status_code == 201 and response.headers.get("Idempotent-Replayed") != "true":
            assert values["state"] == "in_progress", "only an operation in progress may run again"
        else:
            assert len(runs) == before
        write(whole)
        assert give(world, "mine").data == first.data

    check()
    assert ({500} if sealed else {500, 422}) <= seen


def test_whatever_stands_in_redis_postgres_decides(world, redis_server):
    runs = add_view(world)
    client = redis.Redis.from_url(redis_server.url)
    give(world, "fuzzed")
    state = world.app.extensions["idempotency"]
    (record,) = world.records()
    own = f"{record.fingerprint_version:x}.{bytes(record.fingerprint).hex()}"
    owners = st.sampled_from([record.owner, "x" * 22, "done", "", "\n"])
    honest = st.builds("{}:{}:{}".format, st.sampled_from(["1", "2", "", "1:1"]), owners, st.just(own))
    cut = st.tuples(honest, st.integers(0, 120)).map(lambda pair: pair[0][: pair[1]])
    other = st.builds("1:{}:1.{}".format, owners, st.binary(min_size=32, max_size=32).map(bytes.hex))
    values = st.binary(max_size=200) | (honest | cut | other | st.just("1:done")).map(str.encode)
    numbers = iter(range(10**6))

    @fuzz
    @given(value=values, milliseconds=st.none() | st.integers(1000, 10**7), is_list=st.booleans())
    def check(value: bytes, milliseconds: int | None, is_list: bool) -> None:
        for key in ("fuzzed", f"new-{next(numbers)}"):
            place = state.lock._prefix + hash_key("", record.name, MINE, key).hex()
            client.delete(place)
            if is_list:
                client.rpush(place, value)
            else:
                client.set(place, value, px=milliseconds)
            before = len(runs)
            response = give(world, key)
            if response.status_code == 409:
                assert not is_list
                assert value.startswith(b"1:")
                assert value.endswith(own.encode())
                assert len(runs) == before
                client.delete(place)  # as it is when the lock has become old
                response = give(world, key)
            assert response.status_code == 201
            assert len(runs) == before + (key != "fuzzed")
            replayed = response.headers.get("Idempotent-Replayed")
            assert (replayed == "true") == (key == "fuzzed")
            assert give(world, key).data == response.data or client.get(place) not in (None, b"1:done")

    check()
