"""The page on the invariance harness: its code runs, and the fault that it speaks of is found."""

import runpy
import sys

import pytest

from tests.fast.docs.test_customization import python_files

LOCAL_MEAN = "loss = -sum_of_sample_mean((1 - log_probs.exp()) ** 2 * log_probs) / max(len(batch['loss_masks']), 1)"


@pytest.fixture
def page(tmp_path, monkeypatch):
    """The page's programs in a folder of their own, next to the plug-ins that they check."""
    plug_ins = python_files("docs/customization.md")
    for name, code in {**plug_ins, **python_files("docs/invariance.md")}.items():
        (tmp_path / name).write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    modules = [name.removesuffix(".py") for name in plug_ins]
    for name in modules:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield tmp_path
    for name in modules:
        sys.modules.pop(name, None)


def test_the_documented_check_passes_on_the_documented_loss(page):
    runpy.run_path(str(page / "check_focal.py"))


def test_the_documented_check_passes_on_the_documented_plug_ins(page):
    (page / "run.yaml").write_text("lowest_ratio: 0.5\n")
    runpy.run_path(str(page / "check_plug_ins.py"))


def test_it_finds_a_loss_that_divides_by_the_rows_of_its_micro_batch(page):
    code = (page / "my_losses.py").read_text()
    right = "loss = -sum_of_sample_mean((1 - log_probs.exp()) ** 2 * log_probs)"
    assert code.count(right) == 1
    (page / "my_losses.py").write_text(code.replace(right, LOCAL_MEAN))
    with pytest.raises(
        AssertionError, match=r"splits on fsdp fail; the smallest:\n  my_losses.focal sample_mean, "
    ) as it:
        runpy.run_path(str(page / "check_focal.py"))
    assert "value: expected" in str(it.value)
