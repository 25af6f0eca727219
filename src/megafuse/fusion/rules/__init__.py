"""Legality rules, one a file. A rule says how two row regions may become one, or why not."""
