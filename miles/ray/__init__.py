"""Paths of the host trainer; nothing here needs Ray."""
