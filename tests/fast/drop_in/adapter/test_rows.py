"""The adapter on the rollout side: columns, whole groups, schedules."""

from types import SimpleNamespace

import pytest

from tests.fast.drop_in.adapter.files import arguments

MASKS = [[1, 1], [0, 1, 1, 1, 1, 0], [0, 0, 0], [1]]


def samples_of(groups):
    return [SimpleNamespace(group_index=group) for group in groups]


def train_data(groups, lengths, **more):
    """Rows of one active token each, in groups."""
    sums = [groups.count(group) for group in groups]
    rows = {"tokens": [[0] * n for n in lengths], "total_lengths": lengths, "loss_masks": [[1]] * len(groups)}
    return {**rows, "prompt_group_indices": groups, "prompt_mask_sums": sums, **more}


def test_columns(adapter):
    data = {"loss_masks": MASKS}
    columns = adapter.prompt_columns(arguments(), samples_of([7, 7, 3, 3]), data)
    assert columns == {"prompt_group_indices": [7, 7, 3, 3], "prompt_mask_sums": [6, 6, 1, 1]}
    for mode in (None, "sample_mean", "token_mean", "constant"):
        assert adapter.prompt_columns(arguments(loss_aggregation=mode), samples_of([None] * 4), data) == {}


def test_columns_of_rollouts_that_are_several_rows(adapter):
    data = {"loss_masks": MASKS, "rollout_ids": [5, 6, 6, None]}
    columns = adapter.prompt_columns(arguments(n_samples_per_prompt=3), samples_of([7, 7, 7, 7]), data)
    assert columns["prompt_mask_sums"] == [7, 7, 7, 7]


@pytest.mark.parametrize(
    ("given", "groups", "message"),
    [
        ({}, [7, 7, None, 3], "prompt_mean needs a group_index on every sample"),
        ({}, [7, 7, 7, 3], "complete prompt groups of n_samples_per_prompt=2 samples; 7 has 3"),
        ({"loss_aggregation": "token_mean"}, [7, 7, 3, 3], "at least one active token in every optimizer step"),
    ],
)
def test_columns_that_are_refused(adapter, given, groups, message):
    masks = [[0]] * 4 if given else MASKS
    with pytest.raises(ValueError, match=message):
        adapter.prompt_columns(arguments(**given), samples_of(groups), {"loss_masks": masks})


def test_groups_are_dealt_whole_step_by_step(adapter):
    data = train_data([1, 1, 2, 2, 3, 4, 3, 4], [2] * 8)
    assert adapter.keep_groups_whole(arguments(), data, [[], []]) == [[0, 1, 4, 6], [2, 3, 5, 7]]
    data["dynamic_global_batch_size"] = 8  # one step
    assert adapter.keep_groups_whole(arguments(), data, [[], []]) == [[0, 1, 5, 7], [2, 3, 4, 6]]
    partitions = [[0, 2], [1, 3]]
    assert adapter.keep_groups_whole(arguments(loss_aggregation=None), data, partitions) is partitions


def test_balanced_groups_have_close_token_totals(adapter):
    # 20, 18, 4 and 2 tokens: in order they would be 24 and 20, by size 22 and 22.
    data = train_data([1, 1, 2, 2, 3, 3, 4, 4], [10, 10, 9, 9, 2, 2, 1, 1])
    args = arguments(global_batch_size=8, balance_data=True)
    dealt = adapter.keep_groups_whole(args, data, [[], []])
    assert [sum(data["total_lengths"][row] for row in rows) for rows in dealt] == [22, 22]


@pytest.mark.parametrize(
    ("changes", "given", "message"),
    [
        ({"prompt_group_indices": [1, 1, 2]}, {}, "one prompt_group_indices entry per sample .4. in the .* got 3"),
        ({"prompt_mask_sums": ()}, {}, "one prompt_mask_sums entry per sample .4. in the train data; got 0"),
        (
            {"prompt_mask_sums": [2, 3, 2, 2]},
            {},
            "inconsistent prompt_mask_sums in prompt group 1; its rows all carry",
        ),
        ({"prompt_group_indices": [1, 1, 1, 2]}, {}, "complete prompt groups of n_samples_per_prompt=2 samples; 1 h"),
        (
            {"prompt_group_indices": [1, 2, 1, 2]},
            {"global_batch_size": 2},
            "prompt group 1 straddle an optimizer-step",
        ),
        ({}, {"global_batch_size": 2}, "step 0 has 1 prompt groups, which is not divisible by dp_size 2; prompt_mean"),
    ],
)
def test_groups_that_are_refused(adapter, changes, given, message):
    data = {**train_data([1, 1, 2, 2], [2] * 4), **changes}
    with pytest.raises(ValueError, match=message):
        adapter.keep_groups_whole(arguments(**given), data, [[], []])


