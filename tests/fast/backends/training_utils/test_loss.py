"""`loss_function`: one test for each rule that a caller relies on."""

import pytest
import torch

from miles.backends.training_utils import loss as loss_module
from tests.fast import oracle
from tests.fast.backends.training_utils import harness
from tests.fast.backends.training_utils.layout import batch_sizes, mode_namespace
from tests.fast.backends.training_utils.loss.calls import call
from tests.fast.backends.training_utils.loss.inputs import CUT, ROWS, Step
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
