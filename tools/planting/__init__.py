"""Faults planted on purpose, one at a time, and what finds them."""
