"""Exact loss aggregation in other trainers: `step_aggregation` for any loop, and an adapter for each trainer."""
