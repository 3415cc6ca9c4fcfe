"""What can be known of the server that the application runs in."""

from types import ModuleType, SimpleNamespace

import pytest

from flask_idempotency.web.environment import warn_if_short, worker_timeout

CALL = """
class Worker:
    def __init__(self, timeout):
        self.cfg = Config(timeout)

    def load_wsgi(self, create_app):
        return create_app()
"""


def test_gunicorns_timeout_is_known_while_it_makes_the_application():
    gunicorn = ModuleType("gunicorn.workers.base")
    gunicorn.__dict__["Config"] = lambda timeout: SimpleNamespace(timeout=timeout)
    exec(CALL, gunicorn.__dict__)  # noqa: S102 -- a module of that name, without the package
    assert gunicorn.__dict__["Worker"](30).load_wsgi(worker_timeout) == 30.0


def test_without_gunicorn_nothing_is_known():
    assert worker_timeout() == 0.0


@pytest.mark.parametrize(
    ("lease", "timeout", "warned"), [(20, 30, True), (60, 30, False), (5, 0, False)]
)
def test_a_lease_that_ends_before_the_worker_is_warned_of(caplog, lease, timeout, warned):
    warn_if_short(lease, timeout, "IDEMPOTENCY_LEASE")
    assert ("shorter than gunicorn's timeout" in caplog.text) is warned
