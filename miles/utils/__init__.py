"""Options, validation, records and shared helpers."""
