"""Training backends and what they share."""
