"""The fast door opens to plain data alone, and reads it as torch does."""

import io
import os
import pickle
from collections import OrderedDict

import pytest
import torch

from miles.rollout.plain_dump import load_plain

PLAIN = {
    "rollout_id": 3,
    "samples": [{"tokens": [1, 2**40, -(10**30)], "reward": 0.5, "label": "é", "x": (None, True)}],
}


class Code:
    def __reduce__(self):
        return os.mkdir, ("code-was-run",)


def saved(data, **options):
    buffer = io.BytesIO()
    torch.save(data, buffer, **options)
    buffer.seek(0)
    return buffer


def test_plain_data(tmp_path):
    assert load_plain(saved(PLAIN)) == PLAIN == torch.load(saved(PLAIN), weights_only=True)
    path = tmp_path / "rollouts.pt"
    torch.save(PLAIN, path)
    assert load_plain(path) == PLAIN


@pytest.mark.parametrize(
    "data", [Code(), {"samples": [Code()]}, os.mkdir, OrderedDict(a=1), {1, 2}, torch.ones(2), {"a": torch.ones(2)}]
)
def test_whatever_needs_an_import_or_a_storage_stays_outside(data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load_plain(saved(data)) is None
    assert not os.listdir(tmp_path)


def test_files_that_torch_did_not_write(tmp_path):
    path = tmp_path / "file"
    whole = saved(PLAIN).getvalue()
    damaged = bytearray(whole)
    damaged[whole.index(b"rollout_id")] ^= 1
    for content in (b"", b"PK", whole[:-30], bytes(damaged), pickle.dumps(PLAIN), b"plain text"):
        path.write_bytes(content)
        assert load_plain(path) is None
    assert load_plain(tmp_path / "missing") is None
    assert load_plain(saved(PLAIN, _use_new_zipfile_serialization=False)) is None
