"""The demo: the shop, and beside it the same shop without the extension."""
