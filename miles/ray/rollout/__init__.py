"""From rollout samples to the shards that data-parallel ranks train on."""
