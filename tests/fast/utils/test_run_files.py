"""The run's folder, arguments and log."""

import json
import logging
import time
from argparse import Namespace

import pytest

from miles.utils.errors import UserError
from miles.utils.run_files import console_logging, file_logging, make_output_dir, write_arguments


def test_default_folders_are_new_each_time(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    args = Namespace(output_dir=None, loss_aggregation="prompt_mean")
    now = time.mktime((2031, 2, 3, 4, 5, 6, 0, 0, -1))
    names = [str(make_output_dir(args, now=now)) for _ in range(3)]
    stem = "runs/20310203-040506-prompt_mean"
    assert names == [stem, f"{stem}-2", f"{stem}-3"]


def test_a_named_folder_is_used_again(tmp_path):
    args = Namespace(output_dir=str(tmp_path / "a" / "b"), loss_aggregation="constant")
    assert make_output_dir(args, now=0.0) == make_output_dir(args, now=1.0) == tmp_path / "a" / "b"
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot make the output folder"):
        make_output_dir(Namespace(output_dir=str(tmp_path / "file" / "b")), now=0.0)


def test_arguments_are_sorted_json(tmp_path):
    write_arguments(tmp_path, Namespace(lr=0.5, betas=(1, 2), anything=Namespace()))
    text = (tmp_path / "args.json").read_text()
    assert list(json.loads(text)) == ["anything", "betas", "lr"]
    assert json.loads(text)["lr"] == 0.5


def test_only_the_main_process_talks_and_the_log_is_kept(tmp_path, capsys):
    logger = logging.getLogger("miles.somewhere")
    with console_logging(is_main=False):
        logger.info("from a helper")
        logger.warning("a warning")
    with console_logging(is_main=True), file_logging(tmp_path / "train.log"):
        logger.info("from the main process")
    logger.info("after the run")
    shown = capsys.readouterr().err
    assert "from the main process" in shown and "a warning" in shown
    assert "from a helper" not in shown and "after the run" not in shown
    assert "INFO miles.somewhere: from the main process" in (tmp_path / "train.log").read_text()
