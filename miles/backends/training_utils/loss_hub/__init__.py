"""Losses, advantages and corrections that the dispatcher and the trainer choose from."""
