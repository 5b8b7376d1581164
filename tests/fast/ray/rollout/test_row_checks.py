"""Every way in which a sample's fields, or the columns of a custom conversion, can be of a wrong kind or size."""

import math

import numpy as np
import pytest
import torch

from miles.ray.rollout.train_data_conversion import convert_samples_to_train_data, validate_train_data
from miles.utils.errors import UserError
from tests.fast.backends.training_utils.layout import batch_sizes, mode_namespace, samples_of
from tests.fast.oracle import Row

ROWS = [Row.of([1, 1, 0], [0] * 3, group=0), Row.of([0, 1], [0] * 2, group=0)]
NAN = math.nan


def arguments(**overrides):
    return mode_namespace("sample_mean", **{**batch_sizes(ROWS), **overrides})


def convert(change=None, reward_func=None, **fields):
    """Convert two samples, the second with other fields."""
    samples = samples_of(ROWS)
    for sample in samples:
        sample.rollout_log_probs = [-0.5] * sample.response_length
    for name, value in fields.items():
        setattr(samples[1], name, value)
    if change is not None:
        change(samples)
    return convert_samples_to_train_data(arguments(), samples, {}, None, reward_func)


FIELDS = [
    ({"loss_mask": 1}, r"loss_mask 1 \(int\); it must be a flat list"),
    ({"loss_mask": "01"}, r"loss_mask '01' \(str\)"),
    ({"loss_mask": [[0], [1]]}, "loss_mask .* must be a flat list"),
    ({"loss_mask": [1, None]}, r"loss_mask\[1\] = None"),
    ({"loss_mask": [1, "1"]}, r"loss_mask\[1\] = '1'"),
    ({"loss_mask": [1, NAN]}, r"loss_mask\[1\] = nan"),
    ({"tokens": [65, 65.5, 66]}, r"tokens\[1\] = 65.5; it must be a list of integers"),
    ({"tokens": [65, "a", 66]}, r"tokens\[1\] = 'a'"),
    ({"tokens": [65, 66, None]}, r"tokens\[2\] = None"),
    ({"tokens": [65, [66], 67]}, r"tokens\[1\] = \[66\]"),
    ({"tokens": [65, 66, 10**30]}, r"tokens\[2\] = 10{30}"),
    ({"tokens": None}, r"tokens None \(NoneType\)"),
    ({"tokens": "abc"}, r"tokens 'abc' \(str\)"),
    ({"tokens": 7}, r"tokens 7 \(int\)"),
    ({"tokens": torch.ones(3)}, r"tokens\[0\] = tensor\(1.\)"),
    ({"rollout_log_probs": [None, -1.0]}, r"rollout_log_probs\[0\] = None"),
    ({"rollout_log_probs": ["-1", -1.0]}, r"rollout_log_probs\[0\] = '-1'"),
    ({"rollout_log_probs": -1.0}, r"rollout_log_probs -1.0 \(float\); it must be a flat list of numbers"),
    ({"rollout_log_probs": [-1.0, -1e300]}, r"rollout_log_probs\[1\] = -1e\+300 at an active token"),
    ({"response_length": "2"}, r"response_length '2' \(str\); it must be an integer"),
    ({"response_length": None}, r"response_length None"),
    ({"response_length": 2.0}, r"response_length 2.0 \(float\)"),
    ({"response_length": True}, r"response_length True \(bool\)"),
    ({"response_length": -1}, r"for a response_length of -1"),
    ({"group_index": [0]}, r"group_index \[0\] \(list\); it must be an integer or None"),
    ({"group_index": NAN}, "group_index nan"),
    ({"rollout_id": [1]}, r"rollout_id \[1\] \(list\); it must be an integer or None"),
    ({"rollout_id": "1"}, "rollout_id '1'"),
    ({"metadata": 3}, "metadata of type int"),
    ({"reward": {"a": 1.0}}, r"reward \{'a': 1.0\}; .*--reward-key"),
    ({"reward": torch.ones(2)}, "reward tensor"),
    ({"reward": 1e200}, r"reward 1e\+200; it must be a finite number, at most 3.4e\+38 in magnitude"),
]


