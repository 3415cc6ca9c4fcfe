"""The operator's page: what is going on, and what to do about an operation that is stuck.

Its pages come from the server complete, with one stylesheet and without JavaScript.
"""
