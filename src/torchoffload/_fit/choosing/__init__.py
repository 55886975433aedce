"""Choosing which modules of a model are its blocks."""
