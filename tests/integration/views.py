"""The one protected view of an application that is tested in this process, and what it does."""

from flask_idempotency import idempotent


def protect(world, view, **options):
    """Make a function the view of POST /payments."""
    world.app.add_url_rule("/payments", "pay", idempotent(**options)(view), methods=["POST"])


def pay_once(world):
    world.db.session.add(world.Payment(amount=1))
    world.db.session.commit()
