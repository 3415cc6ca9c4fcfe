"""What a debugger or an error report shows of our objects: no key, scope, body, response or secret."""

from flask_idempotency.core.fingerprint import by_value
from flask_idempotency.core.records import Record, State, StoredResponse
from flask_idempotency.session.operation import Operation
from flask_idempotency.web.routes import app_state

FINGERPRINT = by_value(b"canary")


def test_an_operation_shows_neither_key_nor_scope():
    shown = repr(Operation("pay", "v1", scope="canary-scope", key="canary-key", attempt=2))
    assert shown == "Operation(name='pay', namespace='v1', attempt=2)"


def test_a_stored_response_shows_its_status_only():
    response = StoredResponse(201, (("Location", "canary"),), b"canary")
    assert repr(response) == "StoredResponse(status=201)"
    record = Record(b"k", "pay", State.COMPLETED, FINGERPRINT, 1, response=response)
    assert "canary" not in repr(record)


def test_the_state_of_an_application_shows_no_password_and_no_encryption_key(make_world, redis_server):
    secret = b"canary--canary--canary--canary--"
    url = redis_server.url.replace("://", "://:canary@").replace("/0", "/1")
    world = make_world(IDEMPOTENCY_ENCRYPTION_KEYS=[secret], IDEMPOTENCY_REDIS_URL=url)
    state = app_state(world.app)
    assert "canary" not in repr(state) + repr(state.settings)
