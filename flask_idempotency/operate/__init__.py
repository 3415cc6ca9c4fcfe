"""What an operator does with records, as plain functions over a store's :class:`Admin`.

The commands and the console are two skins over it.
"""
