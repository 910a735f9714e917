"""Load with disturbances against a real server process; `python -m tools.chaos --help`."""
