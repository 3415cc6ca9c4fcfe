"""What an operator does with records, as plain functions over a store's :class:`Admin`.

The commands, the console and the metrics are three skins over it.
"""
