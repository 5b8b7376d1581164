"""FSDP2 backend, for CPUs and GPUs."""
