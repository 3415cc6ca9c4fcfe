"""A mistake of the application is in its log, whatever handlers it has; nothing is lost in silence."""

import pytest
import sqlalchemy as sa

from flask_idempotency import IdempotencyError, NotAtomic, current_operation, idempotent


def not_json(world):
    current_operation.step("a", object)


def open_work(world):
    world.db.session.add(world.Payment(amount=1))
    world.db.session.flush()
    current_operation.step("a", lambda: 1, atomic=True)


def run_inside(world):
    world.idempotency.run("k", lambda: 1, scope=None, name="inner")


def run_without_json(world):
    with world.app.app_context():
        world.idempotency.run("k", object, scope=None, name="other")


@pytest.mark.parametrize("handled", ["by the view", Exception, IdempotencyError])
@pytest.mark.parametrize("mistake", [not_json, open_work, run_inside, run_without_json])
def test_a_mistake_in_a_view_is_logged_though_somebody_handles_it(world, mistake, handled, caplog):
    def view():
        try:
            mistake(world)
        except IdempotencyError:
            if handled != "by the view":
                raise
        return "", 201

    # What runs in a context of its own is no part of the view.
    protected = view if mistake is run_without_json else idempotent(atomic=False)(view)
    world.app.add_url_rule("/mistaken", "mistaken", protected, methods=["POST"])
    if handled != "by the view":
        world.app.register_error_handler(handled, lambda error: ("", 200))
    world.post("/mistaken")
    told = [each.getMessage() for each in caplog.records if each.levelname == "ERROR"]
    assert [each for each in told if each.startswith("operation ")]


@pytest.mark.parametrize("atomic", [True, False])
@pytest.mark.parametrize("how", ["added", "flushed", "in SQL"])
def test_run_refuses_what_its_caller_has_not_committed(world, how, atomic):
    """It would be lost, or commit with another's work."""

    def job():
        session = world.db.session
        if how == "in SQL":
            session.execute(sa.insert(world.Payment).values(amount=1))
        else:
            session.add(world.Payment(amount=1))
        if how == "flushed":
            session.flush()
        for _ in range(2):
            with pytest.raises(NotAtomic, match="db.session held changes when run"):
                world.idempotency.run("k", lambda: 1, scope=None, name="job", atomic=atomic)
        session.commit()
        return world.idempotency.run("k", lambda: 1, scope=None, name="job", atomic=atomic)

    with world.app.app_context():
        assert job() == 1
    assert world.count() == 1


def test_a_handler_of_the_application_leaves_where_the_result_is(make_world):
    world = make_world(IDEMPOTENCY_MAX_RESPONSE_BYTES=10)
    world.app.register_error_handler(IdempotencyError, lambda error: ("ours", error.status))

    @world.app.post("/large")
    @idempotent
    def large():
        return "x" * 11, 201, {"Location": "/large/1"}

    assert world.post("/large").status_code == 201
    again = world.post("/large")
    assert (again.status_code, again.text, again.headers["Location"]) == (409, "ours", "/large/1")


def test_an_option_of_no_bytes_lets_no_body_pass(world):
    world.app.add_url_rule(
        "/none", "none", idempotent(max_request_bytes=0)(lambda: ("", 201)), methods=["POST"]
    )
    assert [world.post("/none", data=body).status_code for body in (b"", b"x")] == [201, 413]
