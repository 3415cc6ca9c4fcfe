"""All that happens to a session in an operation.

It knows SQLAlchemy, the drivers' connections and Flask's contexts.
"""
