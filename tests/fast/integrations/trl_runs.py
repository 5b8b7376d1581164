"""Runs of TRL's trainer on a tiny random model, with what an independent float64 oracle needs to redo each step."""

import functools
import os
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="TRL is not installed: pip install 'miles[trl]'")
datasets = pytest.importorskip("datasets", reason="TRL is not installed: pip install 'miles[trl]'")
tokenizers = pytest.importorskip("tokenizers", reason="TRL is not installed: pip install 'miles[trl]'")
from miles.integrations.trl import GRPOConfig, GRPOTrainer  # noqa: E402
from tests.fast.backends.experimental.fsdp_utils.ranks import run_ranks  # noqa: E402

PROMPTS = ["ab", "cdef", "f", "ba", "ed", "cc", "fade", "bead"]


def tokenizer():
    """One token for each letter, and few of them, so that a random model ends its answers at different lengths."""
    vocabulary = {text: place for place, text in enumerate(["<pad>", "<eos>", *"abcdef"])}
    letters = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="a"))
    letters.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=letters, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )


def save_model(folder):
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=8,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        initializer_range=0.3,
        pad_token_id=0,
        eos_token_id=1,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


def reward(completion_ids, prompts, **columns):
    return [
        float(sum(ids) % 5 + len(prompt) * len(ids) / 4) for ids, prompt in zip(completion_ids, prompts, strict=True)
    ]


def config(folder, **options):
    return GRPOConfig(
        **{
            "output_dir": str(folder / "run"),
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 4,
            "num_generations": 4,
            "max_completion_length": 7,
            "learning_rate": 0.02,
            "max_grad_norm": 0.0,
            "max_steps": 2,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": [],
            "use_cpu": True,
            "bf16": False,  # by default autocast is on
            "disable_tqdm": True,
            **options,
        }
    )


class Recorder(transformers.TrainerCallback):
    """Keeps the gradients of each step and what is logged."""

    def __init__(self):
        self.gradients, self.logs = [], []

    def on_pre_optimizer_step(self, args, state, control, model=None, **others):
        model = getattr(model, "module", model)
        self.gradients.append({name: weight.grad.clone() for name, weight in model.named_parameters()})

    def on_log(self, args, state, control, logs=None, **others):
        self.logs.append(logs)


def recording(base, change=lambda inputs: inputs):
    """Return a trainer class that keeps the inputs and weights of each step, before the aggregation sees them."""

    class Recording(base):
        def _generate_and_score_completions(self, inputs):
            return change(super()._generate_and_score_completions(inputs))

        def _weighed(self, inputs, *args, **kwargs):
            self.steps.append(
                {
                    "inputs": [dict(batch) for batch in inputs],
                    "weights": {name: value.clone() for name, value in self.model.state_dict().items()},
                    "training": self.model.training,
                }
            )
            return super()._weighed(inputs, *args, **kwargs)

    return Recording


def train(folder, change, set_up, options, resume):
    """Train on this rank, and keep what the oracle needs in a file."""
    if "WORLD_SIZE" not in os.environ:
        del os.environ["LOCAL_RANK"]  # a launcher's, which Accelerate would take for one of several ranks
    transformers.utils.logging.set_verbosity_error()
    recorder = Recorder()
    trainer_class = recording(GRPOTrainer, change)
    trainer_class.steps = []
    trainer = trainer_class(
        model=str(folder / "model"),
        reward_funcs=reward,
        args=config(folder, **options),
        train_dataset=datasets.Dataset.from_dict({"prompt": PROMPTS}),
        eval_dataset=datasets.Dataset.from_dict({"prompt": PROMPTS[:4]}),
        processing_class=tokenizer(),
        callbacks=[recorder],
    )
    set_up(trainer)
    trainer.train(resume_from_checkpoint=resume)
    record = {"steps": trainer.steps, "gradients": recorder.gradients, "logs": recorder.logs, "beta": trainer.beta}
    torch.save(record, folder / f"record-{trainer.accelerator.process_index}.pt")
    trainer.accelerator.end_training()


def run(folder: Path, ranks=1, *, change=lambda inputs: inputs, set_up=lambda trainer: None, resume=None, **options):
    """Return each rank's record of a run."""
    if not (folder / "model").exists():
        run_ranks(functools.partial(save_model, folder / "model"), 1)
    run_ranks(functools.partial(train, folder, change, set_up, options, resume), ranks, time_limit=150)
    return [torch.load(folder / f"record-{rank}.pt", weights_only=False) for rank in range(ranks)]
