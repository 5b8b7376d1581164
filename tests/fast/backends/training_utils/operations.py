"""What torch is asked to do."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Operations(TorchDispatchMode):
    """The names of all operations that are dispatched while it is on.

    With `least_size`, of those alone that read or write a tensor of so many elements; views do neither. A copy from
    one device to another that waits for both has an exclamation mark.
    """

    def __init__(self, least_size=0):
        super().__init__()
        self.names = []
        self.least_size = least_size

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves((args, result)) if isinstance(leaf, torch.Tensor)]
        if not self.least_size or (max(sizes, default=0) >= self.least_size and not func.is_view):
            self.names.append(func._schema.name.removeprefix("aten::") + "!" * _waits(args, kwargs or {}, result))
        return result


def _waits(args, kwargs, result):
    tensors = [leaf for leaf in tree_leaves((args, result)) if isinstance(leaf, torch.Tensor)]
    is_copy = len({tensor.device.type for tensor in tensors if tensor.dim()}) > 1
    return is_copy and not (kwargs.get("non_blocking") or True in args)
