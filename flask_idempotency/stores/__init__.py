"""The stores: one verb, one atomic act on a server."""
