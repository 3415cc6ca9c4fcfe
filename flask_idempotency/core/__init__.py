"""The rules: states, transitions, decisions and values.

Standard library only; no clock, no randomness, no input but the process's number, and no output
but the log.
"""
