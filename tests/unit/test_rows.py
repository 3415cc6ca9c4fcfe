"""What the rows of earlier releases hold of a response."""

from __future__ import annotations

import pytest

from flask_idempotency.core.records import Headers, StoredResponse


@pytest.mark.parametrize(
    ("headers", "word"),
    [
        ((("Content-Type", "application/json"),), '"json"'),
        ((("Content-Type", "text/html; charset=utf-8"),), '"html"'),
    ],
)
def test_the_word_for_usual_headers_never_changes(headers: Headers, word: str) -> None:
    assert StoredResponse(200, headers, b"").values()["headers"] == word
