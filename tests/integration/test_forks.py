"""A process that is forked inside an operation has no part in it: the child's work is its own."""

import multiprocessing
import os
import signal
import sys
import time
import warnings

import pytest
import sqlalchemy as sa

from flask_idempotency import Retryable, current_operation, idempotent

POSTGRES = pytest.mark.parametrize(
    ("store", "driver"), [("hybrid", "psycopg2"), ("postgres", "psycopg")], indirect=True
)
FREE_AFTER_SECONDS = 2.5
"""The second after which a duplicate asks for the owner, and what a busy machine adds."""

MIDDLE = "NotAtomic: the view's session or connection is used where the operation is not"
NOT_HERE = "LeaseLost: This process was forked inside the operation: it can neither end it nor tak"
NOT_PRESENT = "RuntimeError: current_operation is only there while a view"
GOES_ON = """
    select count(*) from idempotency_record
    where state = 'in_progress' and lease_expires_at > clock_timestamp() and steps is null
"""


def write(world, *_):
    world.db.session.add(world.Payment(amount=2))
    world.db.session.commit()
    return "done"


def query(world, *_):
    return world.db.session.scalar(sa.text("select current_setting('app.asked', true)"))


def own(world, *_):
    """Work in an application context of its own."""
    with world.app.app_context():
        world.db.session.execute(sa.text("set local app.asked = 'by a child'"))
        return write(world) if query(world) == "by a child" else "another's reply"


def run(world, *_):
    """Twice: the second call finds the first one's result."""
    world.db.session.remove()
    once = lambda: world.idempotency.run(str(os.getpid()), write, world, scope="s", name="child")  # noqa: E731
    return f"{once()}, {once()}"


def fail(error):
    raise error


ROUTES = "atomic", "leased", "step"
IN_A_CHILD = {  # what a child does: with what; in which views; what comes of it
    "write": (write, ["atomic"], MIDDLE),
    "write_anew": (lambda world, *_: world.db.session.remove() or write(world), ["atomic"], MIDDLE),
    "query": (query, ["atomic"], MIDDLE),
    "commit": (lambda world, *_: world.db.session.commit(), ["atomic"], MIDDLE),
    "connection": (lambda _, __, connection: connection.execute(sa.select(1)), ["atomic"], MIDDLE),
    "current": (lambda *_: current_operation.name, ROUTES, NOT_PRESENT),
    "step": (lambda _, operation, __: operation.step("of a child", str), ["leased"], NOT_HERE),
    "extend": (lambda _, operation, __: operation.extend(100), ["leased"], NOT_HERE),
    "run": (run, ROUTES, "done, done"),
    "own": (own, ROUTES, "done"),
}
ENDS = {
    "exit": lambda: os._exit(0),
    "sys.exit": lambda: sys.exit(0),
    "error": lambda: fail(RuntimeError),
    "retryable": lambda: fail(Retryable),
    "return": lambda: {"told": "by a child"},
}
CASES = [(what, route, "exit") for what, (_, routes, _) in IN_A_CHILD.items() for route in routes]
CASES += [("own", route, end) for route in ROUTES for end in ENDS if end != "exit"]


def forked():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # pytest has threads of its own
        return os.fork()


def told_by_a_child(do):
    """Fork, and return what came of it when the child has ended; in the child itself, None."""
    reader, writer = os.pipe()
    if child := forked():
        os.close(writer)
        with os.fdopen(reader) as told:
            os.waitpid(child, 0)
            return told.read()
    try:
        said = str(do())
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    os.write(writer, said.encode())
    return None


@POSTGRES
def test_a_child_has_its_own_work_and_no_part_in_the_operation(world):
    parent = os.getpid()

    def pay():
        world.db.session.add(world.Payment(amount=1))
        if route != "leased":  # there the session is the application's, with what a fork does to it
            world.db.session.flush()
            world.db.session.execute(sa.text("set local app.asked = 'by the view'"))
        operation = current_operation._get_current_object()
        connection = operation.connection if what == "connection" else None
        said = told_by_a_child(lambda: IN_A_CHILD[what][0](world, operation, connection))
        if said is None:
            return ENDS[end]()
        if route == "leased":
            assert world.sql(GOES_ON) == [(1,)], "the child has ended it"
        else:
            assert query(world) == "by the view"
        world.db.session.commit()
        return {"told": said}

    in_step = lambda: current_operation.step("pay", pay, atomic=True)  # noqa: E731
    for name, view, atomic in ("atomic", pay, True), ("leased", pay, False), ("step", in_step, False):
        protected = idempotent(name=name, atomic=atomic)(view)
        world.app.add_url_rule(f"/{name}", name, protected, methods=["POST"])
    world.app.config["PROPAGATE_EXCEPTIONS"] = False
    for what, route, end in CASES:
        case = f"{what}/{route}/{end}"
        try:
            first = world.post(f"/{route}", case)
        finally:
            if os.getpid() != parent:  # a child that fell out of the view
                os._exit(0)
        assert first.status_code == 200, (case, first.text)
        assert first.json["told"].startswith(IN_A_CHILD[what][2]), (case, first.json)
        assert world.post(f"/{route}", case).json == first.json
    of_children = sum("done" in IN_A_CHILD[what][2] for what, *_ in CASES)
    assert world.sql("select amount, count(*) from payment group by 1 order by 1") == [
        (1, len(CASES)),
        (2, of_children),
    ]
    of_views = "select count(*) from idempotency_record where name <> 'child' and state = 'completed'"
    assert world.sql(of_views) == [(len(CASES),)]
    world.assert_clean()


@POSTGRES
def test_a_child_that_outlives_its_worker_does_not_keep_its_key(world, add_view):
    reader, writer = os.pipe()

    def fork():
        if current_operation.attempt == 1:
            if not forked():
                os.write(writer, f"{os.getpid()}\n".encode())
            signal.pause()

    runs = add_view(world, during=fork)
    worker = multiprocessing.get_context("fork").Process(target=world.post)
    worker.start()
    with os.fdopen(reader) as told:
        child = int(told.readline())
    worker.kill()
    worker.join()  # with a time-out it would wait for the child, too
    died = time.monotonic()
    os.kill(child, 0)  # it lives
    while (status := world.post().status_code) == 409:
        assert time.monotonic() - died < FREE_AFTER_SECONDS
    os.kill(child, signal.SIGKILL)
    assert (status, runs, world.count()) == (201, [2], 1)
