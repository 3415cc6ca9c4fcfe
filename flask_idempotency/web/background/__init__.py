"""Threads of ours, and what they do."""
