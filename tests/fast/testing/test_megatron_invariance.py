"""Megatron-Core: value, gradient and every metric are the float64 oracle's, on every axis and pair of axes."""

import pytest

from miles.backends.megatron_utils.availability import check_megatron
from miles.testing import MegatronBackend, check_invariance, find_failures
from miles.utils.errors import UserError
from tests.fast.testing.changed_steps import alternate, emptying_splits, every_changed_step
from tests.fast.testing.steps import both_schedules, every_step, make_step

TOPOLOGIES = {
    "dp1": {},
    "dp2": {"dp": 2},
    "dp4": {"dp": 4},
    "cp2": {"cp": 2},
    "pp2": {"pp": 2},
    "tp2": {"tp": 2},
    "dp2xcp2": {"dp": 2, "cp": 2},
    "dp2xpp2": {"dp": 2, "pp": 2},
    "cp2xpp2": {"cp": 2, "pp": 2},
}


@pytest.fixture(scope="module", autouse=True)
def _installed():
    try:
        check_megatron()
    except UserError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("sizes", TOPOLOGIES.values(), ids=TOPOLOGIES)
def test_every_mode_and_loss(sizes):
    check_invariance(every_step(tp=sizes.get("tp", 1)), MegatronBackend(), both_schedules(**sizes), shrink=False)


def test_virtual_stages():
    steps = every_step("--num-layers", "4")
    check_invariance(steps, MegatronBackend(), both_schedules(pp=2, virtual_stages=2), shrink=False)


@pytest.mark.parametrize("option", ["--use-distributed-optimizer", "--overlap-grad-reduce"])
def test_the_data_parallel_wrapper_in_its_other_ways(option):
    steps = [make_step("prompt_mean"), make_step("token_mean")]
    check_invariance(steps, MegatronBackend(option), both_schedules(dp=2), shrink=False)


@pytest.mark.parametrize("name", ["dp2", "cp2", "pp2", "dp2xcp2"])
def test_changed_masks_and_weights(name):
    jobs = alternate(every_changed_step(), emptying_splits(**TOPOLOGIES[name]))
    assert not find_failures(jobs, MegatronBackend())
