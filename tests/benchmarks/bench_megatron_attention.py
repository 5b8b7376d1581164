"""Memory and time of the Megatron backend's attention on CPUs. `python -m tests.benchmarks.bench_megatron_attention`.

One forward and backward pass of the default model over a packed micro-batch of 2, 8 and 32 rows of 1,600 tokens, each
in a process of its own, whose largest resident size is read from the operating system. The competitor, restated here,
attends once over the micro-batch under a mask of tokens x tokens, which it makes 16 times as large with 4 times the
rows; it is left out where its mask alone would exceed `--mask-limit`. Needs the extra `megatron`.
"""

from __future__ import annotations

import resource
import time
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F

from miles.backends.training_utils.backend import open_backend
from miles.backends.training_utils.data import DataIterator, get_batch
from miles.testing.worlds import run_world
from miles.utils.arguments import parse_args
from tests.benchmarks.common import parser, positive, report

MASK_BYTES = 1 + 4
"""For each pair of tokens: the mask, and the floats that the attention of torch turns it into."""
VOCABULARY = 32


def dense(self: Any, query: Any, key: Any, value: Any, *unused: Any, packed_seq_params: Any, **kwargs: Any) -> Any:
    """Attend to all tokens of the micro-batch at once, those of other rows masked out."""
    edges = packed_seq_params.cu_seqlens_q.tolist()
    row = torch.cat([torch.full((end - start,), index) for index, (start, end) in enumerate(pairwise(edges))])
    visible = (row[:, None] == row).tril_()
    heads_first = (tensor.reshape(-1, *tensor.shape[-2:]).transpose(0, 1)[None] for tensor in (query, key, value))
    return F.scaled_dot_product_attention(*heads_first, attn_mask=visible)[0].transpose(0, 1).flatten(1)


def one_pass(num_rows: int, row_length: int, threads: int, *, is_dense: bool) -> dict[str, float]:
    """Return the growth of this process's largest resident size in GiB, and the seconds of the pass."""
    args = parse_args(["--train-backend", "megatron", "--max-position-embeddings", str(row_length)])
    with open_backend(args) as (world, make_actor):
        from miles.backends.megatron_utils.core_attention import PackedCoreAttention
        from miles.backends.megatron_utils.model import forward_chunk

        if is_dense:
            PackedCoreAttention.forward = dense
        [chunk] = make_actor(args, world, vocab_size=VOCABULARY, pad_token_id=0).chunks
        torch.set_num_threads(threads)
        rows = {"tokens": [torch.arange(row_length) % VOCABULARY for _ in range(num_rows)]}
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        start = time.perf_counter()
        batch = get_batch(DataIterator(rows, [list(range(num_rows))], [None]))
        forward_chunk(chunk, batch, vocab_size=VOCABULARY).logsumexp(-1).sum().backward()
        seconds = time.perf_counter() - start
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return {"peak GiB": grown / 2**20, "seconds": seconds}


def measure(num_rows: list[int], row_length: int, threads: int, mask_limit: float) -> list[dict[str, Any]]:
    """Return a table row for each competitor and number of rows."""
    table = []
    for is_dense in (False, True):
        for count in num_rows:
            mask = MASK_BYTES * (count * row_length) ** 2 / 2**30 if is_dense else 0.0
            figures: dict[str, Any] = {"peak GiB": f"more than {mask:.0f}", "seconds": "not run"}
            if mask <= mask_limit:
                run = partial(one_pass, count, row_length, threads, is_dense=is_dense)
                [figures] = run_world(run, 1, time_limit=600)
            name = "one dense mask" if is_dense else "ours, row by row"
            table.append({"competitor": name, "rows": count, "tokens": count * row_length, **figures})
    return table


def main() -> None:
    """Print the table."""
    options = parser(__doc__)
    options.add_argument("--rows", type=positive, nargs="+", default=[2, 8, 32], help="rows (default: 2 8 32)")
    options.add_argument("--row-length", type=positive, default=1600, help="tokens of each row (default: 1600)")
    help_text = "GiB of a dense mask up to which it is run (default: 6)"
    options.add_argument("--mask-limit", type=positive, default=6, help=help_text)
    args = options.parse_args()
    table = measure(args.rows, args.row_length, args.threads, args.mask_limit)
    torch.set_num_threads(args.threads)
    report("megatron_attention", {"forward and backward pass of a micro-batch": table}, args.json)


if __name__ == "__main__":
    main()
