"""What comes before the first round of a benchmark: it is not timed, and leaves nothing to be done within what is."""

import time

import pytest

from crankshaft.launch.benchmark.measure import rounds
from crankshaft.launch.benchmark.measure.length import Length
from crankshaft.launch.benchmark.measure.warm_up import warm_up
from tests.launch.benchmark.measure.fakes import Clock, FakeStrategy, Feed, State


def test_warm_up_ends_for_calls_that_never_settle():
    state = State()
    strategy = FakeStrategy(state, [2**n for n in range(60)], lambda steps: None)
    warm_up(strategy, state, Length(1 << 62))
    assert len(strategy.lengths) < 60


def test_steps_still_under_way_after_the_warm_up_are_ended_before_the_first_round():
    state, clock = State(), Clock()

    class Ahead(FakeStrategy):
        """Has steps open until it is asked for the last one alone, as parameter servers have."""

        in_step = False

        def run_train_steps(self, limit):
            self.in_step = limit == 1
            return super().run_train_steps(limit)

    strategy = Ahead(state, [4], clock.advance)
    rounds.run(strategy, state, Length(8), {}, clock)
    assert strategy.lengths == [4, 4, 4, 1, 4, 4]


def test_replicas_that_sync_now_and_then_are_timed_in_whole_sync_periods():
    clock, state = Clock(), State()
    began = []

    class Meeting(FakeStrategy):
        """Replicas meet at each fourth step, and where a call was asked to end."""

        sync_period_steps = 4
        in_step = False

        def run_train_steps(self, limit):
            began.append((state.step, limit))
            result = super().run_train_steps(limit)
            self.in_step = result.steps == limit or state.step % 4 == 0
            return result

    # Three calls of five steps warm up, and one of one step, a tenth of a round, finds the same rate; two of one step
    # end within a sync period; two more end it. A round of 10 s is of 10 steps, so of 8 or 12.
    strategy = Meeting(state, [5], clock.advance)
    found = rounds.run(strategy, state, Length(seconds=10.0), {}, clock)
    assert [step for step, _ in began[:7]] == [0, 5, 10, 15, 16, 17, 18]
    assert [limit for _, limit in began[3:7]] == [1, 1, 1, 2]
    assert [each["steps"] for each in found["rounds"]] == [8]
    assert began[7:] == [(20, 8), (25, 3)]
    assert not any(line.startswith("short rounds") for line in found["warnings"])


def test_rounds_shorter_than_until_replicas_meet_are_timed_as_they_are_and_said_to_be():
    clock, state = Clock(), State()
    strategy = FakeStrategy(state, [4], clock.advance)
    strategy.sync_period_steps = 100
    found = rounds.run(strategy, state, Length(seconds=10.0, rounds=2), {}, clock)
    assert [each["steps"] for each in found["rounds"]] == [10, 10]
    assert state.step < 100  # nothing waits for replicas to meet
    assert found["warnings"][0].startswith("short rounds: 10 steps, where replicas meet each 100")


def test_rate_is_that_of_a_trial_where_calls_of_the_warm_up_compile():
    # The first call takes 20 s a step, and so does the second: rates of 0.05 a second, where others are of 1.
    clock, state = Clock(), State()
    compiling = [20.0, 20.0, 20.0]
    strategy = FakeStrategy(state, [1], lambda steps: clock.advance(compiling.pop() if compiling else steps))
    found = rounds.run(strategy, state, Length(seconds=30.0), {}, clock)
    assert found["steps"] == 30
    assert found["wall_seconds"] == 30.0


@pytest.mark.parametrize("random_access", [True, False])
def test_smaller_last_batch_is_compiled_before_the_first_round(random_access):
    # 76 examples in batches of 8: an epoch's tenth batch has 4. The three calls of the warm-up leave it ahead.
    state = State()
    began = []

    class Recording(FakeStrategy):
        def run_train_steps(self, limit):
            began.append(state.step)
            return super().run_train_steps(limit)

    strategy = Recording(state, [1], lambda steps: time.sleep(1e-5), examples=76)
    strategy.train_feed = Feed(random_access)
    rounds.run(strategy, state, Length(6), {})
    assert began == [0, 1, 2, *([9] if random_access else []), *range(state.step - 6, state.step)]
    assert state.step == (16 if random_access else 9)
