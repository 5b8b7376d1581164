"""The training layer that backends share: data, losses, aggregation, logging."""
