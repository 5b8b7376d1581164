"""Samples to columns: masks, rewards, group and rollout totals, and every way a rollout can be refused."""

import dataclasses

import numpy as np
import pytest
import torch

from miles.ray.rollout.train_data_conversion import convert_samples_to_train_data
from miles.utils.errors import UserError
from miles.utils.types import Sample
from tests.fast.backends.training_utils.layout import batch_sizes, mode_namespace, samples_of
from tests.fast.oracle import MODES, Row

NAN, INF = float("nan"), float("inf")
ROWS = [  # two whole groups of two, interleaved; unequal lengths; one row without active tokens
    Row.of([1, 1, 0], [0] * 3, group=7),
    Row.of([1] * 5, [0] * 5, group=4),
    Row.of([0, 1], [0] * 2, group=7, prompt_length=1),
    Row.of([0], [0], group=4),
]


def convert(rows=ROWS, mode="prompt_mean", change=None, metadata=None, custom=None, reward_func=None, **overrides):
    args = mode_namespace(mode, **{**batch_sizes(rows), **overrides})
    samples = samples_of(rows)
    if change is not None:
        samples = change(samples) or samples
    return convert_samples_to_train_data(args, samples, metadata or {}, custom, reward_func)


def test_columns_of_plain_rows():
    samples = samples_of(ROWS)
    samples[1].status = Sample.Status.TRUNCATED
    data = convert(change=lambda _: samples)
    assert [list(tokens) for tokens in data["tokens"]] == [sample.tokens for sample in samples]
    assert list(data["response_lengths"]) == [3, 5, 2, 1]
    assert [list(mask) for mask in data["loss_masks"]] == [list(row.mask) for row in ROWS]
    assert list(data["sample_indices"]) == [0, 1, 2, 3]
    assert list(data["truncated"]) == [0, 1, 0, 0]
    assert list(data["raw_reward"]) == [0.0, 1.0, 2.0, 0.0]
    assert {len(column) for column in data.values() if isinstance(column, list)} == {4}


def test_group_totals_by_hand():
    """Group 7 has 2 + 1 active tokens, group 4 has 5 + 0; P is counted on each group's first row."""
    data = convert()
    assert list(data["prompt_mask_sums"]) == [3, 5, 3, 5]
    assert list(data["prompt_counts"]) == [1, 1, 0, 0]
    indices = list(data["prompt_group_indices"])
    assert indices[0] == indices[2] != indices[1] == indices[3]


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "prompt_mean"])
def test_group_totals_are_not_computed_where_no_mode_needs_them(mode):
    assert not {"prompt_mask_sums", "prompt_group_indices", "prompt_counts"} & convert(mode=mode).keys()


@pytest.mark.parametrize("mode", MODES)
def test_rollout_totals_of_rollouts_stored_as_several_rows(mode):
    """Rollout 5 is rows 0 and 2 (2 + 1 active tokens), rollout 6 is row 1, rollout 8 row 3: N is three."""
    rows = [dataclasses.replace(row, rollout=rollout) for row, rollout in zip(ROWS, [5, 6, 5, 8], strict=True)]
    data = convert(rows, mode, change=same_rewards([1.0, 0.0, 1.0, 0.0]))
    assert list(data["rollout_mask_sums"]) == [3, 5, 3, 0]
    assert list(data["rollout_counts"]) == [1, 1, 0, 1]
    ids = list(data["rollout_ids"])
    assert ids[0] == ids[2] and len(set(ids)) == 3


def test_rows_that_name_no_rollout_are_rollouts():
    data = convert(mode="sample_mean")
    assert sum(data.get("rollout_counts", [1] * 4)) == 4
    assert data.get("rollout_mask_sums") in (None, [2, 5, 1, 0])


def same_rewards(rewards):
    def change(samples):
        for sample, reward in zip(samples, rewards, strict=True):
            sample.reward = reward

    return change


# ---- rewards ------------------------------------------------------------------------------------------------------


def test_grpo_rewards_are_normalised_inside_each_prompt_group():
    """Group 7: rewards 0 and 2, mean 1, unbiased deviation sqrt(2); group 4: 1 and 0, deviation sqrt(1/2)."""
    rewards = list(convert(mode="sample_mean")["rewards"])
    half = 0.5 / 0.5**0.5
    assert rewards == pytest.approx([-(0.5**0.5), half, 0.5**0.5, -half], abs=1e-5)


