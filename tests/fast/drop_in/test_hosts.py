"""How hosts are recognised, and what follows from which files are there."""

import pytest

from miles.drop_in.checkout import Checkout
from miles.drop_in.hosts import detect_host
from miles.utils.errors import UserError

MILES = ("miles/utils/arguments.py", "miles/ray/rollout/train_data_conversion.py")
SLIME = ("slime/utils/arguments.py", "slime/ray/rollout.py")
SCHEDULE = "miles/utils/dp_schedule.py"
FSDP = "miles/backends/fsdp_utils/actor.py"
OLD_FSDP = "miles/backends/experimental/fsdp_utils/actor.py"


def host_with(folder, *files):
    return detect_host(Checkout(folder).seen_with(dict.fromkeys(files, b"")))


def paths(host, *names):
    return [seam.path for seam in host.seams if seam.name in names]


def test_miles(tmp_path):
    host = host_with(tmp_path, *MILES, OLD_FSDP)
    assert (host.name, host.package, host.layout) == ("miles", "miles", "schedule on the training side")
    assert host.new_files == {
        "miles/backends/training_utils/loss_aggregation.py": "loss_aggregation.py",
        "miles/backends/training_utils/loss_aggregation_adapter.py": "loss_aggregation_adapter.py",
    }
    assert paths(host, "fsdp-columns", "fsdp-step-tokens", "fsdp-batch-tokens") == [OLD_FSDP] * 3
    assert paths(host, "store-schema", "whole-groups-in-schedule") == []


def test_miles_that_schedules_on_the_rollout_side_too(tmp_path):
    host = host_with(tmp_path, *MILES, SCHEDULE, FSDP)
    assert host.layout == "schedule on the rollout side"
    assert paths(host, "store-schema", "whole-groups", "whole-groups-in-schedule") == [MILES[1]] * 3
    assert paths(host, "fsdp-columns") == [FSDP]


def test_miles_without_fsdp(tmp_path):
    assert not [seam for seam in host_with(tmp_path, *MILES).seams if seam.name.startswith("fsdp")]


def test_slime(tmp_path):
    host = host_with(tmp_path, *SLIME)
    assert (host.name, host.package, host.layout) == ("slime", "slime", "schedule on the rollout side")
    assert set(host.new_files) == {"slime/utils/loss_aggregation.py", "slime/utils/loss_aggregation_adapter.py"}
    assert {seam.package for seam in host.seams} == {"slime.utils"}


@pytest.mark.parametrize("files", [MILES, (*MILES, SCHEDULE, FSDP), SLIME])
def test_the_seams_of_a_host_have_different_names(tmp_path, files):
    names = [seam.name for seam in host_with(tmp_path, *files).seams]
    assert len(set(names)) == len(names)


def test_other_folders(tmp_path):
    with pytest.raises(UserError, match=r"is no checkout of a trainer that is known\. Looked for miles: .*; slime: "):
        host_with(tmp_path, MILES[0])
    with pytest.raises(UserError, match="is this project, which has the modes; name the checkout of another trainer"):
        host_with(tmp_path, *MILES, "miles/drop_in/hosts.py")
