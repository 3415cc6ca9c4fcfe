"""More than one machine, on one: clusters from installed programs, faults, and a judge of every key.

``make scale`` runs the shop of ``example/`` under gunicorn against them, with the project's own client.
"""
