"""The package's value loss on a language model: its value is the logit of the vocabulary's first entry."""

from __future__ import annotations

import torch

from miles.backends.training_utils.loss_aggregation import Reducer
from miles.backends.training_utils.loss_hub.losses import value_loss_function
from miles.backends.training_utils.parallel import get_parallel_state
from miles.utils.errors import UserError
from miles.utils.options import Options
from miles.utils.types import RolloutBatch


def first_logit_value_loss(
    args: Options, batch: RolloutBatch, logits: torch.Tensor, sum_of_sample_mean: Reducer
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Call `value_loss_function` with the first logit as the value head's output.

    Raises:
        UserError: under tensor parallelism, where ranks hold different entries of the vocabulary.
    """
    if get_parallel_state().tp.size > 1:
        raise UserError("a value head is not split over tensor-parallel ranks; check the value loss with tp 1")
    loss, metrics = value_loss_function(args, batch, logits[..., :1], sum_of_sample_mean)
    return loss, {"loss": loss.detach(), **metrics}
