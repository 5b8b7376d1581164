"""The host's own functions under one set of names: arguments, conversion, split, shard to tensors, one training step.

What differs between the layouts is found by looking at the host (a module that exists, a parameter that a function
has), so that the same checks run on a checkout that has moved on.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from argparse import Namespace
from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import machine
import torch

PER_TOKEN = ("advantages", "returns", "log_probs", "ref_log_probs")


def _exists(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def _bare(cls: type, **attributes: Any) -> Any:
    """An instance with these attributes only, without running the constructor."""
    instance = object.__new__(cls)
    for name, value in attributes.items():
        setattr(instance, name, value)
    return instance


class Host:
    """A Miles checkout on the path; `Slime` overrides what is elsewhere there."""

    package = "miles"
    backends: tuple[str, ...] = ("megatron", "fsdp")

    def module(self, name: str) -> ModuleType:
        return importlib.import_module(f"{self.package}.{name}")

    def __init__(self) -> None:
        machine.prepare()
        self.arguments = self.module("utils.arguments")
        self.Sample = self.module("utils.types").Sample
        self._import_rooms()

    def _import_rooms(self) -> None:
        self.conversion = self.module("ray.rollout.train_data_conversion")
        self.data = self.module("backends.training_utils.data")
        self.loss = self.module("backends.training_utils.loss")
        self.losses = self.module("backends.training_utils.loss_hub.losses")
        self.logs = self.module("backends.training_utils.log_utils")
        self.cp_utils = self.module("backends.training_utils.cp_utils")
        self.parallel = self.module("backends.training_utils.parallel")
        self.model = self.module("backends.megatron_utils.model")
        self.megatron_parallel = self.module("backends.megatron_utils.parallel")
        where = next(
            room for room in ("backends.fsdp_utils", "backends.experimental.fsdp_utils") if _exists(f"miles.{room}")
        )
        self.fsdp = self.module(f"{where}.actor")
        self.fsdp_parallel = self.module(f"{where}.parallel")
        if _exists("miles.utils.object_store"):
            store = self.module("utils.object_store")
            store.init_instance(Namespace(object_store_backend="ray"))

    # ---- arguments ---------------------------------------------------------------------------------------------

    def parse(self, backend: str, *flags: str) -> Namespace:
        """The namespace that the host's `parse_args` makes of a command line, its own validation included."""
        needed = ["--num-rollout", "1", "--rollout-batch-size", "2", "--train-backend", backend, "--ci-test"]
        with (
            mock.patch.object(sys, "argv", ["train.py", *needed, *flags]),
            mock.patch.object(self.arguments, "sglang_validate_args", lambda args: None),
        ):
            args = self.arguments.parse_args()
        args.ci_test = False  # asked for by an old FSDP gate; its assertions are about real models
        return args

    # ---- rollout side ------------------------------------------------------------------------------------------

    def convert(self, args: Namespace, samples: Sequence[Any]) -> dict[str, Any]:
        metadata: dict[str, Any] = {}
        return self.conversion.convert_samples_to_train_data(args, samples, metadata, None, None)

    def split(self, args: Namespace, data: dict[str, Any], dp_size: int, cp_size: int) -> list[Any]:
        """Handles of the shards, as the host puts them into its object store."""
        split = self.conversion.split_train_data_by_dp
        if "dp_size" in inspect.signature(split).parameters:
            return split(args, data, dp_size)
        return split(args, data, self._schedule_config(args, dp_size, cp_size))

    @staticmethod
    def _schedule_config(args: Namespace, dp_size: int, cp_size: int) -> dict[str, Any]:
        config: dict[str, Any] = {"dp_size": dp_size}
        if args.train_backend == "megatron":
            config |= {"cp_size": cp_size, "vpp_size": 1, "microbatch_group_size_per_vp_stage": 1}
        return config

    @staticmethod
    def open(handle: Any) -> dict[str, Any]:
        return handle.inner

    # ---- training side -----------------------------------------------------------------------------------------

    def set_up_ranks(self, args: Namespace) -> None:
        """The host's own parallel state over the process group that is open (and Megatron's, for that backend)."""
        machine.run_under(args)
        if args.train_backend == "megatron":
            create = self.megatron_parallel.create_megatron_parallel_state
            takes_replicas = "indep_dp" in inspect.signature(create).parameters
            alone = {"indep_dp": self.parallel.GroupInfo(rank=0, size=1, group=None)} if takes_replicas else {}
            self.parallel.set_parallel_state(create(**alone))
            return
        self.module("utils.distributed_utils").init_gloo_group()
        mesh = torch.distributed.device_mesh.init_device_mesh
        with mock.patch.object(
            self.fsdp_parallel, "init_device_mesh", lambda device, *rest, **named: mesh("cpu", *rest, **named)
        ):
            self.parallel.set_parallel_state(self.fsdp_parallel.create_fsdp_parallel_state(args))

    def rollout_data(self, args: Namespace, handles: list[Any]) -> dict[str, Any]:
        """This rank's shard as tensors."""
        result = self.data.get_rollout_data(args, handles)
        return result[0] if isinstance(result, tuple) else result

    def slice_for_cp(self, args: Namespace, values: list[float], total_length: int, response_length: int) -> Any:
        return self.cp_utils.slice_log_prob_with_cp(values, total_length, response_length, args.qkv_format, None)

    def log_rollout(self, args: Namespace, rollout_data: dict[str, Any]) -> dict[str, float]:
        """What the host logs of a rollout (empty on ranks that do not log)."""
        gather, found = self.logs.gather_log_data, {}

        def spy(*arguments: Any, **named: Any) -> Any:
            reduced = gather(*arguments, **named)
            found.update(reduced or {})
            return reduced

        with mock.patch.object(self.logs, "gather_log_data", spy):
            self.logs.log_rollout_data(0, args, rollout_data)
        return found

    def iterate(self, args: Namespace, model: Any, rollout_data: dict[str, Any]) -> tuple[list[Any], list[int]]:
        return self.data.get_data_iterator(args, model, rollout_data)

    def megatron_steps(self, args: Namespace, model: list[Any], optimizer: Any, rollout_data: dict[str, Any]) -> list:
        """Reduced metrics of each optimizer step that the host's `train_one_step` runs."""
        iterators, num_microbatches = self.iterate(args, model, rollout_data)
        get_counts = getattr(self.data, "get_num_rollouts", None)
        counts = get_counts(args, rollout_data, len(num_microbatches)) if get_counts else None
        found = []
        for step, num in enumerate(num_microbatches):
            values = {
                "args": args,
                "rollout_id": 0,
                "step_id": step,
                "data_iterator": iterators,
                "model": model,
                "optimizer": optimizer,
                "opt_param_scheduler": mock.MagicMock(),
                "num_microbatches": num,
                "num_rollouts": counts[step] if counts else None,
                "witness_info": None,
                "attempt": 0,
            }
            found.append(self._call_by_name(self.model.train_one_step, values)[0])
        return found

    @staticmethod
    def _call_by_name(function: Any, values: dict[str, Any]) -> Any:
        return function(**{name: values[name] for name in inspect.signature(function).parameters if name in values})

    def fsdp_steps(
        self, args: Namespace, model: Any, optimizer: Any, rollout_data: dict[str, Any]
    ) -> tuple[list, dict[str, float]]:
        """Logged metrics of each step that the host's FSDP actor runs (`_train_core`, as it is); the rollout log."""
        steps: list[dict[str, float]] = []
        rollout_log: dict[str, float] = {}
        given = dict(rollout_data)
        actor = _bare(
            self.fsdp.FSDPTrainRayActor,
            args=args,
            model=model,
            ref_model=None,
            optimizer=optimizer,
            lr_scheduler=mock.MagicMock(),
            prof=self.module("utils.profile_utils").TrainProfiler(args),
            precision_policy=SimpleNamespace(param_dtype=None, autocast_dtype=None),
        )
        patches = {
            "compute_advantages_and_returns": lambda args, data: data.update(
                {key: given[key] for key in PER_TOKEN if key in given}
            ),
            "log_train_step": lambda *rest, loss_dict, **named: steps.append(loss_dict),
            "log_rollout_data": lambda rollout_id, args, data: rollout_log.update(self.log_rollout(args, data)),
        }
        if hasattr(self.fsdp, "precision_forward_context"):
            patches["precision_forward_context"] = lambda policy: mock.MagicMock()
        norm = mock.MagicMock()
        with mock.patch.multiple(self.fsdp, **patches), mock.patch("torch.nn.utils.clip_grad_norm_", norm):
            norm.return_value.full_tensor.return_value.item.return_value = 0.0
            actor._train_core(rollout_id=0, rollout_data=rollout_data)
        return steps, rollout_log


