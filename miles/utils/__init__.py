"""Argument parsing, records and helpers without a room of their own."""
