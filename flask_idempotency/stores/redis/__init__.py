"""The lock in Redis, and the store there."""
