"""Models that the FSDP2 backend trains."""
