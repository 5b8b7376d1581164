"""Dumps as Miles and slime write them: their fields, statuses, values of numpy and torch, and file names."""

import json
from typing import Any

import numpy as np
import pytest
import torch

from miles.tools.aggregation_report.__main__ import main
from miles.tools.aggregation_report.dumps import find_dumps

SPECULATION = {
    **{"spec_accept_token_num": 0, "spec_draft_token_num": 0, "spec_verify_ct": 0},
    "completion_token_num": 0,
}
CACHE = {"cached_tokens": 0, "total_prompt_tokens": 3}


def host_row(index: int, length: int, **fields: Any) -> dict[str, Any]:
    """What both hosts' `Sample.to_dict` have in common, with the values that generation fills in."""
    row = {
        **{
            "group_index": index // 2,
            "index": index,
            "rollout_id": None,
            "prompt": [{"role": "user", "content": "?"}],
        },
        **{"tokens": [5, 6, 7, *range(length)], "multimodal_inputs": None, "multimodal_train_inputs": None},
        **{"response": "a" * length, "response_length": length, "label": "1", "reward": float(index % 2)},
        **{"loss_mask": None, "weight_versions": ["3"], "rollout_log_probs": [-0.25] * length},
        **{"rollout_routed_experts": None, "remove_sample": False, "teacher_log_probs": None},
        **{"status": "completed", "metadata": {}, "generate_function_path": None, "train_metadata": None},
        **{"non_generation_time": 0.0, "spec_info": SPECULATION, "prefix_cache_info": CACHE},
    }
    return row | fields


def miles_rows() -> list[dict[str, Any]]:
    """An aborted sample, one truncated, one removed; adapters; arrays and scalars of numpy; rewards by name."""
    own = {"rollout_indexer_topk": None, "opd_reverse_kl": None, "adapter": None, "reward_spec": None}
    own |= {"routing_key": "k"}
    return [
        host_row(0, 4, **own, reward={"acc": np.float64(0.0), "format": 1}),
        host_row(
            1, 2, **own, reward={"acc": np.float32(1.0), "format": 1}, rollout_routed_experts=np.zeros((4, 2, 2))
        ),
        host_row(2, 0, **own, reward={"acc": 0, "format": 0}, status="aborted", rollout_log_probs=[]),
        host_row(3, 8, **own, reward={"acc": True, "format": 0}, status="truncated", loss_mask=np.array([1, 0] * 4)),
        host_row(4, 3, **own, reward={"acc": torch.tensor(1.0), "format": 0}, remove_sample=True),
        host_row(5, 1, **own, reward={"acc": 0.5, "format": 0}, status="failed", teacher_log_probs=[-1.0]),
    ]


def slime_rows() -> list[dict[str, Any]]:
    """Tensors for replay, and a rollout in two rows."""
    own = {"multimodal_train_input_id": None, "apply_chat_template_kwargs": {}, "custom_rm_path": None}
    own |= {"session_id": "s", "rollout_top_p_token_ids": torch.tensor([1, 2], dtype=torch.int32)}
    own |= {"rollout_top_p_token_offsets": torch.tensor([0, 2], dtype=torch.int32)}
    return [
        host_row(0, 2, **own, rollout_id=9, reward=1, rollout_log_probs=torch.tensor([-0.5, -0.25])),
        host_row(1, 4, **own, rollout_id=9, group_index=0, reward=1, loss_mask=torch.tensor([1, 1, 0, 1])),
        host_row(2, 5, **own, rollout_id=10, group_index=0, reward=0, loss_mask=[True, True, True, False, True]),
    ]


def report_on(folder, *arguments: str) -> dict[str, Any]:
    assert main([*arguments, f"--json={folder}/report.json"]) == 0
    return json.loads((folder / "report.json").read_text())


def test_a_dump_of_miles(tmp_path):
    torch.save({"rollout_id": 4, "metadata": {"note": 1}, "samples": miles_rows()}, tmp_path / "4.pt")
    report = report_on(tmp_path, f"{tmp_path}/4.pt", "--reward-key=acc")
    assert report["data"] == {
        **{"steps": 1, "samples": 6, "rows": 6},
        "rows_by_status": {"completed": 3, "aborted": 1, "truncated": 1, "failed": 1},
        **{"response_tokens": 18, "active_tokens": 4 + 2 + 0 + 4 + 0 + 1, "fully_masked_samples": 2},
        **{"right_samples": 4, "wrong_samples": 2, "has_loss_weights": False},  # 1, 1, 1 and 0.5 are above 0
    }
    assert report["modes"]["token_mean"]["token_weight"]["median"] == pytest.approx(1 / 11)


def test_a_dump_of_slime(tmp_path):
    torch.save({"rollout_id": 0, "samples": slime_rows()}, tmp_path / "0.pt")
    report = report_on(tmp_path, f"{tmp_path}/0.pt")
    assert (report["data"]["samples"], report["data"]["rows"], report["groups"]["size"]) == (2, 3, 2)
    # rows of 2 + 3 active tokens are one sample, 4 are the other
    assert report["modes"]["token_mean"]["share_by_reward"] == pytest.approx({"right": 5 / 9, "wrong": 4 / 9})
    assert report["modes"]["sample_mean"]["share_by_reward"] == pytest.approx({"right": 0.5, "wrong": 0.5})


def test_a_template_takes_rollouts_in_order_and_leaves_evaluations(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("10", "2", "eval_3", "0", "x"):
        torch.save({"samples": slime_rows()[:1]}, f"run_{name}.pt")
    assert [path.name for path in find_dumps(["run_{rollout_id}.pt"])] == ["run_0.pt", "run_2.pt", "run_10.pt"]
    report = report_on(tmp_path, "run_{rollout_id}.pt", "run_x.pt")
    assert [dump["path"] for dump in report["dumps"]] == ["run_0.pt", "run_2.pt", "run_10.pt", "run_x.pt"]
    assert report["data"]["steps"] == 4 and report["groups"]["groups"] == 4


def test_templates_with_formats_folders_and_special_characters(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = ["d[1]*/007/007.pt", "d[1]*/010/010.pt", "d[1]*/010/011.pt", "d[1]*/12/12.pt", "a{b}.pt"]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    template = "d[1]*/{rollout_id:03d}/{rollout_id:03d}.pt"
    assert [str(path) for path in find_dumps([template])] == names[:2]
    assert [str(path) for path in find_dumps(["a{b}.pt"])] == ["a{b}.pt"]
