"""The laboratory's page: what it shows works without JavaScript, too."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

from flask import Flask, Response, abort, redirect, render_template, request, url_for
from flask.typing import ResponseReturnValue

from example.seed import ALICE, BOB
from laboratory import stories
from laboratory.results import Result, money, read_books
from laboratory.stage import OPERATOR_PASSWORD, Stage
from laboratory.stories import STORIES
from laboratory.tour import lines

GUARANTEES = Path(__file__).resolve().parent.parent / "docs" / "guarantees.md"
LATEST = 5  # rows of a book; of most stories these are all
SHOWN = 8  # requests of a story


def create_app(stage: Stage) -> Flask:
    app = Flask(__name__)
    app.jinja_options["trim_blocks"] = app.jinja_options["lstrip_blocks"] = True
    shown: dict[str, Any] = {"results": None, "is_new": False}
    app.config["SHOWN"] = shown

    @app.before_request
    def only_from_here() -> None:
        """Nobody else's page may press a button, whatever name it gives this machine."""
        own = request.host_url.rstrip("/")
        if request.host.partition(":")[0] not in ("127.0.0.1", "localhost"):
            abort(400)
        if request.method == "POST" and request.headers.get("Origin", own) != own:
            abort(403)

    @app.get("/")
    def index() -> str:
        results: list[Result] | None = shown["results"]
        return render_template(
            "laboratory.html",
            stories=STORIES.values(),
            story=results[0].story if results else None,
            results={result.lane.name: result for result in results or ()},
            books={lane.name: read_books(lane) for lane in stage.lanes},
            lanes=stage.lanes,
            is_new=shown["is_new"],
            curl=lines(stage.lane("with").url),
            operator_password=OPERATOR_PASSWORD,
            people=(ALICE, BOB),
        )

    @app.post("/stories/<name>")
    def tell(name: str) -> ResponseReturnValue:
        story = STORIES.get(name) or abort(404)
        shown["results"], shown["is_new"] = stage.play(story)
        return redirect(url_for("index", _anchor="told"), 303)

    @app.post("/reset")
    def reset() -> ResponseReturnValue:
        stage.start_over()
        shown["results"] = None
        return redirect(url_for("index"), 303)

    @app.get("/guarantees.md")
    def guarantees() -> Response:
        return Response(GUARANTEES.read_text(), mimetype="text/plain")

    @app.after_request
    def nothing_from_elsewhere(response: Response) -> Response:
        response.headers["Content-Security-Policy"] = "default-src 'self'; frame-ancestors 'none'"
        response.headers["Cache-Control"] = "no-store"
        return response

    app.add_template_filter(money)
    app.add_template_filter(milliseconds)
    app.add_template_global(guarantee)
    app.add_template_global(stories.code_of, "code_of")
    app.jinja_env.globals.update(latest=LATEST, most_requests=SHOWN)
    return app


def milliseconds(at: float, began: float) -> str:
    return f"{(at - began) * 1000:,.0f} ms"


@cache
def guarantee(number: str) -> str:
    """Its sentence, from the page of the guarantees."""
    place = rf"{number}\." if number.isdigit() else rf"-(?= \*\*{number})"
    text = GUARANTEES.read_text().partition("\n## The guarantees\n")[2]
    found = re.search(rf"^{place} (\*\*.*?)(?=^\d\. |^- |^$)", text, re.MULTILINE | re.DOTALL)
    assert found, f"no guarantee {number} in {GUARANTEES}"
    plain = re.sub(r"\[(.*?)\]\(.*?\)|\*\*|`", r"\1", " ".join(found[1].split()))
    return f"Guarantee {number}: {plain}" if number.isdigit() else plain
