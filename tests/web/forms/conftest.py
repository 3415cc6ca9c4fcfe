"""A page with a form, for the tests of this folder."""

import pytest

from tests.web.forms.pages import add_page


@pytest.fixture
def store():
    return "postgres"  # what is tested here is the same in front of every store


@pytest.fixture
def config():
    return {}


@pytest.fixture
def world(make_world, config):
    return make_world(SECRET_KEY="canary-secret", PROPAGATE_EXCEPTIONS=True, **config)


@pytest.fixture
def shop(world):
    """A page with a form, the view it is sent to, and the page that this redirects to."""
    add_page(world, "/form", "{{ idempotency_field() }}")
    return world
