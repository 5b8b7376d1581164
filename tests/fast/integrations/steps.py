"""An optimizer step of rows with prompts, and its value and gradient by the definitions, in fractions."""

from dataclasses import dataclass
from fractions import Fraction

DIVISOR = 8.0


@dataclass(frozen=True)
class Row:
    prompt: str
    mask: tuple[int, ...]
    losses: tuple[float, ...]
    weights: tuple[float, ...] = ()
    sample: str = ""


# Short rows with high losses, long ones with low; a row without an active token; groups of 3, 1, 2 and 1 rows.
ROWS = [
    Row("a", (1, 1), (7.5, -4.0), (0.5, 2.0), "s0"),
    Row("b", (0, 0, 0), (9.0, 9.0, 9.0), (1.0, 1.0, 1.0), "s1"),
    Row("a", (1, 0, 1, 1, 1), (0.25, 99.0, 0.5, -0.125, 1.0), (1.0, 1.0, 0.0, 0.25, 4.0), "s2"),
    Row("c", (1,), (16.0,), (0.75,), "s3"),
    Row("a", (0, 1, 1), (50.0, 2.0, 3.0), (1.0, 1.0, 1.5), "s2"),
    Row("c", (1, 1, 1, 0, 0, 1), (0.5, 0.25, -1.0, 3.0, 3.0, 0.125), (2.0, 0.5, 0.5, 1.0, 1.0, 1.0), "s4"),
    Row("d", (1, 1, 1), (1.0, 2.0, 4.0), (1.0, 0.5, 0.25), "s5"),
]


def token_weights(mode, rows=ROWS, *, weighted=False, samples=False):
    """Each token's weight in the step's value, one sentence for each mode, as fractions."""
    kept = [
        [
            Fraction(bit) * Fraction(weight)
            for bit, weight in zip(row.mask, row.weights if weighted else [1] * len(row.mask), strict=True)
        ]
        for row in rows
    ]
    names = [row.sample if samples else number for number, row in enumerate(rows)]
    of_sample = {name: sum(sum(k) for k, other in zip(kept, names, strict=True) if other == name) for name in names}
    of_prompt = {
        row.prompt: sum(sum(k) for k, other in zip(kept, rows, strict=True) if other.prompt == row.prompt)
        for row in rows
    }
    total, num_samples, num_prompts = sum(of_sample.values()), len(of_sample), len(of_prompt)
    share = {
        "sample_mean": lambda row, name: Fraction(1, num_samples) / (of_sample[name] or 1),
        "prompt_mean": lambda row, name: Fraction(1, num_prompts) / (of_prompt[row.prompt] or 1),
        "token_mean": lambda row, name: 1 / total,
        "constant": lambda row, name: 1 / (Fraction(DIVISOR) * num_samples),
    }[mode]
    return [[k * share(row, name) for k in tokens] for tokens, row, name in zip(kept, rows, names, strict=True)]


def value_of(weights, rows=ROWS):
    return sum(
        w * Fraction(x)
        for ws, row in zip(weights, rows, strict=True)
        for w, x in zip(ws, row.losses, strict=True)
        if w
    )
