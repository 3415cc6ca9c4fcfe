"""``after_commit`` goes with the savepoint or the step that it was asked for in; else it comes once."""

from __future__ import annotations

import pytest

from flask_idempotency import after_commit, current_operation, idempotent


class Oops(Exception):
    pass


class Work:
    """Runs the programs below, and notes what was called after the commit."""

    def __init__(self, world) -> None:
        self.world, self.session, self.called, self.nested = world, world.db.session, [], []

    def does(self, program):
        """Parentheses are savepoints, ``!`` undoes one; another word is a row that asks for a call."""
        session, nested = self.session, self.nested
        words = {
            "(": lambda: nested.append(session.begin_nested()),
            ")": lambda: nested.pop().commit(),
            "!": lambda: nested.pop().rollback(),
            "commit": session.commit,
            "flush": session.flush,
            "rollback": session.rollback,
            "connect": session.connection,
        }
        for word in program.split():
            if word == "fail":
                raise Oops
            words.get(word, lambda word=word: self._asks(word))()

    def _asks(self, what):
        if what != "rowless":
            self.session.add(self.world.Payment(amount=5, note=what))
        after_commit(lambda: self.called.append(what))

    def check(self, called):
        """Exactly these were called, each once, and exactly their rows are there."""
        notes = [note for (note,) in self.world.sql("select note from payment order by id")]
        assert (self.called, sorted(notes)) == (called.split(), sorted(called.split()))
        self.world.assert_clean()


CALLED = {
    "before ( undone flush ! after commit": "before after",
    "connect ( rowless ! done commit": "done",
    "( done ) commit": "done",
    "( ( undone ) ! done commit": "done",
    "( outer ( undone ! again ) commit": "outer again",
    "( undone ! commit": "",
    "( first ) ( undone ! commit": "first",
    "first commit ( undone ! second commit": "first second",
    "( done commit undone flush rollback commit": "done",  # that ends the savepoint, too
}


@pytest.mark.parametrize("way", ["with a key", "with a key, leased", "without a key", "unprotected"])
@pytest.mark.parametrize(("program", "called"), CALLED.items())
def test_what_was_asked_in_a_savepoint_goes_with_it(program, called, way, world):
    work = Work(world)

    def pay():
        work.does(program)
        return {}, 201

    if way != "unprotected":
        pay = idempotent(required=False, atomic="leased" not in way)(pay)
    world.app.post("/payments")(pay)
    key = "a" if way.startswith("with a key") else None
    for _ in range(2 if key else 1):
        assert world.post(key=key).status_code == 201
    work.check(called)


def test_a_job_drops_it_too(world):
    work = Work(world)
    for _ in range(2):
        with world.app.app_context():
            program = "( undone ! after commit"
            world.idempotency.run("1", work.does, program, scope="s", name="job")
    work.check("after")


FAILS = "undone flush fail"
STEPS = {
    "a step that fails": ([("one", FAILS)], "done commit", "done"),
    "one that is tried again": ([("one", FAILS), ("one", "done commit")], "", "done"),
    "one that undoes a part": ([("one", "before ( undone ! after commit")], "", "before after"),
    "one after another": ([("one", "done commit"), ("two", FAILS)], "", "done"),
}


@pytest.mark.parametrize("atomic", [True, False])
@pytest.mark.parametrize(("steps", "after", "called"), STEPS.values(), ids=STEPS)
def test_what_was_asked_in_a_step_that_failed_goes_with_it(steps, after, called, atomic, world):
    work = Work(world)

    @world.app.post("/payments")
    @idempotent(atomic=False)
    def pay():
        for name, program in steps:
            try:
                current_operation.step(name, work.does, program, atomic=atomic)
            except Oops:
                if not atomic:
                    work.session.rollback()
        work.does(after)
        return {}, 201

    for _ in range(2):
        assert world.post().status_code == 201
    work.check(called)
