"""A host to test the drop-in tool on: a trainer of next-token tables, with the seams of the 2026-07 layout."""
