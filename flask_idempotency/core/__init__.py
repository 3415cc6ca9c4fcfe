"""The rules: states, transitions, decisions and values.

Standard library only; no clock, no randomness, no input or output.
"""