@pytest.mark.parametrize(("fields", "message"), FIELDS, ids=map(repr, (fields for fields, _ in FIELDS)))
def test_a_field_of_a_wrong_kind_names_the_sample(fields, message):
    with pytest.raises(UserError, match=rf"^sample 1 \(index=1, .*{message}") as caught:
        convert(**fields)
    assert "\n" not in str(caught.value)


def test_kinds_that_are_right():
    plain = convert()
    assert convert(loss_mask=[False, True]) == convert(loss_mask=np.array([0, 1])) == plain
    assert convert(loss_mask=torch.tensor([0, 1]), response_length=np.int64(2)) == plain
    assert convert(rollout_log_probs=torch.tensor([-0.5, -0.5], dtype=torch.bfloat16)) == plain
    for masked in (NAN, -math.inf, -1e300):
        assert convert(rollout_log_probs=[masked, -0.5])["loss_masks"] == plain["loss_masks"]
    assert convert(rollout_log_probs=[NAN, NAN], remove_sample=True)["loss_masks"] == [[1, 1, 0], [0, 0]]


@pytest.mark.parametrize("key", ["raw_reward", "round_number"])
@pytest.mark.parametrize("value", [NAN, math.inf, "high", None, [1.0, 2.0], 1e300])
def test_numbers_in_metadata(key, value):
    def change(samples):
        samples[0].metadata, samples[1].metadata = {key: 1}, {key: value}

    with pytest.raises(UserError, match=rf"^sample 1 .* metadata\['{key}'\] .*must be a finite number"):
        convert(change)


def test_rewards_that_float32_cannot_hold():
    samples = samples_of(ROWS)
    samples[0].reward = -1e300
    with pytest.raises(UserError, match=r"^sample 0 .* reward -1e\+300"):
        convert_samples_to_train_data(arguments(rewards_normalization=False), samples, {}, None, None)
    for pair in (([0.0, 1e300], [0.0, 0.0]), ([0.0, 0.0], [0.0, 1e300])):
        with pytest.raises(UserError, match=r"^sample 1 .*custom post-processing the reward 1e\+300"):
            convert(reward_func=lambda args, samples, pair=pair: pair)


def test_rewards_whose_normalization_float32_cannot_hold():
    """Three of -3e38 and one of 3e38: mean -1.5e38, so the last is 4.5e38 above it."""
    rows = [Row.of([1], [0], group=0)] * 4
    samples = samples_of(rows)
    for sample, reward in zip(samples, [-3e38, -3e38, -3e38, 3e38], strict=True):
        sample.reward = reward
    args = mode_namespace("sample_mean", **batch_sizes(rows), grpo_std_normalization=False)
    with pytest.raises(UserError, match=r"^sample 3 .*normalization of its group the reward 4\.5"):
        convert_samples_to_train_data(args, samples, {}, None, None)
    args.grpo_std_normalization = True
    assert convert_samples_to_train_data(args, samples, {}, None, None)["rewards"] == pytest.approx([-0.5] * 3 + [1.5])


@pytest.mark.parametrize("part", [{0: 1.0, 1: 2.0}, {1.0, 2.0}, torch.tensor(1.0), 1.0, None])
def test_custom_rewards_that_are_no_lists(part):
    with pytest.raises(UserError, match="must return"):
        convert(reward_func=lambda args, samples: ([0.0, 0.0], part))


# ---- columns ------------------------------------------------------------------------------------------------------


def columns(**changes):
    return {
        "tokens": [[1, 2, 3], [4, 5]],
        "response_lengths": [2, 1],
        "loss_masks": [[1, 0], [True]],
        "rewards": [0.5, 1],
        **changes,
    }


def validate(data, **overrides):
    validate_train_data(arguments(**overrides), data, dp_size=1)


