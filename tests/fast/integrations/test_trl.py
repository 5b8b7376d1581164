"""TRL's trainer: the gradient and the logged loss of real steps are those of a float64 oracle over unsplit rows."""

import pytest

pytest.importorskip("trl", reason="TRL is not installed: pip install 'miles[trl]'")

import torch

from miles.backends.training_utils.loss_aggregation import MODES
from tests.fast.integrations import trl_oracle
from tests.fast.integrations.trl_runs import run

RELATIVE = 2e-6
"""Of the norm of all gradients; a float32 model against a float64 one."""


def check_steps(ranks, folder, mode, **options):
    """Compare every training step; return how many tokens each step had, of each row."""
    training = [place for place, step in enumerate(ranks[0]["steps"]) if step["training"]]
    logged = [log["loss"] for log in ranks[0]["logs"] if "loss" in log]
    assert len(training) == len(ranks[0]["gradients"]) == len(logged)
    for number, place in enumerate(training):
        value, gradients = trl_oracle.expected(ranks, place, folder / "model", mode, **options)
        expected = torch.cat([gradients[name].flatten() for name in gradients])
        for rank in ranks:
            found = torch.cat([rank["gradients"][number][name].flatten() for name in gradients]).double()
            error = ((found - expected).norm() / expected.norm()).item()
            assert error < RELATIVE, f"step {number}: {error}"
        assert logged[number] == pytest.approx(value, rel=1e-5, abs=2e-6)


def options_of(mode):
    return {"loss_aggregation": mode, "loss_aggregation_divisor": 16.0 if mode == "constant" else None}


@pytest.mark.parametrize("accumulation", [1, 2, 4])
@pytest.mark.parametrize("mode", MODES)
def test_accumulation(tmp_path, mode, accumulation):
    ranks = run(
        tmp_path,
        per_device_train_batch_size=8 // accumulation,
        gradient_accumulation_steps=accumulation,
        **options_of(mode),
    )
    check_steps(ranks, tmp_path, mode)


@pytest.mark.parametrize("mode", ["prompt_mean", "token_mean"])
def test_two_ranks_and_two_passes_over_the_same_answers(tmp_path, mode):
    """The second pass is off-policy, so that clipping and the ratio matter; micro-batches and ranks split groups."""
    options = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "num_iterations": 2}
    ranks = run(tmp_path, 2, **options, max_steps=4, **options_of(mode))
    assert "old_per_token_logps" in ranks[0]["steps"][1]["inputs"][0]
    check_steps(ranks, tmp_path, mode)


def test_groups_that_steps_split(tmp_path):
    """Three prompts of four answers for steps of three micro-batches of two: the groups in a step are ragged."""
    options = {"steps_per_generation": 6, "gradient_accumulation_steps": 3, "prompt_groups": "ragged"}
    check_steps(run(tmp_path, max_steps=4, **options, **options_of("prompt_mean")), tmp_path, "prompt_mean")


@pytest.mark.parametrize("aux", ["sample_mean", "match"])
def test_the_kl_term(tmp_path, aux):
    options = {"beta": 0.3, "num_iterations": 2, "max_steps": 4, "aux_loss_aggregation": aux}
    ranks = run(tmp_path, **options, **options_of("prompt_mean"))
    check_steps(ranks, tmp_path, "prompt_mean", aux=aux)
    assert ranks[0]["logs"][1]["kl"] > 0


def test_answers_that_are_masked_altogether(tmp_path):
    ranks = run(tmp_path, mask_truncated_completions=True, **options_of("prompt_mean"))
    kept = [
        bool(row.any()) for step in ranks[0]["steps"] for batch in step["inputs"] for row in batch["completion_mask"]
    ]
    assert any(kept) and not all(kept)
    check_steps(ranks, tmp_path, "prompt_mean")


def mask_tools(inputs):
    """Every third token is a tool's, as `_generate_and_score_completions` gives it where the model calls tools."""
    mask = torch.ones_like(inputs["completion_mask"])
    mask[:, ::3] = 0
    return {**inputs, "tool_mask": mask}


