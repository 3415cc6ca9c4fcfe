"""What the protection costs, held against its budgets; see ``python -m bench --help``."""
