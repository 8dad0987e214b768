import logging
import threading
import time

import pytest

from rl.loggers.tracker import BackgroundTracker


class Recorder(BackgroundTracker):
    def __init__(self, **limits):
        super().__init__("recorder", **limits)
        self.events = []

    def open(self):
        self.events.append("open")

    def send(self, metrics, *, step, samples):
        self.events.append((step, dict(metrics)))

    def finish(self, *, failed):
        self.events.append("failed" if failed else "finished")


class AlwaysRaises(Recorder):
    def open(self):
        raise ConnectionError("no route\nto host")

    def send(self, metrics, *, step, samples):
        raise ValueError("bad row")

    def finish(self, *, failed):
        raise OSError("gone")


class Hangs(Recorder):
    def send(self, metrics, *, step, samples):
        threading.Event().wait()


def log_100_steps(tracker):
    start = time.monotonic()
    for step in range(100):
        tracker.log({"reward/mean": step}, step=step)
    return time.monotonic() - start


def test_every_row_arrives_once_and_in_order():
    tracker = Recorder()
    log_100_steps(tracker)
    tracker.close(failed=False)
    assert tracker.events == ["open", *((step, {"reward/mean": step}) for step in range(100)), "finished"]


def test_the_final_status_says_that_the_run_failed():
    tracker = Recorder()
    tracker.log({}, step=0)
    tracker.close(failed=True)
    assert tracker.events[-1] == "failed"


def test_a_tracker_that_raises_neither_stops_nor_slows_and_warns_in_two_lines(caplog):
    """P119: metrics.jsonl is the source of truth; without a tracker a run goes on, and says so."""
    tracker = AlwaysRaises(retry_s=0.01)
    with caplog.at_level(logging.WARNING):
        assert log_100_steps(tracker) < 1.0
        tracker.close(failed=False)
    assert [record.getMessage() for record in caplog.records] == [
        "recorder failed (ConnectionError: no route); the run goes on and metrics.jsonl has every row",
        "recorder is off after 3 failures in a row",
    ]


def test_a_row_that_fails_once_is_sent_again():
    class FailsOnce(Recorder):
        has_failed = False

        def send(self, metrics, *, step, samples):
            if step == 1 and not self.has_failed:
                self.has_failed = True
                raise ConnectionError("reset")
            super().send(metrics, step=step, samples=samples)

    tracker = FailsOnce(retry_s=0.01)
    for step in range(3):
        tracker.log({}, step=step)
    tracker.close(failed=False)
    assert [event[0] for event in tracker.events[1:-1]] == [0, 1, 2]


def test_a_hanging_tracker_does_not_hold_the_run(caplog):
    tracker = Hangs(close_limit_s=0.2)
    assert log_100_steps(tracker) < 1.0
    start = time.monotonic()
    with caplog.at_level(logging.WARNING):
        tracker.close(failed=False)
    assert time.monotonic() - start < 2.0
    assert "did not finish within" in caplog.text


@pytest.mark.slow
def test_the_default_limit_of_closing_is_below_15_s():
    tracker = Hangs()
    tracker.log({}, step=0)
    start = time.monotonic()
    tracker.close(failed=False)
    assert time.monotonic() - start < 12.0


def test_a_full_queue_drops_its_oldest_rows_and_counts_them(caplog):
    gate = threading.Event()

    class Slow(Recorder):
        def open(self):
            gate.wait()

    tracker = Slow(max_queued=10)
    log_100_steps(tracker)
    gate.set()
    with caplog.at_level(logging.WARNING):
        tracker.close(failed=False)
    assert [event[0] for event in tracker.events[:-1]] == list(range(90, 100))
    assert tracker.num_dropped == 90
    assert "90 rows were not sent" in caplog.text


def test_closing_without_a_row_opens_nothing():
    tracker = Recorder()
    tracker.close(failed=False)
    tracker.close(failed=False)
    assert tracker.events == []
