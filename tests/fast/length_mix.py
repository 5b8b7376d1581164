"""Samples as long as real answers: the lengths of 1,024 of them, four to a prompt, repeated and stretched."""

import json
import random
from pathlib import Path

from miles.utils.types import Sample

SAMPLES_PER_PROMPT = 4
LARGEST_TOKEN = 50_000


def length_mix(num_samples: int, *, longest: int | None = None) -> list[tuple[int, int]]:
    """(tokens, response tokens) of each sample; `longest` stretches the longest, and all others alike."""
    lengths = json.loads((Path(__file__).parent / "data" / "length_mix.json").read_text())["lengths"]
    factor = 1 if longest is None else longest / max(total for total, _ in lengths)
    stretched = [(max(round(total * factor), 2), max(round(response * factor), 1)) for total, response in lengths]
    return [stretched[index % len(lengths)] for index in range(num_samples)]


def mixed_samples(num_samples: int, *, longest: int | None = None) -> list[Sample]:
    """Samples with masks and log-probs. Their token lists are their own, while the numbers in them are shared."""
    draw = random.Random(0)
    lengths = length_mix(num_samples, longest=longest)
    size = 4 * max(total for total, _ in lengths)
    tokens = [draw.randrange(LARGEST_TOKEN) for _ in range(size)]
    mask = [int(draw.random() < 0.95) for _ in range(size)]
    log_probs = [-draw.random() for _ in range(size)]
    samples = []
    for index, (total, response) in enumerate(lengths):
        start = draw.randrange(size - total)
        samples.append(
            Sample(
                group_index=index // SAMPLES_PER_PROMPT,
                index=index,
                tokens=tokens[start : start + total],
                response_length=response,
                reward=float(index % 3),
                loss_mask=mask[start : start + response],
                rollout_log_probs=log_probs[start : start + response],
                status=Sample.Status.COMPLETED,
            )
        )
    return samples
