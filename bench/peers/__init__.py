"""Other packages beside this one, in one run; see ``python -m bench --help``."""
