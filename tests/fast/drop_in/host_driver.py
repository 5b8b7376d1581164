"""Run by tests as a process of a small host: trains what a request asks for, with the host's own functions.

    python host_driver.py HOST DP CP FOLDER RANK

HOST is "one" or "two", and the host's package has to be the first on the path. FOLDER has `request.json`, a list of
cases, each with the `argv` of the host, its `samples` and the `backend`; it gets `result.json`, of hexadecimal floats.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist

VOCABULARY = 7


def per_hundred(total_lengths, response_lengths, loss_masks, calculate_per_token_loss):
    """Make a reducer of a person's own: 1/100 for each token; only for responses that are not truncated."""
    mask = torch.cat(loss_masks)
    return lambda values: (values * mask).sum() / 100


class Recorder(torch.optim.SGD):
    """An optimizer that keeps each step's gradient and changes nothing."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.0)
        self.gradients = []

    def step(self, closure=None):
        (parameter,) = self.param_groups[0]["params"]
        self.gradients.append(hexadecimal(parameter.grad))


def model():
    """Return the table of next-token logits: the row of a token holds the logits of its successors."""
    table = torch.nn.Embedding(VOCABULARY, VOCABULARY)
    with torch.no_grad():
        table.weight.copy_(torch.arange(VOCABULARY**2).reshape(VOCABULARY, VOCABULARY).mul(0.37).sin())
    return table


def hexadecimal(value):
    """Return numbers in a form that loses nothing."""
    if isinstance(value, torch.Tensor):
        value = value.tolist()
    if isinstance(value, dict):
        return {key: hexadecimal(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [hexadecimal(item) for item in value]
    return float(value).hex()


def groups(dp, cp):
    """Return this process's data-parallel, context-parallel and joint groups."""
    rows = [[d * cp + c for c in range(cp)] for d in range(dp)]
    columns = [[d * cp + c for d in range(dp)] for c in range(cp)]
    mine = {}
    for name, sets in (("cp", rows), ("dp", columns), ("dp_cp", [range(dp * cp)])):
        for ranks in sets:
            group = dist.new_group(list(ranks))
            if dist.get_rank() in ranks:
                mine[name] = group
    return mine


class One:
    """The host in the layout of Miles."""

    def __init__(self, dp, cp):
        from miles.backends.training_utils.parallel import GroupInfo, ParallelState, set_parallel_state

        self.dp_size, self.dp_rank = dp, dist.get_rank() // cp
        mine = groups(dp, cp)
        info = {
            "intra_dp": GroupInfo(self.dp_rank, dp, mine["dp"]),
            "cp": GroupInfo(dist.get_rank() % cp, cp, mine["cp"]),
            "intra_dp_cp": GroupInfo(dist.get_rank(), dp * cp, mine["dp_cp"]),
        }
        set_parallel_state(ParallelState(**info))

    def parse(self, argv):
        return importlib.import_module("miles.utils.arguments").parse_args(argv)

    def split(self, args, samples):
        from miles.ray.rollout import train_data_conversion as conversion
        from miles.utils.types import Sample

        samples = [Sample(**sample) for sample in samples]
        data = conversion.convert_samples_to_train_data(args, samples, {}, None, None)
        return conversion.split_train_data_by_dp(args, data, self.dp_size)

    def actor(self, backend, *arguments):
        folder = {"megatron": "megatron_utils", "fsdp": "experimental.fsdp_utils"}[backend]
        module = importlib.import_module(f"miles.backends.{folder}.actor")
        return getattr(module, {"megatron": "MegatronActor", "fsdp": "FSDPActor"}[backend])(*arguments)


class Two:
    """The host in the layout of slime."""

    def __init__(self, dp, cp):
        from slime.backends.megatron_utils import mpu

        self.dp_size, self.cp_size, self.dp_rank = dp, cp, dist.get_rank() // cp
        mpu.initialize(dp=(self.dp_rank, dp), cp=(dist.get_rank() % cp, cp), groups=groups(dp, cp))

    def parse(self, argv):
        return importlib.import_module("slime.utils.arguments").parse_args(argv)

    def split(self, args, samples):
        from slime.ray.rollout import RolloutManager
        from slime.utils.types import Sample

        manager = RolloutManager(args)
        manager.set_train_parallel_config({"dp_size": self.dp_size, "cp_size": self.cp_size})
        data = manager._convert_samples_to_train_data([Sample(**sample) for sample in samples])
        return manager._split_train_data_by_dp(data)

    def actor(self, backend, *arguments):
        return importlib.import_module("slime.backends.megatron_utils.actor").MegatronActor(*arguments)


def run(host, case):
    """Return what one case gives: the gradient and the log of each step, and the log of the rollout."""
    case = SimpleNamespace(**{"samples": None, "backend": "megatron", **case})
    try:
        args = host.parse(case.argv)
        if case.samples is None:
            return {"args": {key: value for key, value in vars(args).items() if value is not None}}
        parts = host.split(args, case.samples)
        table = model()
        optimizer = Recorder(table.parameters())
        rollout_log, steps = host.actor(case.backend, args, table, optimizer).train(0, parts[host.dp_rank])
    except ValueError as error:
        return {"error": str(error)}
    return {"gradients": optimizer.gradients, "steps": hexadecimal(steps), "rollout": hexadecimal(rollout_log)}


def leave(store, size):
    """End the process once all have come here; gloo's own end may abort a process whose peer is gone."""
    sys.stdout.flush()
    store.add("done", 1)
    while store.add("done", 0) < size:
        time.sleep(0.01)
    os._exit(0)


def main():
    name, dp, cp, world, rank = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]), int(sys.argv[5])
    torch.set_num_threads(1)
    store = dist.FileStore(str(world / "store"), dp * cp)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=dp * cp)
    host = {"one": One, "two": Two}[name](dp, cp)
    results = [run(host, case) for case in json.loads((world / "request.json").read_text())]
    if rank == 0:
        (world / "result.json").write_text(json.dumps(results))
    leave(store, dp * cp)


if __name__ == "__main__":
    main()
