"""Where training samples come from: the embedded task, files of prompts, and rollout dumps."""
