"""What the tests look for among the events."""


def of(heard):
    """The events of observed requests."""
    return [event for name, event in heard if name == "operation_observed"]


def only(heard):
    """The one such event."""
    (event,) = of(heard)
    return event
