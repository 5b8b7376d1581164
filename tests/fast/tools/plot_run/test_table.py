"""How runs ended, in numbers."""

from miles.tools.plot_run.runs import group_runs, read_runs
from miles.tools.plot_run.table import describe_groups
from tests.fast.tools.plot_run.folders import step, write_run


def test_means_over_the_last_ten_steps_and_their_spread_over_runs(tmp_path):
    # Rewards of steps 2 to 11: 2, ..., 11, whose mean is 6.5; the other run's are 2 more. Over both, the mean is 7.5
    # and the standard deviation sqrt(((6.5 - 7.5)^2 + (8.5 - 7.5)^2) / 1) = 1.414.
    first = [step(number, number, 4, 0.25) for number in range(12)]
    second = [step(number, number + 2, 4, 0.75) for number in range(14)][:12]
    third = [step(0, 0.125, 5, 0.5, 8), step(1, None, 6)]
    directories = [
        write_run(tmp_path / "a", first, seed=1),
        write_run(tmp_path / "b", second, seed=2),
        write_run(tmp_path / "c", third, loss_aggregation="prompt_mean"),
    ]
    assert describe_groups(group_runs(read_runs(directories))).splitlines() == [
        "             runs  last step     reward  response length        loss  gradient norm",
        "sample_mean     2         11  7.5 ± 1.4            4 ± 0  0.5 ± 0.35              -",
        "prompt_mean     1          1      0.125              5.5         0.5              8",
        "mean over each run's last 10 steps; ±: standard deviation over runs",
    ]


def test_runs_of_other_lengths_are_told(tmp_path):
    directories = [
        write_run(tmp_path / "a", [step(number, 0.5) for number in range(3)], seed=1),
        write_run(tmp_path / "b", [step(number, 0.5) for number in range(7)], seed=2),
    ]
    table = describe_groups(group_runs(read_runs(directories)))
    assert "2 to 6" in table.splitlines()[1]
