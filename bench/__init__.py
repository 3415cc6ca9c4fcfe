"""What the protection costs, as ratios to the unprotected view within one run."""
