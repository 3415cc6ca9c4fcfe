"""Which frames of a stack are the application's own, between what calls it and what it calls."""

from __future__ import annotations

import sysconfig
import threading
import traceback
from collections.abc import Iterable
from pathlib import Path

import flask
import flask_sqlalchemy
import sqlalchemy
import werkzeug

_OTHERS = (
    *(
        str(Path(each.__file__ or "").parent)
        for each in (flask, flask_sqlalchemy, sqlalchemy, werkzeug)
    ),
    str(Path(__file__).parents[1]),
    threading.__file__,
    "<",  # code that was generated
)

_INSTALLED = (
    *(sysconfig.get_path(each) for each in ("stdlib", "platstdlib", "purelib", "platlib")),
    str(Path(__file__).parents[1]),
)


def is_own(frame: traceback.FrameSummary) -> bool:
    """Return True if a frame is the application's, or that of another library."""
    return not frame.filename.startswith(_OTHERS)


def is_installed(filename: str) -> bool:
    """Return True if a file is Python's own, a library's or ours."""
    return filename.startswith(_INSTALLED)


def lines(frames: Iterable[traceback.FrameSummary]) -> list[str]:
    """The frames as Python shows them."""
    return "".join(traceback.format_list(list(frames))).splitlines()
