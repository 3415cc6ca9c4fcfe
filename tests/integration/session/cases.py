"""Verdicts of this room beside those of the differential suite, and what many of its views do."""

from tests.differential.harness import Either, Equal, NothingKept, Refused


class Sound(Equal):
    """Equal, and no row is committed by a request that failed, as it may be without us."""

    def problems(self, outcome):
        found, rows = super().problems(outcome), outcome.protected.rows
        for step in outcome.protected.steps:
            if (step.reply.status or 500) >= 500 and step.rows != rows:
                found.append(f"{step.label}: failed, but there are {step.rows} after {rows}")
            rows = step.rows
        return found


SOUND_OR_REFUSED = Either((Sound(), Refused(), NothingKept()))
"""Also where the view fails without us, too: by whatever name, and with nothing committed."""
SOUND_OR_FAILED = Either((Sound(), Refused(), NothingKept(500)))
"""Where the driver refuses for us: its error has no name of ours, and nothing is committed."""


def then(*parts):
    """A view, or what comes before one, of several parts: the last one responds."""

    def run(world):
        result = None
        for part in parts:
            result = part(world)
        return result

    return run


def sends(*statements):
    def send(world):
        for statement in statements:
            world.sql(statement)

    return send


def asks(statement):
    return lambda world: world.note(world.sql(statement))


def writes(world, amount=3):
    """A payment that nobody has committed."""
    world.pay(amount)
    world.session.flush()


def commits(world):
    world.commit()


def pays(world):
    world.pay(1)
    world.commit()


def rolls_back(world):
    world.session.rollback()


def fails(_world):
    raise OSError("as asked")


def rejects(_world):
    return {"error": "no"}, 409


reads = sends("select count(*) from account")
