"""Pages with forms, the views they are sent to, and a browser's part: load a page, send its form."""

import re

from flask import flash, get_flashed_messages, redirect, render_template_string, request

from flask_idempotency import current_operation, idempotent

ALICE = {"X-User": "alice"}
BOB = {"X-User": "bob"}
MESSAGE = ["good", "Paid 5"]


def add_page(world, path, form):
    text = f'<form method="post">{form}<input name="amount"></form>'
    world.app.add_url_rule(path, path, lambda: render_template_string(text))


def add_payments(world, path="/payments", during=lambda: None, **options):
    runs = []

    @idempotent(**options)
    def pay():
        runs.append(current_operation.key if current_operation else None)
        world.db.session.add(world.Payment(amount=int(request.form["amount"])))
        world.db.session.commit()
        flash(f"Paid {request.form['amount']}", "good")
        during()
        return redirect("/thanks", 303)

    def thanks():
        return {"messages": get_flashed_messages(with_categories=True)}

    world.app.add_url_rule(path, path, pay, methods=["POST"])
    world.app.add_url_rule("/thanks", f"thanks {path}", thanks)
    return runs


def field_of(page):
    """The value of the field on a page."""
    (value,) = re.findall(
        r'<input type="hidden" name="idempotency_key" value="([\w.-]+)" autocomplete="off">', page
    )
    return value


def load(client, path="/form", headers=ALICE):
    return field_of(client.get(path, headers=headers).text)


def send(client, field, path="/payments", headers=ALICE, **fields):
    values = {"amount": "5", **fields}
    if field is not None:
        values["idempotency_key"] = field
    return client.post(path, data=values, headers=headers)
