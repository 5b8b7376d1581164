"""The page on the invariance harness: its code runs, and the fault that it speaks of is found."""

import runpy
import sys

import pytest

from tests.fast.docs.test_customization import python_files

LOCAL_MEAN = "loss = -sum_of_sample_mean((1 - log_probs.exp()) ** 2 * log_probs) / max(len(batch['loss_masks']), 1)"


@pytest.fixture
def page(tmp_path, monkeypatch):
    """The page's program in a folder of its own, next to the loss function that it checks."""
    (tmp_path / "check_focal.py").write_text(python_files("docs/invariance.md")["check_focal.py"])
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_losses", raising=False)
    yield tmp_path
    sys.modules.pop("my_losses", None)


def test_the_documented_check_passes_on_the_documented_loss(page):
    (page / "my_losses.py").write_text(python_files("docs/customization.md")["my_losses.py"])
    runpy.run_path(str(page / "check_focal.py"))


def test_it_finds_a_loss_that_divides_by_the_rows_of_its_micro_batch(page):
    code = python_files("docs/customization.md")["my_losses.py"]
    right = "loss = -sum_of_sample_mean((1 - log_probs.exp()) ** 2 * log_probs)"
    assert code.count(right) == 1
    (page / "my_losses.py").write_text(code.replace(right, LOCAL_MEAN))
    with pytest.raises(
        AssertionError, match=r"cuts on fsdp fail; the smallest:\n  my_losses.focal sample_mean, "
    ) as it:
        runpy.run_path(str(page / "check_focal.py"))
    assert "value: expected" in str(it.value)
