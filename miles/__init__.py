"""Exact loss aggregation for RL post-training trainers."""
