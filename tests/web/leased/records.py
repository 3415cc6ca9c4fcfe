"""The records and steps of operations that are not atomic."""

import pytest

from tests.killed import Killed


def end_lease(world, ago="0 seconds"):
    """As if so much time had passed, and then what ``ago`` says."""
    world.sql(f"update idempotency_record set lease_expires_at = clock_timestamp() - interval '{ago}'")


def kill(world):
    """One request whose worker dies in its view, and the end of its lease."""
    with pytest.raises(Killed):
        world.post()
    end_lease(world)


def begun(world, ago):
    """As if the first attempt had begun so long ago."""
    world.sql(f"update idempotency_record set created_at = clock_timestamp() - interval '{ago}'")


def steps(world):
    """The finished steps, oldest first: their names, and the attempts that finished them."""
    return [(name, int(step["attempt"])) for name, step in _stored_steps(world)]


def results(world):
    """The results of the finished steps, as they are stored."""
    return [step["result"] for _, step in _stored_steps(world)]


def forge(world, result, step="charge"):
    """Write another result of a step."""
    world.sql(
        "update idempotency_record set steps ="
        " jsonb_set(cast(steps as jsonb), array[:step, 'result'], to_jsonb(cast(:result as text)))",
        step=step,
        result=result,
    )


def _stored_steps(world):
    stored = world.sql("select steps from idempotency_record where steps is not null")
    every = [item for (steps,) in stored for item in steps.items()]
    return sorted(every, key=lambda item: item[1]["at"])
