"""`loss_function` and the reducers behind it: one test for each rule that a caller relies on."""

import math
from argparse import Namespace

import pytest
import torch

from miles.backends.training_utils import loss as loss_module
from miles.backends.training_utils.loss_aggregation import StepCounts
from miles.backends.training_utils.loss_hub.losses import get_pg_loss_reducer
from miles.backends.training_utils.parallel import set_parallel_state
from miles.utils.errors import UserError
from tests.fast import oracle
from tests.fast.backends.training_utils import harness
from tests.fast.backends.training_utils.layout import batch_sizes, mode_namespace, simulated_state
from tests.fast.backends.training_utils.loss.inputs import CUT, ROWS, VOCAB, Step, micro_batch, packed
from tests.fast.backends.training_utils.loss.test_loss_snapshot import TIS, run
from tests.fast.oracle import MODES, Row

NAN, INF = float("nan"), float("inf")
HERE = __name__
VALUES = [  # short rows high, long rows low, a hole, a fully masked row; two groups of two
    Row.of([1, 1], [8, 6], group=0),
    Row.of([1, 1, 0, 1, 1, 1, 1], [0.5, -0.25, 64, 1, 0.25, 0.5, -1], group=0),
    Row.of([1], [-5], group=1, prompt_length=1),
    Row.of([0, 0, 0], [31, 7, 9], group=1),
]


def reducer_of(args, batch, rows, default=None):
    return get_pg_loss_reducer(
        args,
        batch,
        total_lengths=[row.total_length for row in rows],
        response_lengths=[row.response_length for row in rows],
        pg_loss_masks=[torch.tensor(row.mask) for row in rows],
        max_seq_lens=None,
        default_reducer=default,
    )


def values_of(rows):
    return torch.tensor([float(x) for row in rows for x in row.values])


# ---- get_pg_loss_reducer ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "args",
    [
        mode_namespace("sample_mean"),
        Namespace(qkv_format="thd", calculate_per_token_loss=False, custom_pg_loss_reducer_function_path=None),
        Namespace(qkv_format="thd"),
    ],
    ids=["chosen", "legacy", "bare"],
)
def test_sample_mean_is_the_default_reducer_itself(args):
    default = object()
    assert reducer_of(args, {}, VALUES, default) is default


def test_a_legacy_namespace_with_per_token_loss_sums_tokens():
    args = Namespace(qkv_format="thd", calculate_per_token_loss=True)
    total = sum(float(row.masked_sum(row.values)) for row in VALUES)
    assert reducer_of(args, {}, VALUES)(values_of(VALUES)).item() == total


def test_prompt_mean_uses_the_whole_groups_total_and_the_steps_ratio():
    """Only two of the rows are here; M_0 = 8, M_1 = 1 and P / N = 1 / 2: 14/8*2 - 5/1*2."""
    rows = [VALUES[0], VALUES[2]]
    batch = {"prompt_mask_sums": torch.tensor([8, 1]), "step_counts": StepCounts(4, 2, 9)}
    assert reducer_of(mode_namespace("prompt_mean"), batch, rows)(values_of(rows)).item() == 3.5 - 10
    ragged = {"prompt_mask_sums": torch.tensor([8, 1]), "step_counts": StepCounts(8, 2, 9)}
    assert reducer_of(mode_namespace("prompt_mean"), ragged, rows)(values_of(rows)).item() == 7.0 - 20
    # A micro-batch that does not know its step: complete groups of n_samples_per_prompt.
    alone = {"prompt_mask_sums": torch.tensor([8, 1])}
    args = mode_namespace("prompt_mean", n_samples_per_prompt=4)
    assert reducer_of(args, alone, rows)(values_of(rows)).item() == 7.0 - 20


@pytest.mark.parametrize("batch", [{}, {"prompt_mask_sums": None}])
def test_prompt_mean_without_group_totals_is_refused(batch):
    with pytest.raises(ValueError, match="prompt_mask_sums"):
        reducer_of(mode_namespace("prompt_mean"), batch, VALUES)


