"""What counts in a fingerprint of a request, and what does not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flask_idempotency.core.errors import ConfigurationError
from flask_idempotency.core.fingerprint import Fingerprint, by_value
from flask_idempotency.core.keys import digest
from tests.unit.payments import (
    ALGORITHMS,
    FORM,
    PAYMENT,
    UPLOAD,
    Algorithm,
    by_json,
    by_request,
    file,
    of_fields,
)


@pytest.mark.parametrize("fingerprint", ALGORITHMS)
@pytest.mark.parametrize(
    "change",
    [
        {"method": "PATCH"},
        {"host": "other.test"},
        {"host": None},
        {"path": "/pay/"},
        {"query": b""},
        {"query": b"a=1&b=3"},
        {"query": b"a=1b=2"},
        {"media_type": "text/plain"},
        {"body": b'{"n":2}'},
    ],
)
def test_each_component_changed_alone_changes_the_fingerprint(
    fingerprint: Algorithm, change: dict[str, Any]
) -> None:
    assert fingerprint(PAYMENT).matches(fingerprint(replace(PAYMENT))) is True
    assert fingerprint(PAYMENT).matches(fingerprint(replace(PAYMENT, **change))) is False


def test_the_media_type_counts_unless_fields_are_chosen() -> None:
    other = replace(PAYMENT, media_type="application/vnd.shop+json")
    assert by_request(PAYMENT) != by_request(other)
    assert by_json(PAYMENT) != by_json(other)
    assert of_fields("/n")(PAYMENT) == of_fields("/n")(other)


@pytest.mark.parametrize("fingerprint", ALGORITHMS)
def test_borders_between_components_count(fingerprint: Algorithm) -> None:
    moved = [("shop.test", "/pay"), ("shop.tes", "t/pay"), ("shop.test/pay", "")]
    moved += [("", "/pay"), ("/pay", "")]
    digests = {fingerprint(replace(PAYMENT, host=h, path=p)).digest for h, p in moved}
    digests.add(fingerprint(replace(PAYMENT, host=None)).digest)
    assert len(digests) == len(moved) + 1


@pytest.mark.parametrize("fingerprint", ALGORITHMS)
def test_the_order_of_query_names_does_not_count_but_that_of_one_names_values_does(
    fingerprint: Algorithm,
) -> None:
    def of(query: bytes) -> bytes:
        return fingerprint(replace(PAYMENT, query=query)).digest

    assert of(b"a=1&b=2") == of(b"b=2&a=1")
    assert of(b"a=1&b=0&a=2") == of(b"b=0&a=1&a=2")
    assert of(b"a=1&a=2") != of(b"a=2&a=1")
    assert of(b"x+y=1&%78%20y=2") != of(b"%78%20y=2&x+y=1")


@pytest.mark.parametrize("fingerprint", ALGORITHMS)
@pytest.mark.parametrize(
    "form",
    [
        FORM[:2],
        FORM[::-1],
        (*FORM[:2], file("scan", b"\x01", "a.png", "image/png")),
        (*FORM[:2], file("scan", b"\x00", "a.png", None)),
        (*FORM[:2], file("scan", b"\x00", "image/png", "a.png")),
    ],
)
def test_every_part_of_a_form_counts(fingerprint: Algorithm, form: tuple[Any, ...]) -> None:
    assert fingerprint(UPLOAD) != fingerprint(replace(UPLOAD, form=form))


@pytest.mark.parametrize("fingerprint", ALGORITHMS)
def test_a_new_boundary_of_a_form_does_not_count_and_no_body_passes_for_one(fingerprint) -> None:
    assert fingerprint(UPLOAD) == fingerprint(replace(UPLOAD, body=b"--other-boundary\r\n"))
    body = digest(*(digest(*part) for part in FORM))
    assert fingerprint(UPLOAD) != fingerprint(replace(UPLOAD, form=(), body=body))


def test_a_custom_value_counts_alone() -> None:
    assert by_value(b"a") == by_value(b"a") != by_value(b"b")
    with pytest.raises(ConfigurationError, match="must return bytes, not str"):
        by_value("a")  # type: ignore[arg-type]


def test_fingerprints_of_two_algorithms_cannot_be_compared() -> None:
    made = [by_request(PAYMENT), by_json(PAYMENT), by_value(b"n")]
    assert [fingerprint.algorithm for fingerprint in made] == [7, 10, 4]
    made += [of_fields(*each)(PAYMENT) for each in (["/n"], ["/at"], ["/n", "/at"])]
    assert len({fingerprint.digest for fingerprint in made}) == len(made)
    for one in made:
        assert [one.matches(other) for other in made].count(None) == len(made) - 1
    assert made[0].matches(Fingerprint(99, made[0].digest)) is None


@given(st.lists(st.text().map(lambda name: "/" + name.translate({0x7E: "~0", 0x2F: "~1"})), max_size=5))
def test_the_code_of_a_list_fits_a_smallint_and_is_no_algorithms_own(pointers: list[str]) -> None:
    made = of_fields("/n", *pointers)(PAYMENT)
    assert made == of_fields(*reversed(pointers), "/n", "/n")(PAYMENT)
    assert 16 < made.algorithm < 2**15


def test_stored_fingerprints_never_change_under_their_version() -> None:
    pinned = {
        "13a3ac1debefc186": by_request(PAYMENT),
        "6c9ebdfe7003fa8a": by_request(UPLOAD),
        "46b2540e67127451": by_json(PAYMENT),
        "8736e34f46d51786": of_fields("/n", "/c", "/b", "/a")(PAYMENT),
        "116549e601594c2a": by_value(b"n"),
    }
    assert [fingerprint.digest.hex()[:16] for fingerprint in pinned.values()] == list(pinned)
    assert of_fields("/n", "/m")(PAYMENT).algorithm == 16313


def test_neither_a_body_nor_a_digest_shows_in_a_repr() -> None:
    assert repr(PAYMENT) == (
        "RequestParts(method='POST', host='shop.test', path='/pay', query=b'a=1&b=2',"
        " media_type='application/json')"
    )
    assert repr(by_request(PAYMENT)) == "Fingerprint(algorithm=7)"


OLD, NEW, GONE = ((bytes([number]) * 8, bytes([number]) * 32) for number in range(3))


def test_a_keyed_fingerprint_is_compared_under_the_key_that_made_the_stored_one() -> None:
    same, other = by_value(b"same"), by_value(b"other")
    for stored_under in ([OLD], [OLD, NEW], [NEW, OLD]):
        stored = Fingerprint(same.algorithm, same.keyed(stored_under).digest)
        assert same.keyed([NEW, OLD]).matches(stored) is True
        assert other.keyed([NEW, OLD]).matches(stored) is False


@pytest.mark.parametrize(("stored_under", "under"), [([], [NEW]), ([OLD], []), ([GONE], [NEW, OLD])])
def test_fingerprints_under_different_keys_cannot_be_compared(stored_under: Any, under: Any) -> None:
    value = by_value(b"same")
    stored = value.keyed(stored_under) if stored_under else value
    assert (value.keyed(under) if under else value).matches(stored) is None


def test_a_keyed_fingerprint_says_nothing_without_its_key() -> None:
    value = by_value(b"0000")
    assert value.digest not in value.keyed([NEW]).digest
    assert value.keyed([(NEW[0], OLD[1])]).matches(value.keyed([NEW])) is False
    assert repr(value.keyed([NEW, OLD])) == repr(value) == "Fingerprint(algorithm=4)"
