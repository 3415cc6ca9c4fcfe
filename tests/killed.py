"""The death of a worker, inside the process of the test."""


class Killed(BaseException):
    """Nothing catches it, as nothing catches a SIGKILL."""
