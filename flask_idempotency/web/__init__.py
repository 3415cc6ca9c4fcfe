"""A request's way through Flask. Imports no store."""