def test_rewards_without_deviation_or_without_normalisation():
    centred = list(convert(mode="sample_mean", grpo_std_normalization=False)["rewards"])
    assert centred == pytest.approx([-1.0, 0.5, 1.0, -0.5], abs=1e-6)
    baseline = list(convert(mode="sample_mean", advantage_estimator="reinforce_plus_plus_baseline")["rewards"])
    assert baseline == pytest.approx([-1.0, 0.5, 1.0, -0.5], abs=1e-6)
    assert list(convert(mode="sample_mean", rewards_normalization=False)["rewards"]) == [0.0, 1.0, 2.0, 0.0]


def test_equal_rewards_of_a_group_normalise_to_zero():
    assert list(convert(change=same_rewards([1.0, 0.0, 1.0, 0.0]))["rewards"]) == pytest.approx([0.0] * 4, abs=1e-6)


def test_a_rollout_of_several_rows_weighs_once_in_its_group_mean():
    """Rollouts 0 (reward 0) and 1 (reward 3, three rows) of one group: mean 1.5, not 2.25."""
    rows = [Row.of([1], [0], group=0, rollout=r) for r in (0, 1, 1, 1)]
    data = convert(rows, "sample_mean", same_rewards([0.0, 3.0, 3.0, 3.0]), grpo_std_normalization=False)
    assert list(data["rewards"]) == pytest.approx([-1.5, 1.5, 1.5, 1.5])


def test_named_reward():
    data = convert(mode="sample_mean", change=same_rewards([{"a": 5, "b": x} for x in (0, 2, 4, 6)]), reward_key="b")
    assert list(data["raw_reward"]) == [0, 2, 4, 6]


def test_custom_reward_post_processing():
    data = convert(mode="sample_mean", reward_func=lambda args, samples: ([9, 8, 7, 6], [0.5, 1.5, 2.5, 3.5]))
    assert list(data["raw_reward"]) == [9, 8, 7, 6]
    assert list(data["rewards"]) == [0.5, 1.5, 2.5, 3.5]


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ([0.0, 1.0, 2.0, 3.0], r"must return \(raw_rewards, rewards\)"),
        (([0.0] * 4, 1.0), r"must return \(raw_rewards, rewards\)"),
        (([0.0] * 4, [0.0] * 3), "got 4 and 3 for 4 samples"),
        (([0.0] * 4, [0.0, NAN, 0.0, 0.0]), "sample 1 .* the reward nan"),
        (([0.0, 0.0, INF, 0.0], [0.0] * 4), "sample 2 .* the reward inf"),
    ],
)
def test_custom_reward_post_processing_is_held_to_its_word(result, message):
    with pytest.raises(UserError, match=message):
        convert(mode="sample_mean", reward_func=lambda args, samples: result)


def test_truth_values_and_scalars_of_libraries_are_rewards():
    data = convert(mode="sample_mean", change=same_rewards([True, np.float32(1.5), torch.tensor(2.0), 3]))
    assert list(data["raw_reward"]) == [1.0, 1.5, 2.0, 3.0]


def test_ids_of_rollouts_with_one_row_change_nothing():
    def with_ids(samples):
        for index, sample in enumerate(samples):
            sample.rollout_id = 10 + index

    assert convert(mode="sample_mean", change=with_ids) == convert(mode="sample_mean")


def test_custom_conversion_takes_over():
    assert convert(custom=lambda args, samples: {"rows": len(samples)}) == {"rows": 4}


# ---- masks and log-probs ------------------------------------------------------------------------------------------


def test_a_sample_without_mask_is_all_active_and_a_removed_one_all_masked():
    def change(samples):
        samples[0].loss_mask = None
        samples[1].remove_sample = True

    data = convert(change=change)
    assert [list(mask) for mask in data["loss_masks"]] == [[1, 1, 1], [0] * 5, [0, 1], [0]]
    assert list(data["prompt_mask_sums"]) == [4, 0, 4, 0]


def with_log_probs(samples, poison=None, row=1, position=2):
    for i, sample in enumerate(samples):
        sample.rollout_log_probs = [-0.25 * (i + 1)] * sample.response_length
    if poison is not None:
        samples[row].rollout_log_probs[position] = poison


def test_rollout_log_probs_travel():
    data = convert(change=with_log_probs)
    assert [list(row) for row in data["rollout_log_probs"]] == [[-0.25] * 3, [-0.5] * 5, [-0.75] * 2, [-1.0]]
    assert "rollout_log_probs" not in convert()


