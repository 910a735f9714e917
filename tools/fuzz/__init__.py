"""Messages that nobody sends, for a real server process; `python -m tools.fuzz --help`."""