def test_a_fully_masked_group_counts_as_one_token():
    rows = [Row.of([0, 0], [3, 4], group=0)]
    batch = {"prompt_mask_sums": torch.tensor([0]), "step_counts": StepCounts(2, 1, 5)}
    x = values_of(rows).requires_grad_()
    result = reducer_of(mode_namespace("prompt_mean"), batch, rows)(x)
    result.backward()
    assert result.item() == 0.0 and x.grad.tolist() == [0.0, 0.0]


def test_constant_divides_by_the_divisor_alone():
    args = mode_namespace("constant", 2.5)
    assert reducer_of(args, {}, VALUES)(values_of(VALUES)).item() == pytest.approx((14 + 1 - 5) / 2.5)


def test_unknown_mode():
    with pytest.raises(ValueError, match="Unknown --loss-aggregation mode"):
        reducer_of(Namespace(loss_aggregation="mean", qkv_format="thd"), {}, VALUES)


# ---- custom reducers ----------------------------------------------------------------------------------------------

SEEN = []


def last_token_reducer(total_lengths, response_lengths, loss_masks, calculate_per_token_loss):
    """Keep the factory's arguments; sum the last token of every row, times 100."""
    SEEN.append(
        (list(total_lengths), list(response_lengths), [m.tolist() for m in loss_masks], calculate_per_token_loss)
    )
    return lambda x: (
        100.0 * sum(row[-1] for row in x.split(list(response_lengths))) if len(response_lengths) else x.sum()
    )


def not_a_factory(*_):
    return 3.0


def vector_reducer(*_):
    return lambda x: x


def float_reducer(*_):
    return lambda x: 1.5


NOT_CALLABLE = 7


@pytest.mark.parametrize("mode", MODES)
def test_a_custom_reducer_comes_before_every_mode(mode):
    SEEN.clear()
    path = f"{HERE}.last_token_reducer"
    args = mode_namespace(mode, custom_pg_loss_reducer_function_path=path, **batch_sizes(VALUES))
    assert reducer_of(args, {}, VALUES, "unused")(values_of(VALUES)).item() == 100.0 * (6 - 1 - 5 + 9)
    assert SEEN[-1] == (
        [row.total_length for row in VALUES],
        [row.response_length for row in VALUES],
        [list(row.mask) for row in VALUES],
        mode == "token_mean",
    )
    # Through the loss: divided by the mode's own normalizer, and the sample-mean metrics are not touched by it.
    # Masked positions hold 0 by then: 100 * (6 - 1 - 5 + 0) = 0, so raise row 0's last value.
    rows = [Row.of([1, 1], [8, 7], group=0), *VALUES[1:]]
    outcome = harness.Engine(args, rows).run([[[0, 2], [1]], [[3]]])
    normalizer = 9 if mode == "token_mean" else 4
    assert outcome.metrics["pg_loss"] == pytest.approx(100.0 / normalizer, rel=1e-5)
    assert outcome.value == pytest.approx(100.0 / normalizer, rel=1e-5)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("not_a_factory", "callable"),
        ("vector_reducer", "scalar"),
        ("float_reducer", "scalar"),
        ("absent", "absent"),
        ("NOT_CALLABLE", "callable"),
    ],
)
def test_a_broken_custom_reducer_is_named(name, message):
    args = mode_namespace("prompt_mean", custom_pg_loss_reducer_function_path=f"{HERE}.{name}")
    with pytest.raises(UserError, match=f"(?s){name}.*{message}|{message}.*{name}"):
        reducer_of(args, {}, VALUES)(values_of(VALUES))


def test_a_custom_reducer_that_does_not_import_is_named():
    args = mode_namespace("sample_mean", custom_pg_loss_reducer_function_path="no.such.module.reducer")
    with pytest.raises(UserError, match=r"no\.such\.module"):
        reducer_of(args, {}, VALUES)


