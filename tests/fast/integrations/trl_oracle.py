"""One optimizer step of GRPO over unsplit rows in float64, written from the definitions of the modes."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

MEANS = {
    "sample_mean": lambda rows, prompts: sum(mean(row) for row in rows) / len(rows),
    "prompt_mean": lambda rows, prompts: (
        sum(
            mean([x for row, own in zip(rows, prompts, strict=True) if own == prompt for x in row])
            for prompt in set(prompts)
        )
        / len(set(prompts))
    ),
    "token_mean": lambda rows, prompts: mean([x for row in rows for x in row]),
    "constant": lambda rows, prompts: sum(sum(row) for row in rows) / len(rows) / 16.0,
}
"""A step's mean of the active tokens' losses of each row."""


def mean(values):
    return sum(values) / len(values) if values else 0.0


def rows_of(ranks, step):
    """Yield each row of a step without padding: prompt, completion and, of the completion, everything else."""
    for rank in ranks:
        for batch in rank["steps"][step]["inputs"]:
            for row in range(len(batch["prompt_ids"])):
                length = int(batch["completion_mask"][row].sum()) or 1  # of a masked answer any part will do
                cut = {name: batch[name][row, :length] for name in TOKEN_COLUMNS if name in batch}
                prompt = batch["prompt_ids"][row][batch["prompt_mask"][row].bool()]
                yield {**cut, "prompt": prompt, "advantage": batch["advantages"][row].double()}


TOKEN_COLUMNS = (
    *("completion_ids", "completion_mask", "tool_mask", "old_per_token_logps", "ref_per_token_logps"),
    "importance_sampling_ratio",
)


def expected(ranks, step, model_folder, mode, *, aux="sample_mean", is_training=True):
    """Return value and gradients, by parameter, of a step in float64."""
    model = LlamaForCausalLM(LlamaConfig.from_pretrained(model_folder)).double()
    model.load_state_dict({name: value.double() for name, value in ranks[0]["steps"][step]["weights"].items()})
    losses, kls, prompts = [], [], []
    for row in rows_of(ranks, step):
        tokens = torch.cat([row["prompt"], row["completion_ids"]])[None]
        logits = model(tokens).logits[0, len(row["prompt"]) - 1 : -1]
        log_probs = logits.log_softmax(-1).gather(1, row["completion_ids"][:, None])[:, 0]
        old = row["old_per_token_logps"].double() if "old_per_token_logps" in row else log_probs.detach()
        ratio = (log_probs - old).exp()
        loss = -torch.minimum(ratio * row["advantage"], ratio.clamp(0.8, 1.2) * row["advantage"])
        loss = loss * row.get("importance_sampling_ratio", torch.ones(())).double()
        active = (row["completion_mask"] * row.get("tool_mask", 1)).bool()
        losses.append(list(loss[active]))
        prompts.append(tuple(row["prompt"].tolist()))
        if ranks[0]["beta"]:
            gap = row["ref_per_token_logps"].double() - log_probs
            kls.append(list((ratio * (gap.exp() - gap - 1))[active]))
    value = MEANS[mode](losses, prompts)
    if kls:
        value = value + ranks[0]["beta"] * MEANS[mode if aux == "match" else "sample_mean"](kls, prompts)
    value.backward()
    return value.item(), {name: weight.grad for name, weight in model.named_parameters()}
