"""Small rollouts and arguments for tests of the FSDP2 back end."""

import random
from argparse import Namespace

from miles.utils.arguments import parse_args
from miles.utils.types import Sample

VOCAB_SIZE = 11
PAD_TOKEN_ID = 0


def make_args(*options: str) -> Namespace:
    """Return resolved arguments of a tiny run: 2 steps of 4 prompts x 2 samples each in a rollout."""
    return parse_args(
        [
            *("--hidden-size", "8", "--num-layers", "1", "--num-attention-heads", "2"),
            *("--max-position-embeddings", "24", "--num-rollout", "2", "--rollout-batch-size", "8"),
            *("--n-samples-per-prompt", "2", "--num-steps-per-rollout", "2", "--micro-batch-size", "3"),
            *("--lr", "0.02", "--clip-grad", "0.5", "--weight-decay", "0.1", "--seed", "3"),
            # Adam divides by the gradient's size: where that is rounding noise, so would be the whole update.
            *("--adam-eps", "1e-3"),
            *options,
        ]
    )


def mode_options(mode: str) -> list[str]:
    """Return the options that choose an aggregation mode."""
    return ["--loss-aggregation", mode, *(["--loss-aggregation-divisor", "7"] if mode == "constant" else [])]


def make_samples(rollout_id: int, *, num_prompts: int = 8, samples_per_prompt: int = 2) -> list[Sample]:
    """Return samples of uneven lengths with holes in their masks; the second is masked altogether."""
    draw = random.Random(rollout_id)
    samples = []
    for index in range(num_prompts * samples_per_prompt):
        length = draw.randint(1, 12)
        mask = [draw.choice([0, 1, 1]) for _ in range(length)]
        samples.append(
            Sample(
                group_index=index // samples_per_prompt,
                index=index,
                tokens=[draw.randrange(1, VOCAB_SIZE) for _ in range(draw.randint(1, 5) + length)],
                response_length=length,
                reward=draw.choice([0.0, 0.25, 1.0]),
                loss_mask=[0] * length if index == 1 else mask,
                rollout_log_probs=[draw.uniform(-3.0, -2.0) for _ in range(length)],
                status=Sample.Status.COMPLETED,
            )
        )
    return samples
