"""A request's way through Flask. Names no store."""
