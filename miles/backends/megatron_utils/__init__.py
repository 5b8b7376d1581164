"""Megatron-Core backend: its model, schedules, data-parallel wrapper and optimizer, on GPUs or on CPUs."""