class Slime(Host):
    """A slime checkout: one Megatron backend, conversion and split as methods of the rollout manager."""

    package = "slime"
    backends = ("megatron",)

    def _import_rooms(self) -> None:
        accelerator = self.module("utils.accelerator")
        accelerator.current_device = lambda: "cpu"
        accelerator.device = lambda index=None: torch.device("cpu")
        self.manager = self.module("ray.rollout").RolloutManager
        self.data = self.module("backends.megatron_utils.data")
        self.loss = self.losses = self.module("backends.megatron_utils.loss")
        self.logs = self.module("observability.train_metric_utils")
        self.cp_utils = self.module("backends.megatron_utils.cp_utils")
        self.model = self.module("backends.megatron_utils.model")
        self.actor = self.module("backends.megatron_utils.actor")

    def parse(self, backend: str, *flags: str) -> Namespace:
        with mock.patch.object(self.arguments, "sglang_parse_args", lambda: None):
            return super().parse(backend, *flags)

    def _manager(self, args: Namespace, **attributes: Any) -> Any:
        custom = dict.fromkeys(("custom_reward_post_process_func", "custom_convert_samples_to_train_data_func"))
        return _bare(self.manager, args=args, **custom, **attributes)

    def convert(self, args: Namespace, samples: Sequence[Any]) -> dict[str, Any]:
        return self._manager(args)._convert_samples_to_train_data(samples)

    def split(self, args: Namespace, data: dict[str, Any], dp_size: int, cp_size: int) -> list[Any]:
        config = self._schedule_config(args, dp_size, cp_size)
        return self._manager(args, train_parallel_config=config)._split_train_data_by_dp(data)

    def set_up_ranks(self, args: Namespace) -> None:
        machine.run_under(args)

    def rollout_data(self, args: Namespace, handles: list[Any]) -> dict[str, Any]:
        return _bare(self.actor.MegatronTrainRayActor, args=args)._get_rollout_data(handles)

    def slice_for_cp(self, args: Namespace, values: list[float], total_length: int, response_length: int) -> Any:
        return self.cp_utils.slice_log_prob_with_cp(values, total_length, response_length)

    def iterate(self, args: Namespace, model: Any, rollout_data: dict[str, Any]) -> tuple[list[Any], list[int]]:
        return self.data.get_data_iterator(rollout_data), rollout_data["num_microbatches"]

    def megatron_steps(self, args: Namespace, model: list[Any], optimizer: Any, rollout_data: dict[str, Any]) -> list:
        iterators, num_microbatches = self.iterate(args, model, rollout_data)
        sizes = rollout_data["global_batch_sizes"]
        scheduler = mock.MagicMock()
        return [
            self.model.train_one_step(
                args, 0, step, iterators, model, optimizer, scheduler, num, step_global_batch_size=sizes[step]
            )[0]
            for step, num in enumerate(num_microbatches)
        ]


def find() -> Host:
    """The host on the path."""
    return Slime() if _exists("slime") else Host()