def by_budget(args, config, lengths, *, global_batch_size, rollout_indices):
    """A host's schedule, for one rank: micro-batches of consecutive rows, in each step of whole rollouts."""
    assert config["dp_size"] == 1 and config["cp_size"] == 2
    names = list(dict.fromkeys(rollout_indices))
    partition, batches, counts = [], [], []
    for step in range(len(names) // global_batch_size):
        kept = names[step * global_batch_size : (step + 1) * global_batch_size]
        start = len(batches)
        room = 0
        for row in [row for row, name in enumerate(rollout_indices) if name in kept]:
            if lengths[row] > room:
                batches.append([])
                room = args.max_tokens
            batches[-1].append(len(partition))
            partition.append(row)
            room -= lengths[row]
        counts.append(len(batches) - start)
    return [partition], [batches], counts, [global_batch_size] * len(counts)


def test_a_schedule_keeps_groups_whole_and_ranks_in_step(adapter):
    groups = [1, 1, 2, 2, 3, 3, 4, 4, 4, 5, 5]
    lengths = [4, 4, 1, 1, 1, 2, 4, 3, 1, 9, 9]
    rollouts = [0, 1, 2, 3, 4, 5, 6, 7, 7, 8, 9]  # the last group is no whole step
    data = train_data(groups, lengths, rollout_ids=rollouts)
    schedule = adapter.keep_groups_whole_in_schedule(by_budget, data)
    result = schedule(
        arguments(max_tokens=4),
        {"dp_size": 2, "cp_size": 2},
        lengths,
        global_batch_size=4,
        rollout_indices=rollouts,
    )
    partitions, micro_batches, counts, num_rollouts = result
    assert partitions == [[0, 1, 4, 5], [2, 3, 6, 7, 8]]
    # Step 0: two micro-batches on rank 0, so rank 1 halves its one; step 1: rank 0 halves its one.
    assert micro_batches == [[[0], [1], [2], [3]], [[0], [1], [2], [3, 4]]]
    assert (counts, num_rollouts) == ([2, 2], [4, 4])


def test_a_schedule_hands_on_what_else_the_host_gives_its_own(adapter):
    given = []

    def host_schedule(args, config, lengths, *, seed, **options):
        given.append(seed)
        return by_budget(args, config, lengths, **options)

    data = train_data([1, 1, 2, 2], [1] * 4)
    options = {"global_batch_size": 4, "rollout_indices": [0, 1, 2, 3], "seed": 7}
    schedule = adapter.keep_groups_whole_in_schedule(host_schedule, data)
    partitions, *_ = schedule(arguments(max_tokens=4), {"dp_size": 2, "cp_size": 2}, [1] * 4, **options)
    assert partitions == [[0, 1], [2, 3]]
    assert given == [7, 7]


def test_without_prompt_mean_the_schedule_is_the_hosts(adapter):
    calls = []

    def host_schedule(*arguments_, **options):
        calls.append((arguments_, options))
        return "result"

    args = arguments(loss_aggregation="token_mean")
    schedule = adapter.keep_groups_whole_in_schedule(host_schedule, {})
    assert schedule(args, {"dp_size": 2}, [1], global_batch_size=1, rollout_indices=[0]) == "result"
    assert calls == [((args, {"dp_size": 2}, [1]), {"global_batch_size": 1, "rollout_indices": [0]})]


def test_a_rank_with_too_few_rows_for_its_micro_batches(adapter):
    data = train_data([1, 1, 1, 2, 2], [4, 4, 4, 1, 1], rollout_ids=[0, 1, 1, 2, 3])
    schedule = adapter.keep_groups_whole_in_schedule(by_budget, data)
    config = {"dp_size": 2, "cp_size": 2}
    with pytest.raises(ValueError, match="a rank has fewer rows than the 3 micro-batches of another; allow longer"):
        schedule(
            arguments(max_tokens=4),
            config,
            data["total_lengths"],
            global_batch_size=4,
            rollout_indices=[0, 1, 1, 2, 3],
        )


def test_an_incomplete_last_step_is_scheduled_where_the_host_trains_on_it(adapter):
    data = train_data([1, 1, 2, 2, 3, 3], [1] * 6)
    schedule = adapter.keep_groups_whole_in_schedule(by_budget, data)
    options = {"global_batch_size": 4, "rollout_indices": list(range(6))}
    args = arguments(max_tokens=4, allow_partial_train_step=True)
    with pytest.raises(ValueError, match="step 1 has 1 prompt groups, which is not divisible by dp_size 2"):
        schedule(args, {"dp_size": 2, "cp_size": 2}, [1] * 6, **options)
