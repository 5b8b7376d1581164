"""Backends whose path is the host's experimental one."""
