import io

from rich.console import Console

from rl.loggers.console import ConsoleReport, duration, health_notes, summary_table

ROW = {"reward/mean": 0.5, "rollout/response_tokens_mean": 4.25, "rollout/tokens_per_s": 12345.0}


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def plain_console():
    return Console(file=io.StringIO(), width=100)


def run_steps(report, clock, seconds, rows=None):
    for index, step_s in enumerate(seconds):
        clock.now += step_s
        report.step((rows or {}).get(index + 1, ROW), step=index + 1)


def test_a_line_without_a_terminal_names_step_reward_length_rate_and_time_left():
    clock, console = Clock(), plain_console()
    report = ConsoleReport(total_steps=60, console=console, clock=clock)
    run_steps(report, clock, [2.0])
    assert console.file.getvalue() == "step 1/60  reward 0.500  length 4.2  tokens/s 12,345  ETA 1:58\n"


def test_time_left_is_from_the_median_so_that_one_slow_step_does_not_count():
    clock = Clock()
    report = ConsoleReport(total_steps=15, console=plain_console(), clock=clock)
    assert report.eta_s() is None
    run_steps(report, clock, [1.0, 1.0, 100.0, 1.0, 1.0])
    assert report.eta_s() == 10.0


def test_time_left_of_a_resumed_run_counts_from_its_first_step():
    clock = Clock()
    report = ConsoleReport(total_steps=20, first_step=10, console=plain_console(), clock=clock)
    clock.now = 3.0
    report.step(ROW, step=11)
    assert report.eta_s() == 27.0


def test_plain_lines_come_every_ten_seconds_with_each_evaluation_and_at_the_end():
    clock, console = Clock(), plain_console()
    report = ConsoleReport(total_steps=30, console=console, clock=clock)
    run_steps(report, clock, [1.0] * 30, rows={5: ROW | {"eval/sums/greedy": 0.25}})
    lines = console.file.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == ["1/30", "5/30", "15/30", "25/30", "30/30"]
    assert "sums/greedy 0.250" in lines[1]
    assert "sums/greedy 0.250" in lines[-1], "the last evaluation stays in sight"


def test_a_line_with_nothing_to_say_still_says_the_step():
    console = plain_console()
    ConsoleReport(total_steps=2, console=console).step({"reward/mean": None}, step=0)
    assert console.file.getvalue().strip() == "step 0/2"


def test_the_live_line_ends_with_the_cursor_shown():
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=120)
    report = ConsoleReport(total_steps=3, console=console)
    report.step(ROW, step=1)
    assert output.getvalue().rindex("\x1b[?25h") > output.getvalue().rindex("\x1b[?25l")
    report.step(ROW, step=2)
    report.close()
    report.close()
    assert "step 2/3" in output.getvalue()
    assert "reward 0.500" in output.getvalue()


def test_the_table_shows_start_end_and_best_with_standard_errors():
    rows = [
        {"step": 0, "eval/sums/greedy": 0.3, "eval/sums/greedy/stderr": 0.014, "eval/sums/truncated_fraction": 0.0},
        {"step": 1, "reward/mean": 0.2},
        {"step": 2, "reward/mean": 0.9, "eval/sums/greedy": 0.95},
        {"step": 3, "reward/mean": 0.8, "eval/sums/greedy": 0.94},
    ]
    console = plain_console()
    console.print(summary_table(rows, title="r", seconds=84.0))
    text = console.file.getvalue()
    reward, accuracy = (
        next(line for line in text.splitlines() if key in line) for key in ("reward/mean", "sums/greedy")
    )
    assert reward.split() == ["reward/mean", "0.200", "0.800", "0.900", "(step", "2)"]
    assert " ".join(accuracy.split()) == "eval/sums/greedy 0.300 +/- 0.014 0.940 0.950 (step 2)"
    assert "truncated" not in text
    assert "1:24" in text


def test_the_table_of_no_rows_can_be_printed():
    console = plain_console()
    console.print(summary_table([], title="r", seconds=0.0))
    assert "0:00" in console.file.getvalue()


def test_a_metric_outside_its_range_is_noted_with_its_worst_step():
    rows = [{"step": step, "mismatch/kl_k3": value} for step, value in enumerate([0.001, 0.5, 0.02])]
    assert health_notes(rows) == ["mismatch/kl_k3 was outside -1e-06 to 0.01 in 2 of 3 rows: 0.5 at step 1"]


def test_durations_are_written_as_on_a_clock():
    assert [duration(seconds) for seconds in (0.4, 59.6, 3600, 90061)] == ["0:00", "1:00", "1:00:00", "25:01:01"]