@pytest.mark.parametrize(
    "data",
    [
        columns(),
        columns(tokens=(np.array([1, 2, 3]), torch.tensor([4, 5])), rewards=[torch.tensor(1.0), np.float32(2)]),
        columns(rollout_log_probs=[[-1.0, NAN], [-2]], rollout_counts=[1, 1], rollout_ids=[("row", 0), "b"]),
        columns(own_column=None, another=[3]),
    ],
)
def test_columns_that_are_right(data):
    before = dict(data)
    validate(data)
    assert data.keys() == before.keys() and all(data[key] is before[key] for key in data), "checking changes nothing"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (None, "must be a dict of columns, got NoneType; .*--custom-convert-samples-to-train-data-path"),
        ([columns()], "must be a dict of columns, got list; .*--custom-convert-samples-to-train-data-path"),
        ({"rows": 4}, r"needs 'tokens', .* got the columns \['rows'\]; .*--custom-convert-samples-to-train-data-path"),
        (columns(tokens=[]), r"needs 'tokens', .*at least one row .* got \[\]"),
        (columns(tokens=3), "needs 'tokens', .* got 3"),
        ({key: value for key, value in columns().items() if key != "rewards"}, "rewards for each of 2 rows, got 0"),
        (columns(rewards=None), "rewards as a list with an entry for each of 2 rows, got NoneType"),
        (columns(rewards=torch.ones(2)), "rewards as a list .* got Tensor"),
        (columns(loss_masks=[[1, 0]]), "loss_masks for each of 2 rows, got 1"),
        (columns(rollout_counts=[1]), "rollout_counts for each of 2 rows, got 1"),
        (columns(rollout_counts=[1, 0.5]), r"rollout_counts\[1\] = 0.5; it must be a list of whole numbers"),
        (columns(prompt_mask_sums=[1, None]), r"prompt_mask_sums\[1\] = None"),
        (columns(rollout_ids=[1, [2]]), r"sample 1 has rollout_ids \[2\]; .*hashable"),
        (columns(rollout_log_probs=None), "rollout_log_probs as a list .* got NoneType"),
        (columns(tokens=[[1, 2, 3], [4, 5.5]]), r"sample 1 has tokens\[1\] = 5.5"),
        (columns(tokens=[[1, 2, 3], None]), "sample 1 has tokens None"),
        (columns(tokens=[[1, 2, 3], [4]]), "sample 1 has 1 tokens and a response_length of 1; at least one prompt"),
        (columns(response_lengths=[2, "1"]), "sample 1 has response_length '1'"),
        (columns(loss_masks=[[1, 0], [1, 1]]), "sample 1 has a loss_mask of length 2 for a response_length of 1"),
        (columns(loss_masks=[[1, 0], [2]]), r"sample 1 has loss_mask\[0\] = 2"),
        (columns(loss_masks=[[1, 0], 1]), r"sample 1 has loss_mask 1 \(int\)"),
        (columns(rollout_log_probs=[[-1.0, -1.0], [NAN]]), r"sample 1 has rollout_log_probs\[0\] = nan at an active"),
        (columns(rollout_log_probs=[[-1.0, -1.0], []]), "sample 1 has 0 rollout_log_probs for a response_length of 1"),
        (columns(rollout_log_probs=[[-1.0, -1.0], None]), "sample 1 has no rollout_log_probs"),
        (columns(rewards=[0.5, NAN]), "sample 1 has rewards nan; it must be a finite number"),
        (columns(rewards=[0.5, "1"]), "sample 1 has rewards '1'"),
        (columns(rewards=[0.5, 1e300]), r"sample 1 has rewards 1e\+300"),
        (columns(raw_reward=[0.5, None]), "sample 1 has raw_reward None"),
    ],
)
def test_columns_that_are_wrong(data, message):
    with pytest.raises(UserError, match=message) as caught:
        validate(data)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["use_rollout_logprobs", "use_tis", "get_mismatch_metrics"])
def test_options_that_need_the_rollouts_log_probs(name):
    flag = "--" + name.replace("_", "-")
    with pytest.raises(UserError, match=f"{flag}: .* the samples carry none"):
        validate(columns(), **{name: True})
    validate(columns(rollout_log_probs=[[-1.0, -1.0], [-1.0]]), **{name: True})
    validate(columns(), **{name: True}, loss_type="sft_loss")


def test_an_own_correction_decides_itself_what_it_needs():
    own = {"custom_tis_function_path": "own.correction"}
    validate(columns(), use_tis=True, get_mismatch_metrics=True, **own)
    with pytest.raises(UserError, match="--use-rollout-logprobs: "):
        validate(columns(), use_rollout_logprobs=True, **own)
