"""The records and steps of operations that are not atomic."""


def end_lease(world, ago="0 seconds"):
    """As if so much time had passed, and then what ``ago`` says."""
    world.sql(f"update idempotency_record set lease_expires_at = clock_timestamp() - interval '{ago}'")


def lease_is_over(world):
    """Whether nobody needs to wait for it."""
    ((is_over,),) = world.sql(
        "select coalesce(lease_expires_at <= clock_timestamp(), true) from idempotency_record"
    )
    return is_over


def begun(world, ago):
    """As if the first attempt had begun so long ago."""
    world.sql(f"update idempotency_record set created_at = clock_timestamp() - interval '{ago}'")


def steps(world):
    """The finished steps, oldest first."""
    return world.sql("select name, attempt from idempotency_record_step order by created_at")
