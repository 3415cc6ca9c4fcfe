"""The store in PostgreSQL: the truth."""