# ---- counts -------------------------------------------------------------------------------------------------------


def test_active_tokens_without_phantoms():
    masks = [torch.tensor(mask) for mask in ([0, 0, 0], [1, 0, 1], [0], [1])]
    assert int(loss_module.get_active_token_count(masks)) == 3
    assert int(loss_module.get_active_token_count(masks[:1])) == 0
    assert int(loss_module.get_active_token_count([])) == 0
    many = [torch.ones(2**24, dtype=torch.int8), torch.ones(1, dtype=torch.int8)]
    assert int(loss_module.get_active_token_count(many)) == 2**24 + 1
    assert not loss_module.get_active_token_count(masks).is_floating_point()


def test_token_counts_by_step():
    masks = [torch.tensor(mask) for mask in ([0, 0, 0], [1, 0, 1], [0], [1], [1, 1, 1], [1, 0])]
    assert loss_module.get_token_counts_by_step(masks, 1).tolist() == [7]
    assert loss_module.get_token_counts_by_step(masks, 2).tolist() == [2, 5]
    assert loss_module.get_token_counts_by_step(masks, 3).tolist() == [2, 1, 4]
    assert loss_module.get_token_counts_by_step(masks, 3, [1, 0, 5]).tolist() == [0, 0, 7]
    assert loss_module.get_token_counts_by_step([], 2).tolist() == [0, 0]
    assert loss_module.get_token_counts_by_step(masks, 2).dtype == torch.int64


@pytest.mark.parametrize(("num_steps", "rows"), [(4, None), (0, None), (2, [3, 4]), (2, [6]), (3, [3, 3])])
def test_rows_that_do_not_make_up_the_steps(num_steps, rows):
    masks = [torch.ones(1, dtype=torch.int64)] * 6
    with pytest.raises(ValueError, match="step"):
        loss_module.get_token_counts_by_step(masks, num_steps, rows)


def test_scale_of_a_token_mean_under_data_parallel_averaging():
    """Three ranks hold sums 6, -2 and 0 over 8 tokens: averaging 3/8 of each gives 4/8."""
    scaled = [
        loss_module.scale_data_parallel_token_mean_loss(
            torch.tensor(x, requires_grad=True), global_num_tokens=8, data_parallel_size=3
        )
        for x in (6.0, -2.0, 0.0)
    ]
    assert sum(x.item() for x in scaled) / 3 == pytest.approx(0.5)
    scaled[0].backward()
    for tokens in (0, -1, torch.tensor(0)):
        with pytest.raises(ValueError, match="at least one active token"):
            loss_module.scale_data_parallel_token_mean_loss(
                torch.ones(()), global_num_tokens=tokens, data_parallel_size=2
            )


# ---- what loss_function returns -----------------------------------------------------------------------------------


def call(args, indices=(0, 3, 5), num_microbatches=2, megatron=False, step=None, change=None, dp_size=2):
    set_parallel_state(simulated_state(dp_size, 1))
    batch, leaves = micro_batch(args, step or Step(), indices)
    logits = packed(leaves, 1 if args.loss_type == "value_loss" else VOCAB)
    if change is not None:
        changed = change(batch, leaves, logits)
        logits = logits if changed is None else changed
    loss, normalizer, log = loss_module.loss_function(args, batch, num_microbatches, logits, megatron)
    return loss, normalizer, log, leaves, logits


