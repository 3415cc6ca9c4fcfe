"""``db.session`` in the operation's transaction."""
