"""One run of the view."""
