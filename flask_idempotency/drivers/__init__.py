"""What differs between PostgreSQL's drivers, and SQLite's: one file for each."""