def test_nan_log_prob_at_a_masked_position_is_allowed():
    data = convert(change=lambda samples: with_log_probs(samples, NAN, row=0, position=2))
    assert str(data["rollout_log_probs"][0][2]) == "nan", "it travels as it is; the loss never reads it"


# ---- refusals -----------------------------------------------------------------------------------------------------


def setter(row, **fields):
    def change(samples):
        for name, value in fields.items():
            setattr(samples[row], name, value)

    return change


REFUSALS = {
    "no-group": (setter(2, group_index=None), "group_index"),
    "group-too-small": (setter(3, group_index=7), "complete prompt groups"),
    "one-group-missing-a-row": (lambda samples: samples[:3], "complete prompt groups"),
    "mask-too-short": (setter(1, loss_mask=[1] * 4), r"4.*5|5.*4"),
    "mask-too-long": (setter(1, loss_mask=[1] * 6), r"6.*5|5.*6"),
    "mask-not-binary": (setter(1, loss_mask=[1, 1, 2, 0, 1]), "0.*1"),
    "mask-fractional": (setter(1, loss_mask=[1, 1, 0.5, 0, 1]), "0.*1"),
    "mask-negative": (setter(1, loss_mask=[1, 1, -1, 0, 1]), "0.*1"),
    "tokens-shorter-than-response": (setter(1, tokens=[1, 2, 3, 4]), "token"),
    "log-probs-missing": (
        lambda samples: with_log_probs(samples) or setter(1, rollout_log_probs=None)(samples),
        "log_probs",
    ),
    "log-probs-too-short": (
        lambda samples: with_log_probs(samples) or setter(1, rollout_log_probs=[-1.0] * 4)(samples),
        "log_probs",
    ),
    "empty-rollout": (None, "empty|no sample"),
    "reward-nan": (setter(1, reward=NAN), "reward"),
    "reward-infinite": (setter(1, reward=-INF), "reward"),
    "reward-missing": (setter(1, reward=None), "reward"),
    "reward-text": (setter(1, reward="1"), "reward"),
    "reward-huge": (setter(1, reward=10**400), "reward"),
}
for _poison in (NAN, INF, -INF):
    REFUSALS[f"log-prob-{_poison}"] = (
        lambda samples, poison=_poison: with_log_probs(samples, poison),
        "rollout_log_probs|log-prob",
    )


@pytest.mark.parametrize("name", REFUSALS)
def test_refused(name):
    change, message = REFUSALS[name]
    if name == "empty-rollout":
        with pytest.raises(ValueError, match=f"(?i){message}"):
            convert_samples_to_train_data(mode_namespace("prompt_mean"), [], {}, None, None)
        return
    with pytest.raises(ValueError, match=f"(?is){message}") as refusal:
        convert(change=change)
    if name.startswith(("mask", "tokens", "log-probs", "log-prob", "reward")):
        assert "1" in str(refusal.value), "the message says which sample"


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "prompt_mean"])
def test_group_index_is_asked_for_by_prompt_mean_alone(mode):
    data = convert(mode=mode, change=setter(2, group_index=None), rewards_normalization=False)
    assert len(data["tokens"]) == len(ROWS) and "prompt_group_indices" not in data


def test_ragged_groups_are_accepted_on_request_and_still_need_an_index():
    rows = [Row.of([1] * n, [0] * n, group=g) for n, g in [(1, 4), (2, 9), (3, 9)]]
    assert list(convert(rows, prompt_groups="ragged")["prompt_mask_sums"]) == [1, 5, 5]
    with pytest.raises(ValueError, match="complete prompt groups"):
        convert(rows, prompt_groups="complete", n_samples_per_prompt=2)
    with pytest.raises(ValueError, match="group_index"):
        convert(rows, prompt_groups="ragged", change=setter(1, group_index=None))


def test_a_token_mean_step_without_active_token_is_refused_before_training():
    masked = [dataclasses.replace(row, mask=(0,) * row.response_length) for row in ROWS]
    with pytest.raises(ValueError, match="at least one active token"):
        from miles.ray.rollout.train_data_conversion import split_train_data_by_dp

        split_train_data_by_dp(mode_namespace("token_mean", **batch_sizes(masked)), convert(masked, "token_mean"), 1)
