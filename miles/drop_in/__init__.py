"""Put the loss-aggregation modes into an existing Miles or slime checkout: `python -m miles.drop_in CHECKOUT`."""
