"""What the tests of this folder share: the usual view, a gate inside a view, and what they look for."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from werkzeug.test import TestResponse

from flask_idempotency import current_operation, idempotent

PATIENCE_SECONDS = 10
"""How long a test waits for what ought to happen at once. Longer than any machine is slow."""

NOT_COMPARED = {"date", "idempotent-replayed"}


class Gate:
    """Holds a view back in the middle until the test opens it."""

    def __init__(self) -> None:
        self._reached, self._opened = threading.Event(), threading.Event()

    def __call__(self) -> None:
        """Called by the view: say that it is there, and wait."""
        self._reached.set()
        assert self._opened.wait(PATIENCE_SECONDS), "nobody opened the gate"

    def wait_until_reached(self) -> None:
        assert self._reached.wait(PATIENCE_SECONDS), "the view did not come to the gate"

    def open(self) -> None:
        self._opened.set()


@pytest.fixture
def background(make_world: Any) -> Iterator[Callable[..., Future[Any]]]:
    """Runs a function in a thread; the world is there until it has ended."""
    with ThreadPoolExecutor(4) as pool:
        yield pool.submit


@pytest.fixture
def gate(background: Any) -> Iterator[Gate]:
    """A gate that opens at the latest when the test is over."""
    gate = Gate()
    yield gate
    gate.open()


@pytest.fixture
def add_view() -> Callable[..., list[int]]:
    """Adds the usual view to a world: it writes one payment, commits, and answers 201.

    ``during`` is called after the commit. Gives the list to which each run adds its attempt.
    """

    def add(
        world: Any,
        path: str = "/payments",
        *,
        during: Callable[[], object] = lambda: None,
        methods: tuple[str, ...] = ("POST",),
        endpoint: str = "pay",
        **options: Any,
    ) -> list[int]:
        runs: list[int] = []

        @idempotent(**options)
        def pay(**values: Any) -> Any:
            payment = world.Payment(amount=5)
            world.db.session.add(payment)
            world.db.session.commit()
            runs.append(current_operation.attempt if current_operation else 0)
            during()
            return {"id": payment.id, "run": len(runs)}, 201

        world.app.add_url_rule(path, endpoint, pay, methods=list(methods))
        return runs

    return add


@pytest.fixture
def assert_problem() -> Callable[..., dict[str, Any]]:
    """Holds an answer against RFC 9457 and the wire table; gives its members.

    Tests write "canary" into keys and bodies: it may come back in no problem, nor may a digest.
    """

    def check(response: TestResponse, status: int, name: str, *, retry: bool = False) -> Any:
        assert response.status_code == status, response.text
        assert response.content_type == "application/problem+json"
        members = response.json
        assert members is not None
        assert members["type"] == f"urn:flask-idempotency:problem:{name}"
        assert members["status"] == status
        assert members["title"]
        assert members["detail"]
        assert response.headers["Cache-Control"] == "no-store"
        assert "Idempotent-Replayed" not in response.headers
        if retry:
            assert int(response.headers["Retry-After"]) >= 1
        else:
            assert "Retry-After" not in response.headers
        everything = f"{response.headers}{response.text}"
        assert "canary" not in everything
        assert not re.search("[0-9a-fA-F]{16}", everything)
        return members

    return check


@pytest.fixture
def assert_replayed() -> Callable[[TestResponse, TestResponse], None]:
    """Holds a replay against the first answer: status, every header line, every byte."""

    def lines(response: TestResponse) -> list[tuple[str, str]]:
        return sorted(
            (name, value) for name, value in response.headers if name.lower() not in NOT_COMPARED
        )

    def check(first: TestResponse, replay: TestResponse) -> None:
        assert "Idempotent-Replayed" not in first.headers
        assert replay.headers.get("Idempotent-Replayed") == "true", replay.text
        assert replay.status_code == first.status_code
        assert lines(replay) == lines(first)
        assert replay.data == first.data

    return check
