"""The scenarios of idempot's feature file, in our words and without a profile.

``tests/spec/idempotency.feature`` of idempot-dev/idempot-js, commit b39392a8. The classes have its
headlines as names. What does not hold is expected as it is, with the reason.
"""

from __future__ import annotations

import pytest

KEY = "abc123456789012345678"
FOO, BAZ = {"foo": "bar"}, {"baz": "qux"}


@pytest.fixture
def world(make_world):
    return make_world(IDEMPOTENCY_REPLAYED_HEADER="X-Idempotent-Replayed")


@pytest.fixture
def runs(world, add_view):
    world.app.get("/api", endpoint="read")(dict)
    return add_view(world, "/api", methods=("POST", "PATCH", "PUT", "DELETE"))


@pytest.fixture
def send(world, runs):
    def post(key=KEY, **kwargs):
        return world.post("/api", key=key, **{"json": FOO, **kwargs})

    return post


class TestHeaderValidation:
    @pytest.mark.parametrize(
        ("key", "type_"),
        [
            (None, "key-required"),
            ("", "key-malformed"),
            ("k" * 256, "key-malformed"),
            ("key,with,commas,longer-than-twenty-chars", "key-malformed"),
        ],
    )
    def test_a_missing_or_malformed_key_gets_a_problem_400(self, send, assert_problem, key, type_):
        """Its ``type`` is ours; theirs has the number of a section of the draft."""
        assert_problem(send(key), 400, type_)

    def test_a_valid_key_is_accepted(self, send):
        assert send("8e03978e-40d5-43e8-bc93-6894a57f9324").status_code == 201


class TestFirstRequest:
    def test_it_runs_and_is_recorded_with_its_response(self, world, send):
        first = send()
        [record] = world.records()
        assert (record.state, record.status, bytes(record.body)) == ("completed", 201, first.data)
        assert world.count() == 1


class TestDuplicate:
    def test_each_gets_the_stored_response_marked_and_nothing_is_repeated(self, world, send):
        first = send()
        for _ in range(3):
            again = send()
            assert (again.status, again.data) == (first.status, first.data)
            assert again.headers["x-idempotent-replayed"] == "true"
        assert (world.count(), len(world.records())) == (1, 1)


class TestFingerprintConflict:
    def test_the_same_body_with_another_key_runs_although_idempot_refuses_it(self, world, send):
        """Two keys are two operations: somebody may order the same thing twice."""
        assert [send(key).status_code for key in ("key1-12345678901234567", "key2-x")] == [201, 201]
        assert world.count() == 2


class TestKeyReuse:
    def test_another_body_gets_a_problem_422(self, world, send, assert_problem):
        send()
        assert_problem(send(json=BAZ), 422, "key-reused")
        assert world.count() == 1


class TestConcurrentRequest:
    def test_it_gets_a_problem_409(self, world, add_view, assert_problem, gate, background):
        add_view(world, "/slow", endpoint="slow", during=gate)
        first = background(world.post, "/slow", KEY)
        gate.wait_until_reached()
        refused = world.post("/slow", KEY)
        gate.open()
        assert_problem(refused, 409, "request-in-progress", retry=True)
        assert first.result().status_code == 201


class TestEdgeCases:
    def test_a_get_bypasses_it(self, world, send):
        assert send(method="GET").status_code == 200
        assert world.records() == []

    @pytest.mark.parametrize("method", ["PUT", "DELETE"])
    def test_a_decorated_put_or_delete_is_protected_although_idempot_bypasses_it(self, send, method):
        """HTTP calls them idempotent; their views may not be. ``protect`` leaves them out."""
        assert send(method=method).status_code == 201
        assert send(method=method).headers["X-Idempotent-Replayed"] == "true"

    def test_put_and_delete_bypass_protect(self, world, runs):
        for method in "PUT", "DELETE":
            view = dict
            world.app.add_url_rule(f"/{method}", method, view, methods=[method, "POST"])
        world.idempotency.protect(world.app)
        for method in "PUT", "DELETE":
            for _ in range(2):
                response = world.post(f"/{method}", KEY, method=method)
                assert "X-Idempotent-Replayed" not in response.headers
        assert world.records() == []

    def test_an_empty_body_is_a_body(self, send):
        assert send(json=None, data=b"").status_code == 201
        assert send(json=None, data=b"").headers["X-Idempotent-Replayed"] == "true"

    def test_a_patch_is_protected(self, world, send):
        assert send(method="PATCH").status_code == 201
        assert len(world.records()) == 1
