"""Clients that retry, each against a server that fails in the same ways."""
