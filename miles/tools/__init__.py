"""Reports: on rollout dumps, and on finished runs. Each is a command, `python -m miles.tools.NAME`."""
