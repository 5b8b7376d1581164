"""Which rank trains which rows, and in which micro-batches."""


def build_dp_schedule(args, train_parallel_config, total_lengths, *, global_batch_size, rollout_indices):
    """Return each rank's rows, its micro-batches as places among them, and per step the micro-batches and rollouts."""
    dp_size = train_parallel_config["dp_size"]
    names = list(dict.fromkeys(rollout_indices))
    partitions = [[] for _ in range(dp_size)]
    micro_batch_indices = [[] for _ in range(dp_size)]
    num_microbatches, global_batch_sizes = [], []
    for start in range(0, len(names) - global_batch_size + 1, global_batch_size):
        inside = set(names[start : start + global_batch_size])
        rows = [row for row, name in enumerate(rollout_indices) if name in inside]
        if args.balance_data:
            rows.sort(key=lambda row: -total_lengths[row])
        size = args.micro_batch_size
        batches = [rows[i : i + size] for i in range(0, len(rows), size)]
        assert len(batches) % dp_size == 0, "every rank needs equally many micro-batches"
        for number, batch in enumerate(batches):
            rank = number % dp_size
            first = len(partitions[rank])
            partitions[rank] += batch
            micro_batch_indices[rank].append(list(range(first, first + len(batch))))
        num_microbatches.append(len(batches) // dp_size)
        global_batch_sizes.append(global_batch_size)
    return partitions, micro_batch_indices, num_microbatches, global_batch_sizes
