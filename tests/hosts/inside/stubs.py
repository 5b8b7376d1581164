"""Stand-ins for what the hosts import and a CPU machine lacks: importable, callable, subclassable, and of no effect.

They are asked last, so whatever is installed is the real thing, and they answer files of the checkout (the working
directory) only: torch and others that probe for optional packages are told the truth. No check may rest on what a
stand-in does; the few places where a host reads an answer from one (object store, devices) are answered in
`machine.py`.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Sequence
from types import FunctionType, ModuleType
from typing import Any

CHECKOUT = os.getcwd() + os.sep
PACKAGES = """
PIL accelerate aiohttp apex backports blake3 blobfile datasets deep_ep deep_gemm fastapi fla flash_attn flashinfer
httpx huggingface_hub jinja2 kubernetes_asyncio mbridge megatron.bridge megatron.training mlflow modelopt mooncake
numba nvidia_resiliency_ext omegaconf openai orjson polars prometheus_client psutil psycopg pybase64 pydantic
pylatexenc pynvml qwen_vl_utils ray requests ring_flash_attn safetensors setproctitle sgl_kernel sglang
sglang_router starlette tensorboard tokenizers torch_memory_saver torchft transformer_engine transformers triton
typer urllib3 uvicorn wandb xxhash zstandard
"""
NAMES = frozenset(PACKAGES.split())
FIRST = frozenset({"ray"})  # even where it is installed: nothing here may start a cluster


class _StandInType(type):
    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """As a decorator leave what is decorated, else make an instance."""
        if len(args) == 1 and not kwargs and isinstance(args[0], (type, FunctionType)):
            return args[0]
        return super().__call__(*args, **kwargs)

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = _stand_in(name)
        setattr(cls, name, value)
        return value

    def __or__(cls, other: Any) -> Any:
        return cls

    __ror__ = __or__

    def __getitem__(cls, item: Any) -> Any:
        return cls

    def __iter__(cls) -> Any:
        return iter(())


class _StandIn(metaclass=_StandInType):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _stand_in(name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Act as a decorator, which leaves what it is given, or as a function without a result."""
        return args[0] if args and callable(args[0]) else None

    def __enter__(self) -> _StandIn:
        return self

    def __exit__(self, *error: Any) -> None:
        return None


def _stand_in(name: str) -> Any:
    return _StandInType(name, (_StandIn,), {})


def _is_asked_by_host() -> bool:
    """Whether the import statement that is being served stands in a file of the checkout (or is `importable`'s)."""
    frame = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__", "").startswith("importlib"):
        frame = frame.f_back
    file = "" if frame is None else frame.f_globals.get("__file__") or ""
    return os.path.abspath(file).startswith(CHECKOUT) or file == __file__


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the listed packages and everything below them, for imports that the host makes."""

    def __init__(self, names: frozenset[str]) -> None:
        self.names = names

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        parts = fullname.split(".")
        if not _is_asked_by_host():
            return None
        if any(".".join(parts[:length]) in self.names for length in range(1, len(parts) + 1)):
            stubbed.add(fullname)
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        def attribute(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            value = _stand_in(name)
            setattr(module, name, value)
            return value

        module.__getattr__ = attribute


stubbed: set[str] = set()


def importable(name: str) -> ModuleType:
    """Import a module as the host would: the installed one, else its stand-in."""
    return importlib.import_module(name)


def install(*, first: frozenset[str] = FIRST) -> None:
    """Make the stand-ins importable in this process; those in `first` even in place of an installed package."""
    sys.meta_path.insert(0, _Finder(first))
    sys.meta_path.append(_Finder(NAMES))
