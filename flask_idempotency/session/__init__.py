"""All that happens to a session in an operation. It knows SQLAlchemy and the drivers' connections."""