@pytest.mark.parametrize("mode", ["prompt_mean", "token_mean"])
def test_tokens_of_tools(tmp_path, mode):
    check_steps(run(tmp_path, change=mask_tools, **options_of(mode)), tmp_path, mode)


def correct_importance(inputs):
    """Ratios as vLLM's correction gives them."""
    ratios = torch.linspace(0.0, 2.0, inputs["completion_mask"].numel()).view(inputs["completion_mask"].shape)
    return {**inputs, "importance_sampling_ratio": ratios}


def pretend_vllm(trainer):
    trainer.vllm_importance_sampling_correction = True
    prepare = trainer._weighed

    def weighed(*args, **kwargs):
        trainer.use_vllm = True  # from here to the next generation, which is the model's own
        return prepare(*args, **kwargs)

    generate = trainer._generate_and_score_completions

    def generated(inputs):
        trainer.use_vllm = False
        return generate(inputs)

    trainer._weighed, trainer._generate_and_score_completions = weighed, generated


def test_the_importance_correction_of_vllm(tmp_path):
    ranks = run(tmp_path, change=correct_importance, set_up=pretend_vllm, **options_of("prompt_mean"))
    check_steps(ranks, tmp_path, "prompt_mean")


def test_evaluation(tmp_path):
    """Each batch over all ranks is a step; the Trainer then takes the mean of the batches."""
    options = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4, "max_steps": 2}
    ranks = run(tmp_path, **options, **options_of("prompt_mean"))
    check_steps(ranks, tmp_path, "prompt_mean")
    evaluations = [log["eval_loss"] for log in ranks[0]["logs"] if "eval_loss" in log]
    places = [place for place, step in enumerate(ranks[0]["steps"]) if not step["training"]]
    size = len(places) // len(evaluations)
    for number, logged in enumerate(evaluations):
        own = places[number * size : (number + 1) * size]
        values = [trl_oracle.expected(ranks, place, tmp_path / "model", "prompt_mean")[0] for place in own]
        assert logged == pytest.approx(sum(values) / len(values), rel=1e-5, abs=2e-6)


def test_a_run_that_is_resumed(tmp_path):
    options = {"max_steps": 3, "save_strategy": "steps", "save_steps": 1, **options_of("prompt_mean")}
    whole = run(tmp_path, **options)
    resumed = run(tmp_path, resume=str(tmp_path / "run" / "checkpoint-2"), **options)
    check_steps(resumed, tmp_path, "prompt_mean")
    for name, gradient in whole[0]["gradients"][2].items():
        assert torch.allclose(gradient, resumed[0]["gradients"][0][name], rtol=1e-4, atol=1e-7)


REFUSED = {
    "no such mode": ({"loss_aggregation": "mean"}, "Unknown --loss-aggregation mode 'mean'"),
    "no divisor": ({"loss_aggregation": "constant"}, "constant needs --loss-aggregation-divisor"),
    "a divisor for nothing": ({"loss_aggregation_divisor": 8.0}, "belongs to --loss-aggregation constant"),
    "other groups": ({"prompt_groups": "whole"}, "--prompt-groups must be one of complete, ragged; got 'whole'"),
    "a loss that TRL divides": ({"loss_type": "sapo"}, "loss_type='sapo' is divided by lengths inside TRL"),
    "an entropy bonus": ({"entropy_coef": 0.1}, "the entropy bonus .* is a mean over each micro-batch"),
    "split groups": (
        {"loss_aggregation": "prompt_mean", "steps_per_generation": 6, "gradient_accumulation_steps": 4},
        "gradient_accumulation_steps=4 is no multiple of steps_per_generation=6.*prompt_groups='ragged'",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_exact_is_refused_at_construction(tmp_path, name):
    options, message = REFUSED[name]
    with pytest.raises(pytest.fail.Exception, match=f"(?s)UserError: .*{message}"):
        run(tmp_path, **options)
    assert not list(tmp_path.glob("record-*"))
