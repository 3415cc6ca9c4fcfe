"""Each endpoint of the zoo, tested as the documentation says: as it is, and in every crash."""

from __future__ import annotations

import pytest

from flask_idempotency.testing import assert_idempotent, every_crash
from tests.testing_kit.conftest import make_shop
from tests.testing_kit.zoo import RIGHT, WRONG, Zoo

pytestmark = pytest.mark.of_tests


@pytest.fixture(scope="session")
def kit_database(postgres):
    """One of its own, for the zoo's tables."""
    return postgres.database("zoo")


@pytest.fixture
def zoo(store, request, tmp_path):
    zoo = make_shop(store, tmp_path, request, Zoo)
    zoo.folder = tmp_path
    yield zoo
    zoo.close()


def each(endpoints):
    """A test of each endpoint on the stores where it is what it is."""
    pairs = [(endpoint, store) for endpoint in endpoints for store in endpoint.stores]
    names = [f"{endpoint}-{store}" for endpoint, store in pairs]
    return pytest.mark.parametrize(("endpoint", "store"), pairs, ids=names)


def check(zoo, endpoint):
    arguments = endpoint.build(zoo) or {}

    def send():
        own = arguments() if callable(arguments) else arguments
        assert_idempotent(zoo.client, "POST", "/payments", **{"json": {"amount": 5}, **own})

    send()
    for crash in every_crash(zoo.app):
        with crash:
            send()


@each(WRONG)
def test_a_wrong_endpoint_is_told_what_is_wrong(zoo, endpoint):
    with pytest.raises(Exception) as error:  # noqa: PT011 -- a refusal of the package's own, too
        check(zoo, endpoint)
    said = f"{error.typename}: {error.value}"
    assert [words for words in endpoint.words if words not in said] == [], said


@each(RIGHT)
def test_a_right_endpoint_passes(zoo, endpoint):
    check(zoo, endpoint)
