"""Who this process is, in the words of Megatron's parallel state."""

_sizes = {"dp": 1, "cp": 1}
_ranks = {"dp": 0, "cp": 0}
_groups = {"dp": None, "dp_cp": None}


def initialize(*, dp=(0, 1), cp=(0, 1), groups=None):
    """Set rank and size of each axis, and the process groups."""
    (_ranks["dp"], _sizes["dp"]), (_ranks["cp"], _sizes["cp"]) = dp, cp
    _groups.update(groups or {})


def get_data_parallel_world_size(with_context_parallel=False):
    return _sizes["dp"] * (_sizes["cp"] if with_context_parallel else 1)


def get_data_parallel_rank(with_context_parallel=False):
    return _ranks["dp"]


def get_data_parallel_group(with_context_parallel=False):
    return _groups["dp_cp" if with_context_parallel else "dp"]


def get_context_parallel_world_size():
    return _sizes["cp"]


def get_context_parallel_rank():
    return _ranks["cp"]


def get_tensor_model_parallel_rank():
    return 0


def is_pipeline_last_stage(ignore_virtual=False):
    return True
