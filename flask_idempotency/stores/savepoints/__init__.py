"""A view's transactions inside the operation's: savepoints."""
