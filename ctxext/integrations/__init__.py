"""Bridges to other people's tools, each of which is imported only by its own module here."""
