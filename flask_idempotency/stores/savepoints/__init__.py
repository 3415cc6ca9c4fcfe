"""What the transactions of a view are inside the operation's: savepoints."""
