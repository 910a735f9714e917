"""Helpers for people and for make: run as `python -m tools.<name>` from the root of the repository."""
