"""A host to test the drop-in tool on: a trainer of next-token tables, with seams in the layout of slime."""
