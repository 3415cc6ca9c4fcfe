"""Responses as rows of plain values, and back."""

from __future__ import annotations

import pytest

from flask_idempotency.core.fingerprint import Fingerprint
from flask_idempotency.core.records import SEALED, Claim, Headers, Record, State, StoredResponse

CLAIM = Claim(b"k" * 23, "pay", Fingerprint(1, b"f" * 16), "owner", 60.0)
JSON: Headers = (("Content-Type", "application/json"),)
HTML: Headers = (("Content-Type", "text/html; charset=utf-8"),)
CREATED: Headers = (*JSON, ("Location", "/payments/1"))


def stored_and_read(response: StoredResponse) -> Record:
    """A completed record of the response, as a store reads it."""
    values = {**CLAIM.values(), **response.values()}
    more = {"state": "completed", "attempt": 1, "expired": 0, "age": "1.5"}
    more |= dict.fromkeys(["lease_left", "released", "released_attempt"])
    return Record.read(CLAIM.key, {**values, **more})


@pytest.mark.parametrize("headers", [JSON, HTML, CREATED, JSON + JSON, (), None])
@pytest.mark.parametrize("body", [b"", b"\x00\xff", None])
def test_a_response_is_read_as_it_was_stored(headers: Headers | None, body: bytes | None) -> None:
    if headers is None:
        body = SEALED + (body or b"")
    response = StoredResponse(201, headers, body)
    found = stored_and_read(response)
    assert found.response == response
    assert (found.state, found.fingerprint) == (State.COMPLETED, CLAIM.fingerprint)


@pytest.mark.parametrize(("headers", "word"), [(JSON, '"json"'), (HTML, '"html"')])
def test_the_word_for_usual_headers_never_changes(headers: Headers, word: str) -> None:
    # Records that were stored by an earlier release hold it.
    assert StoredResponse(200, headers, b"").values()["headers"] == word
