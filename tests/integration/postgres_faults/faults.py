"""What the faults of PostgreSQL share: settings, and a fault that happens once."""


def first_time(fault):
    """The fault happens in the first attempt only."""
    left = [fault]
    return lambda: left.pop()() if left else None


def settings(**values):
    """Engine options that set Postgres's settings for each connection."""
    options = " ".join(f"-c {name}={value}" for name, value in values.items())
    return {"SQLALCHEMY_ENGINE_OPTIONS": {"connect_args": {"options": options}}}
