import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from miles.rollout.debug_data import load_rollout_dump, save_rollout_dump
from miles.utils.errors import UserError
from miles.utils.types import Sample

GOOD = {"tokens": [1, 2], "response_length": 1, "status": "completed"}


class Code:
    """Pickles as a call."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("code-was-run",)


def make_samples() -> list[Sample]:
    extra = Sample(tokens=[3], index=1, status=Sample.Status.TRUNCATED, reward={"acc": 1.0, "len": 2})
    extra.teacher_log_probs = [-0.5]  # a host's field that this package does not know
    return [
        Sample(
            group_index=0,
            index=0,
            prompt="é?",
            tokens=[1, 2, 258],
            response="\n",
            response_length=2,
            label="18",
            reward=0.5,
            loss_mask=[1, 0],
            rollout_log_probs=[-0.25, float("-inf")],
            loss_weights=[0.0, 2.5],
            status=Sample.Status.COMPLETED,
            metadata={"line": 3, "scores": torch.ones(2)},
            train_metadata={"a": (1, 2)},
        ),
        extra,
    ]


def test_a_dump_reads_back_equal_with_its_unknown_keys(tmp_path: Path) -> None:
    samples = make_samples()
    path = save_rollout_dump(f"{tmp_path}/new/folder/{{rollout_id}}.pt", 7, samples)
    assert path == tmp_path / "new/folder/7.pt"
    loaded = load_rollout_dump(f"{tmp_path}/new/folder/{{rollout_id}}.pt", 7)
    tensors = [sample.metadata.pop("scores") for sample in (samples[0], loaded[0])]
    assert torch.equal(*tensors)
    assert loaded == samples
    assert loaded[1].teacher_log_probs == [-0.5]
    assert [path.name for path in (tmp_path / "new/folder").iterdir()] == ["7.pt"]  # no temporary file stays


def test_the_file_has_the_hosts_format(tmp_path: Path) -> None:
    path = save_rollout_dump(f"{tmp_path}/a.pt", 7, make_samples())
    data = torch.load(path, weights_only=True)
    assert data["rollout_id"] == 7
    assert [row["status"] for row in data["samples"]] == ["completed", "truncated"]
    assert data["samples"][0]["tokens"] == [1, 2, 258]
    assert [row["loss_weights"] for row in data["samples"]] == [[0.0, 2.5], None]


def test_a_dump_from_before_a_field_existed(tmp_path: Path) -> None:
    torch.save({"rollout_id": 0, "samples": [GOOD]}, tmp_path / "a.pt")
    (sample,) = load_rollout_dump(f"{tmp_path}/a.pt", 0)
    assert sample.loss_weights is None and sample.rollout_id is None


@pytest.mark.parametrize(
    "value",
    [
        np.float64(0.5),
        np.float32(2),
        np.int64(-3),
        np.bool_(True),
        np.arange(6.0).reshape(2, 3),
        np.array(["a", "bc"]),
    ],
    ids=repr,
)
def test_numbers_and_arrays_of_numpy_are_data(tmp_path: Path, value: Any) -> None:
    path = save_rollout_dump(f"{tmp_path}/a.pt", 0, [Sample(tokens=[1], metadata={"x": value})])
    (sample,) = load_rollout_dump(str(path), 0)
    assert type(sample.metadata["x"]) is type(value) and sample.metadata["x"].dtype == value.dtype
    assert np.array_equal(sample.metadata["x"], value)


def test_arrays_of_objects_are_refused(tmp_path: Path) -> None:
    array = np.array([Code(), "a"], dtype=object)
    with pytest.raises(UserError, match=r"plain data and tensors only.*numpy\.dtypes\.ObjectDType|mkdir"):
        save_rollout_dump(f"{tmp_path}/a.pt", 0, [Sample(tokens=[1], metadata={"x": array})])
    torch.save({"samples": [{**GOOD, "metadata": {"x": array}}]}, tmp_path / "b.pt")
    with pytest.raises(UserError, match="refused for safety: it carries pickled code"):
        load_rollout_dump(f"{tmp_path}/b.pt", 0)


def test_keys_that_no_attribute_may_have_are_kept(tmp_path: Path) -> None:
    odd = {"effective_response_length": 9, "__class__": "x", 3: 4}
    torch.save({"samples": [GOOD | odd]}, tmp_path / "a.pt")
    (sample,) = load_rollout_dump(f"{tmp_path}/a.pt", 0)
    assert type(sample) is Sample and sample.effective_response_length == 1
    assert sample.to_dict().items() >= odd.items()


def test_samples_with_objects_are_not_saved(tmp_path: Path) -> None:
    for unreadable in (Code(), lambda: 0):
        with pytest.raises(UserError, match="plain data and tensors only"):
            save_rollout_dump(f"{tmp_path}/a.pt", 0, [Sample(tokens=[1], metadata={"x": unreadable})])
    assert not list(tmp_path.iterdir())


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save_rollout_dump(f"{tmp_path}/a.pt", 0, make_samples()[:1])
    before = path.read_bytes()

    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(UserError, match=r"cannot write rollout data .*a\.pt: No space left on device"):
        save_rollout_dump(f"{tmp_path}/a.pt", 0, make_samples())
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot read rollout data .*3\.pt: No such file or directory"):
        load_rollout_dump(f"{tmp_path}/{{rollout_id}}.pt", 3)


@pytest.mark.parametrize("template", ["{step}.pt", "{}.pt", "{rollout_id", "{rollout_id.x}.pt"])
def test_unknown_placeholder(template: str) -> None:
    with pytest.raises(UserError, match=r"the one placeholder allowed is \{rollout_id\}"):
        load_rollout_dump(template, 0)


@pytest.mark.parametrize("share", [0.01, 0.5, 0.99])
def test_truncated_file(tmp_path: Path, share: float) -> None:
    path = save_rollout_dump(f"{tmp_path}/a.pt", 0, make_samples())
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(UserError, match=r"a\.pt is truncated"):
        load_rollout_dump(str(path), 0)


@pytest.mark.parametrize("content", [b"", b"hello", b'{"samples": []}', bytes(range(1, 256))], ids=repr)
def test_not_a_torch_file(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.pt"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"a\.pt is damaged, or not a file that torch\.save wrote"):
        load_rollout_dump(str(path), 0)


def test_a_damaged_pickle_inside_the_file(tmp_path: Path) -> None:
    path = save_rollout_dump(f"{tmp_path}/a.pt", 0, make_samples())
    content = path.read_bytes()
    path.write_bytes(content.replace(b"group_index", b"\xff" * 11, 1))
    with pytest.raises(UserError, match="is damaged"):
        load_rollout_dump(str(path), 0)


@pytest.mark.parametrize("content", [Code(), {"samples": [{**GOOD, "metadata": {"x": Code()}}]}], ids=["bare", "deep"])
@pytest.mark.parametrize("new_format", [True, False])
def test_pickled_code_is_refused_and_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: Any, new_format: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save(content, tmp_path / "a.pt", _use_new_zipfile_serialization=new_format)
    with pytest.raises(UserError, match=r"refused for safety: it carries pickled code, posix\.mkdir"):
        load_rollout_dump("a.pt", 0)
    (tmp_path / "a.pt").write_bytes(pickle.dumps(content))
    with pytest.raises(UserError, match="refused for safety: it is a bare Python pickle"):
        load_rollout_dump("a.pt", 0)
    assert not (tmp_path / "code-was-run").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"rollout_id": 0, "rows": []}, r"no rollout dump: .*key 'samples', got a mapping with keys \['rollout_id'"),
        ([GOOD], "no rollout dump: .*got list"),
        ({"samples": {"a": GOOD}}, "'samples' must be a list, got dict"),
        ({"samples": []}, "holds an empty rollout"),
        ({"samples": [GOOD, 3]}, "sample 1: expected a mapping of sample fields, got int"),
        ({"samples": [{**GOOD, "status": "done"}]}, "sample 0: unknown status 'done'; expected one of .*'completed'"),
        ({"samples": [GOOD, {"status": "completed"}]}, "sample 1: 'tokens' must be a list of at least one .*got None"),
        ({"samples": [{**GOOD, "tokens": []}]}, r"sample 0: 'tokens' must be a list of at least one .*got \[\]"),
    ],
)
def test_wrong_content(tmp_path: Path, content: Any, message: str) -> None:
    torch.save(content, tmp_path / "a.pt")
    with pytest.raises(UserError, match=rf"a\.pt.*{message}"):
        load_rollout_dump(f"{tmp_path}/a.pt", 0)
