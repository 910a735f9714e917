"""Measurements, run by hand and never as a test: see README.md here."""