@pytest.mark.parametrize("megatron", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_normalizer_is_an_integer_tensor(mode, megatron):
    """Rows 0, 3, 5 hold 2 + 2 + 0 active tokens."""
    _, normalizer, *_ = call(mode_namespace(mode), megatron=megatron)
    assert torch.is_tensor(normalizer) and normalizer.shape == () and not normalizer.is_floating_point()
    assert normalizer.item() == (4 if mode == "token_mean" else 1)


@pytest.mark.parametrize("mode", MODES)
def test_log_dict_has_a_normalizer_per_key_where_they_differ(mode):
    _, _, log, *_ = call(mode_namespace(mode))
    values = log["values"]
    assert log["keys"][:2] == ["loss", "pg_loss"] and not values.requires_grad
    if mode != "token_mean":
        assert "normalizers" not in log and values[0].item() == 3 and len(values) == len(log["keys"]) + 1
        return
    normalizers = dict(zip(log["keys"], log["normalizers"].tolist(), strict=True))
    assert {key for key, count in normalizers.items() if count == 4} == {"loss", "pg_loss", "ess_ratio"}
    assert {count for key, count in normalizers.items() if key not in ("loss", "pg_loss", "ess_ratio")} == {3}
    assert not log["normalizers"].is_floating_point() and len(values) == len(log["keys"])


@pytest.mark.parametrize("loss_type", ["sft_loss", "value_loss"])
def test_sft_and_value_metrics_follow_the_token_sum(loss_type):
    _, _, log, *_ = call(mode_namespace("token_mean", loss_type=loss_type))
    if "normalizers" in log:
        assert set(log["normalizers"].tolist()) == {4}
    else:
        assert log["values"][0].item() == 4
    for mode in ("sample_mean", "prompt_mean", "constant"):
        _, _, log, *_ = call(mode_namespace(mode, loss_type=loss_type))
        assert "normalizers" not in log and log["values"][0].item() == 3


def test_the_log_survives_a_backend_that_divides_the_loss_in_place():
    loss, _, log, *_ = call(mode_namespace("sample_mean"), megatron=True)
    before = log["values"].clone()
    with torch.no_grad():
        loss.div_(1000.0)
    assert torch.equal(log["values"], before) and before.abs().max() > 0


def test_rollouts_of_several_rows_count_once_in_the_log():
    def one_rollout(batch, *_):
        batch["rollout_counts"] = torch.tensor([1, 0, 1])
        batch["rollout_mask_sums"] = torch.tensor([4, 4, 0])

    _, _, log, *_ = call(mode_namespace("sample_mean"), change=one_rollout)
    assert log["values"][0].item() == 2


@pytest.mark.parametrize("megatron", [False, True])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("loss_type", ["policy_loss", "sft_loss", "value_loss"])
def test_an_empty_micro_batch_gives_zero_and_reaches_the_logits(loss_type, mode, megatron):
    loss, normalizer, log, _, logits = call(mode_namespace(mode, loss_type=loss_type), indices=(), megatron=megatron)
    loss.backward()
    assert loss.item() == 0.0 and torch.count_nonzero(logits.grad) == 0
    assert normalizer.item() == (0 if mode == "token_mean" else 1)
    counts = log.get("normalizers", log["values"][:1])
    assert set(counts.tolist()) == {0} and torch.count_nonzero(log["values"]) == 0
    assert log["keys"] == call(mode_namespace(mode, loss_type=loss_type))[2]["keys"], "aggregation needs equal keys"


@pytest.mark.parametrize("mode", MODES)
def test_an_empty_micro_batch_has_the_keys_of_a_full_one_with_every_option(mode):
    auxiliary = {} if mode == "token_mean" else {"entropy_coef": 0.1, "use_kl_loss": True, "kl_loss_coef": 0.1}
    args = mode_namespace(mode, **TIS, **auxiliary)
    assert call(args, indices=())[2]["keys"] == call(args)[2]["keys"]


def test_a_token_mean_step_without_active_token_is_refused():
    masked = Step([oracle.remask(row, [0] * row.response_length) for row in ROWS])
    with pytest.raises(ValueError, match="at least one active token"):
        call(mode_namespace("token_mean"), step=masked)


@pytest.mark.parametrize("backend", harness.BACKENDS)
@pytest.mark.parametrize("mode", ["sample_mean", "prompt_mean", "constant"])
def test_a_step_without_active_token_is_zero_in_the_other_modes(mode, backend):
    rows = [oracle.remask(row, [0] * row.response_length) for row in VALUES]
    outcome = harness.Engine(mode_namespace(mode, **batch_sizes(rows)), rows, backend).run([[[0, 1]], [[2], [3]]])
    assert outcome.value == 0.0 and {x for row in outcome.gradient for x in row} == {0.0}
    assert all(value == 0.0 for value in outcome.metrics.values())


def test_unknown_loss_type():
    with pytest.raises(ValueError, match="loss type"):
        loss_module.get_loss_function(mode_namespace("sample_mean", loss_type="dpo_loss"))


def test_a_custom_loss_gets_the_seam_arguments():
    args = mode_namespace("token_mean", loss_type="custom_loss", custom_loss_function_path=f"{HERE}.squares")
    step = Step()
    outcome = run(args, step, CUT)
    total = sum(
        x * x * bit
        for i, row in enumerate(ROWS)
        for x, bit in zip(step.column("advantages", i), row.mask, strict=True)
    )
    assert outcome[2] == {"square": pytest.approx(total / oracle.num_tokens(ROWS), rel=1e-5)}
    assert outcome[0] == pytest.approx(total / oracle.num_tokens(ROWS), rel=1e-5)
    assert loss_module.get_loss_function(args) is squares


def squares(args, batch, logits, sum_of_sample_mean):
    flat = torch.cat(batch["advantages"]) if batch["advantages"] else torch.zeros(0)
    loss = sum_of_sample_mean(flat**2) + 0 * logits.sum()
    return loss, {"square": loss.detach().clone()}


# ---- which reducer each term gets ---------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_auxiliary_metrics_keep_the_sample_mean_whatever_the_mode(mode):
    """Equal in all modes, while pg_loss is not."""
    options = {"use_kl_loss": True, "kl_loss_coef": 0.0, "kl_loss_type": "k2"}
    metrics = run(mode_namespace(mode, 4.0 if mode == "constant" else None, **options), Step(), CUT)[2]
    sample = run(mode_namespace("sample_mean", **options), Step(), CUT)[2]
    for key in ("pg_clipfrac", "ppo_kl", "entropy_loss", "kl_loss", "train_rollout_kl"):
        assert metrics[key] == pytest.approx(sample[key], rel=1e-6) and metrics[key] != 0, key
    assert (abs(metrics["pg_loss"] - sample["pg_loss"]) > 1e-3) == (mode != "sample_mean")


@pytest.mark.parametrize("mode", ["prompt_mean", "constant"])
def test_auxiliary_terms_enter_the_loss_by_their_sample_mean(mode):
    divisor = 4.0 if mode == "constant" else None
    options = {"use_kl_loss": True, "kl_loss_coef": 0.3, "kl_loss_type": "k3", "entropy_coef": 0.05}
    value, _, metrics = run(mode_namespace(mode, divisor, **options), Step(), CUT)
    sample = run(mode_namespace("sample_mean", **options), Step(), CUT)[2]
    plain = run(mode_namespace(mode, divisor), Step(), CUT)[0]
    expected = plain - 0.05 * sample["entropy_loss"] + 0.3 * sample["kl_loss"]
    assert value == pytest.approx(expected, rel=1e-5) == metrics["loss"]
    assert metrics["pg_loss"] == pytest.approx(plain, rel=1e-5)


def drop_long_rows(args, *, pg_loss, train_log_probs, rollout_log_probs, loss_masks, response_lengths, **kwargs):
    """Reject every row of more than two tokens; the loss itself is left as it is."""
    masks = [mask * int(length <= 2) for mask, length in zip(loss_masks, response_lengths, strict=True)]
    return pg_loss, masks, {"rejected": torch.cat([m * 0.0 + (len(m) > 2) for m in loss_masks]) if masks else pg_loss}


@pytest.mark.parametrize("mode", MODES)
def test_rejection_changes_the_policy_term_and_not_the_mismatch_metrics(mode):
    """Rows 1, 3, 4 lose all tokens: pg loss is that of rows 0 and 2 alone. Two of the six rows are long and rejected
    with active tokens... in all: rows 1, 3, 4 have rejected = 1 on each active token, so its sample mean is 3/6."""
    options = {"use_tis": True, "custom_tis_function_path": f"{HERE}.drop_long_rows"}
    divisor = 4.0 if mode == "constant" else None
    value, gradient, metrics = run(mode_namespace(mode, divisor, **options), Step(), CUT)
    plain = run(mode_namespace(mode, divisor), Step(), CUT)
    assert metrics["rejected"] == pytest.approx(0.5)
    for key in ("train_rollout_logprob_abs_diff", "train_rollout_kl"):
        assert metrics[key] == pytest.approx(plain[2][key], rel=1e-6), "the original mask"
    for i in (1, 3, 4):
        assert torch.count_nonzero(gradient[i]) == 0, "a rejected token does not move the policy"
    for i in (0, 2):
        assert (gradient[i] - plain[1][i]).abs().max() < 1e-7 < gradient[i].abs().max()
    assert abs(value - plain[0]) > 1e-3


def test_mismatch_metrics_alone_leave_the_weight_out_of_a_custom_hook():
    """`--get-mismatch-metrics` reports the ratios (the hook decides what it does with the loss)."""
    metrics = run(mode_namespace("sample_mean", get_mismatch_metrics=True), Step(), CUT)[2]
    assert {"ois", "tis", "tis_clipfrac", "tis_abs"} <= metrics.keys()


@pytest.mark.parametrize("key", ["log_probs", "rollout_log_probs", "ref_log_probs", "advantages"])
def test_a_missing_column_is_named(key):
    args = mode_namespace("sample_mean", use_tis=True, use_kl_loss=True, kl_loss_coef=0.1)

    def drop(batch, *_):
        del batch[key]

    with pytest.raises(ValueError, match=key):
        call(args, change=drop)


# ---- masked positions ---------------------------------------------------------------------------------------------

EVERYTHING = {**TIS, "use_kl_loss": True, "kl_loss_coef": 0.2, "kl_loss_type": "k3", "entropy_coef": 0.01}
POISONED = {
    "policy": ("policy_loss", EVERYTHING),
    "low-var": ("policy_loss", {**EVERYTHING, "kl_loss_type": "low_var_kl", "use_unbiased_kl": True}),
    "gspo": ("policy_loss", {**EVERYTHING, "advantage_estimator": "gspo"}),
    "sft": ("sft_loss", {}),
    "value": ("value_loss", {}),
}


@pytest.mark.parametrize("poison", [NAN, INF, -INF])
@pytest.mark.parametrize("where", ["columns", "logits"])
@pytest.mark.parametrize("name", POISONED)
@pytest.mark.parametrize("mode", MODES)
def test_masked_positions_reach_neither_sum_nor_gradient(mode, name, where, poison):
    loss_type, options = POISONED[name]
    if mode == "token_mean":
        options = {k: v for k, v in options.items() if k not in ("entropy_coef", "kl_loss_coef")}
    args = mode_namespace(mode, loss_type=loss_type, **options)
    indices = (1, 3, 4, 5)

    def spoil(batch, leaves, logits):
        for position, i in enumerate(indices):
            off = torch.tensor(ROWS[i].mask) == 0
            for key in ("log_probs", "rollout_log_probs", "ref_log_probs", "advantages", "values", "returns"):
                if where == "columns":
                    batch[key][position][off] = poison
            if where == "logits":
                with torch.no_grad():
                    start = ROWS[i].prompt_length - 1
                    leaves[i][start : start + ROWS[i].response_length][off] = poison
        return packed(leaves, logits.size(-1))

    clean_loss, _, clean_log, clean_leaves, _ = call(args, indices)
    loss, _, log, leaves, _ = call(args, indices, change=spoil)
    clean_loss.backward()
    loss.backward()
    assert math.isfinite(loss.item()) and loss.item() == clean_loss.item()
    assert torch.equal(log["values"], clean_log["values"])
    for i in indices:
        assert torch.equal(leaves[i].grad, clean_leaves[i].grad)


@pytest.mark.parametrize("key", ["log_probs", "advantages"])
def test_nan_at_an_active_token_is_not_turned_into_a_number(key):
    def spoil(batch, *_):
        batch[key][0][0] = NAN

    assert math.isnan(call(mode_namespace("sample_mean"), change=spoil)[0].item())


@pytest.mark.parametrize("mode", MODES)
def test_bfloat16_logits_are_reduced_in_float32(mode):
    def lower(batch, leaves, logits):
        return logits.to(torch.bfloat16)

    loss, _, log, *_ = call(mode_namespace(mode), change=lower)
    assert loss.dtype == log["values"].dtype == torch.float32


@pytest.mark.parametrize("chunk", [1, 3, 1000])
def test_log_probs_in_chunks_are_the_same(chunk):
    whole = run(mode_namespace("prompt_mean"), Step(), CUT)
    parts = run(mode_namespace("prompt_mean", log_probs_chunk_size=chunk), Step(), CUT)
    assert parts[0] == whole[0] and parts[2] == whole[2]


def test_bshd_gives_the_loss_of_thd():
    """Rows padded to a common length, logits `[B, S, V]`."""
    args = mode_namespace("prompt_mean", qkv_format="bshd")

    def pad(batch, leaves, logits):
        longest = max(batch["total_lengths"]) + 2
        batch["max_seq_lens"] = [longest] * len(leaves)
        pieces = [torch.cat([x, torch.full((longest - len(x), VOCAB), NAN)]) for x in leaves.values()]
        return torch.stack(pieces)

    padded = call(args, (0, 1, 4), change=pad)
    plain = call(mode_namespace("prompt_mean"), (0, 1, 4))
    assert padded[0].item() == pytest.approx(plain[0].item(), rel=1e-6)
    assert padded[2]["values"].tolist() == pytest.approx(plain[2]["values"].tolist(), rel=1e-6)


# ---- hosts that do not know the step ------------------------------------------------------------------------------


@pytest.mark.parametrize("megatron", [False, True])
@pytest.mark.parametrize("mode", ["sample_mean", "constant"])
def test_without_step_counts_the_global_batch_size_is_the_number_of_samples(mode, megatron):
    """The host's legacy call: N is an argument. Twice the batch size halves the loss."""

    def forget(batch, *_):
        del batch["step_counts"]

    known = call(mode_namespace(mode), megatron=megatron)[0]  # N = 6
    unknown = call(mode_namespace(mode, global_batch_size=12), megatron=megatron, change=forget)[0]
    assert unknown.item() == pytest.approx(known.item() / 2, rel=1e-6) and known.item() != 0


def test_without_step_counts_a_token_sum_is_left_for_the_caller_to_scale():
    def forget(batch, *_):
        del batch["step_counts"]

    known = call(mode_namespace("token_mean"))[0]
    unknown = call(mode_namespace("token_mean"), change=forget)[0]
    scaled = loss_module.scale_data_parallel_token_mean_loss(
        unknown, global_num_tokens=oracle.num_tokens(ROWS), data_parallel_size=2
    )
    assert scaled.item() == pytest.approx(known.item(), rel=1e-6)


def test_a_legacy_namespace_trains_as_before():
    """No loss_aggregation at all: calculate_per_token_loss chooses between sample and token mean."""
    for per_token, mode in ((False, "sample_mean"), (True, "token_mean")):
        args = mode_namespace(mode)
        del args.loss_aggregation, args.loss_aggregation_divisor, args.custom_pg_loss_reducer_function_path
        args.calculate_per_token_loss = per_token
        assert run(args, Step(), CUT)[0] == run(mode_namespace(mode), Step(), CUT)[0]
