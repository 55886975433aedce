"""CodingTrial, by way of the Learner: which tapes it has timed, when it codes, and what the times decide."""

import pytest

testing = pytest.importorskip("torchoffload._C_testing", reason="it is reached through the test build alone").testing

MIB = 1 << 20
COUNT = 10
NONE, FIRST, AGAIN = testing.TapeCode.NONE, testing.TapeCode.FIRST, testing.TapeCode.AGAIN


class Program:
    """Steps of one shape, each of which takes a second where the link binds it and nothing else is said."""

    def __init__(self, *, is_bound: bool = True, chooses_code: bool = True) -> None:
        self.learner = testing.Learner()
        self.is_bound = is_bound
        self.chooses_code = chooses_code

    def begin(self, size: int = MIB):
        trace = self.learner.begin(chooses_code=self.chooses_code)
        for _ in range(COUNT):
            self.learner.next(trace, size)
            if self.learner.is_quicker_coded(trace):
                self.learner.note_coded(trace)
        return trace

    def times(self, step_s: float, code=NONE):
        compute_s, rate = (1e-3, MIB / 0.05) if self.is_bound else (1.0, 1e15)
        records = [(number * 1e-5, compute_s - number * 1e-5) for number in range(COUNT)]
        return testing.StepTimes(records, compute_s, rate, rate, step_s=step_s, code=code)

    def step(self, raw_s: float = 1.0, coded_s: float = 1.0, size: int = MIB):
        """(what was coded of it, whether it was timed)"""
        trace = self.begin(size)
        shape = self.learner.learn(trace, list(range(COUNT)))
        if trace.is_timed:
            self.learner.learn_times(shape, self.times(raw_s if trace.code == NONE else coded_s, trace.code))
        return trace.code, trace.is_timed

    def code_of_steps(self, count: int, **times: float):
        return [self.step(**times)[0] for _ in range(count)]


BEFORE = [(NONE, False), (NONE, True), (NONE, True), (FIRST, False), (AGAIN, True), (AGAIN, True)]


def test_two_steps_of_each_way_are_timed_but_not_the_first_coded_one_and_then_one_more_raw_one():
    program = Program()
    assert [program.step(coded_s=0.9) for _ in range(9)] == [*BEFORE, (NONE, True), (AGAIN, False), (AGAIN, False)]


def test_where_the_code_has_lost_there_is_no_need_of_another_raw_step():
    program = Program()
    assert [program.step(coded_s=1.1) for _ in range(8)] == [*BEFORE, (NONE, False), (NONE, False)]


@pytest.mark.parametrize(
    ("coded_s", "is_coded"), [(0.5, True), (0.99, True), (0.991, False), (1.0, False), (2.0, False)]
)
def test_the_code_has_to_save_a_hundredth(coded_s: float, is_coded: bool):
    program = Program()
    program.code_of_steps(7, coded_s=coded_s)
    assert program.code_of_steps(200, coded_s=coded_s) == [AGAIN if is_coded else NONE] * 200
    assert program.learner.expects_coding() is is_coded
    assert program.learner.codes_given_up() == ([] if is_coded else [(1.0, coded_s)])


@pytest.mark.parametrize("slow_step", [4, 5])
def test_one_slow_coded_step_does_not_decide(slow_step: int):
    program = Program()
    for number in range(7):
        program.step(coded_s=5.0 if number == slow_step else 0.9)
    assert program.code_of_steps(3, coded_s=0.9) == [AGAIN] * 3


@pytest.mark.parametrize("slow_step", [1, 2])
def test_one_slow_raw_step_does_not_decide(slow_step: int):
    program = Program()
    for number in range(6):
        program.step(raw_s=5.0 if number == slow_step else 1.0, coded_s=1.1)
    assert program.code_of_steps(3) == [NONE] * 3


def test_a_program_that_becomes_quicker_by_itself_does_not_speak_for_the_code():
    """Its first steps are slow, as with a mode that is left later, or while it warms up."""
    program = Program()
    program.code_of_steps(3, raw_s=2.0)
    program.code_of_steps(4, raw_s=1.0, coded_s=1.1)
    assert program.learner.codes_given_up() == [(1.0, 1.1)]
    assert program.code_of_steps(3) == [NONE] * 3


def test_where_no_last_raw_step_can_be_compared_the_code_goes_on():
    program = Program()
    program.code_of_steps(6, coded_s=0.5)
    codes = program.code_of_steps(20, raw_s=0.0)
    assert codes[0] == NONE
    assert codes[-10:] == [AGAIN] * 10


def test_what_was_decided_stays():
    program = Program()
    program.code_of_steps(7, coded_s=0.5)
    assert program.code_of_steps(150, coded_s=5.0) == [AGAIN] * 150


def test_where_computing_hides_the_copies_nothing_is_tried():
    program = Program(is_bound=False)
    steps = [program.step() for _ in range(8)]
    assert [code for code, _ in steps] == [NONE] * 8
    assert [number for number, (_, is_timed) in enumerate(steps, 1) if is_timed] == [2, 5]


def test_a_tape_that_does_not_choose_is_timed_as_ever():
    program = Program(chooses_code=False)
    assert [number for number in range(1, 9) if program.step()[1]] == [2, 5]


def test_times_that_cannot_be_compared_end_in_code_where_the_link_binds():
    program = Program()
    steps = [program.step(raw_s=0.0, coded_s=0.0) for _ in range(20)]
    assert [code for code, _ in steps] == [NONE] * 3 + [FIRST] + [AGAIN] * 16
    assert [number for number, (_, is_timed) in enumerate(steps, 1) if is_timed] == [2, 3, 5]


def test_times_that_come_late_have_a_few_more_tapes_timed():
    """The host is three steps ahead of the device."""
    program = Program()
    late, timed = [], []
    for number in range(1, 25):
        while late and late[0][0] < number - 3:
            program.learner.learn_times(*late.pop(0)[1:])
        trace = program.begin()
        shape = program.learner.learn(trace, list(range(COUNT)))
        if trace.is_timed:
            late.append((number, shape, program.times(1.0, trace.code)))
            timed.append(number)
    assert program.learner.codes_given_up() == [(1.0, 1.0)]
    assert timed[:2] == [2, 5]
    assert len(timed) <= 10


def test_tapes_whose_times_never_come_are_not_timed_for_ever():
    program = Program()
    program.step()
    program.step()
    timed = 0
    for _ in range(60):
        trace = program.begin()
        program.learner.learn(trace, list(range(COUNT)))
        timed += trace.is_timed
    assert timed <= 10


def test_lengths_that_are_always_new_are_coded_where_the_link_binds():
    program = Program()
    codes = [program.step(coded_s=5.0, size=MIB + 512 * number)[0] for number in range(12)]
    assert codes == [NONE] * 3 + [FIRST] + [AGAIN] * 8
