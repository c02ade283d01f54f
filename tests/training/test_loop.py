import os
import signal
from types import SimpleNamespace

import pytest

from finetune.config.compose import compose
from finetune.errors import DataError, PreemptedError, RunFailedError
from finetune.runs.state import TrainerState
from finetune.signals import Terminated, begin_steps, stops_after_step
from finetune.training.cadence import Cadence, StopRules
from finetune.training.loop import run_loop
from finetune.training.nonfinite import StepRows
from finetune.training.preemption import preempted_in_test
from finetune.training.step import StepResult
from finetune.training.validation import Validated


class Recorder:
    """Actions that only write down what they are asked for, and the states that were saved."""

    def __init__(self, *, steps_per_epoch, losses=None, answer=lambda stop: stop, **happens_at):
        self.did = []
        self.saved, self.rows = {}, {}
        self._steps_per_epoch = steps_per_epoch
        self._losses = losses
        self._happens_at = happens_at
        self.validates, self.loss_scale = losses is not None, None
        self.agree_to_stop = answer
        self.callbacks = SimpleNamespace(requests=set())

    def report(self, state, result):
        self.did.append(("report", state.step, result.num_targets))
        self.rows[state.step] = result.metrics.get("rows")
        if state.step in self._happens_at.get("asks_at", {}):
            self.callbacks.requests.add(self._happens_at["asks_at"][state.step])

    def batches(self, epoch, first_step):
        return ((epoch, step) for step in range(first_step, self._steps_per_epoch))

    def train(self, step, share):
        self.did.append(("train", step, share))
        num_told = int(self._is_now("told_at", step))
        why = "the loss is nan" if self._is_now("skipped_at", step) else ""
        return StepResult(step, 1.0, 1.0, 1.0, step, 2 * step, num_preempted=num_told, not_finite=why)

    def rows_of(self, step):
        broken = f"rows.jsonl:{step}" if self._is_now("named_at", step) else ""
        return SimpleNamespace(names=lambda: [f"rows.jsonl:{step}", "rows.jsonl:99"], name_broken=lambda: broken)

    def validate(self, state):
        if error := self._happens_at.get("fails_at", {}).get(state.step):
            raise error
        if self._is_now("cut_short_at", state.step):
            return None
        self.did.append(("validate", state.step))
        return Validated(self._losses[state.step])

    def _is_now(self, what, step):
        return step in self._happens_at.get(what, ())

    def save(self, state):
        self.did.append(("save", state.step))
        self.saved[state.step] = state
        if state.step in self._happens_at.get("asks_on_save", {}):
            self.callbacks.requests.add(self._happens_at["asks_on_save"][state.step])

    def steps_of(self, what):
        return [entry[1] for entry in self.did if entry[0] == what]


def run(cadence, *, state=None, recorder=None, losses=None, patience=None, limit=0, **keys):
    recorder = recorder or Recorder(steps_per_epoch=cadence.steps_per_epoch, losses=losses, **keys)
    end = run_loop(state or TrainerState(), cadence, recorder, StopRules(patience=patience, max_skipped_steps=limit))
    recorder.is_preempted = end.reason == "preempted"
    return recorder, end.state


def cadence(steps_per_epoch=3, num_steps=7, **keys):
    return Cadence(steps_per_epoch=steps_per_epoch, num_steps=num_steps, **keys)


def test_a_part_of_an_epoch_is_a_number_of_steps_rounded_up():
    epochs = {"training.num_epochs=0.5": 4, "training.num_epochs=1.5": 11, "training.num_epochs=2": 14}
    for key, num_steps in epochs.items():
        assert Cadence.of(compose([key], complete=False), steps_per_epoch=7).num_steps == num_steps


def test_only_a_run_that_may_skip_steps_has_a_limit_above_0():
    for policy, limit in {"skip": 3, "stop": 0}.items():
        words = [f"training.on_nonfinite={policy}", "training.max_skipped_steps=3"]
        assert StopRules.of(compose(words, complete=False)).max_skipped_steps == limit


def test_the_most_checkpoints_at_once_are_those_kept_the_best_and_the_one_being_written():
    assert cadence(save_every=2).most_checkpoints(keep=2, has_best=False) == 3
    assert cadence(save_every=1).most_checkpoints(keep=2, has_best=True) == 4
    assert cadence(save_every=1).most_checkpoints(keep=9, has_best=True) == 7, "one for each step"


def test_steps_without_a_gradient_are_counted():
    recorder = Recorder(steps_per_epoch=3)
    recorder.train = lambda step, _: StepResult(step, 1.0, float(step > 2), 1.0, step, 2 * step)
    assert run(cadence(), recorder=recorder)[1].num_without_gradient == 2


def falling(num_steps=50):
    return {step: 100.0 - step for step in range(1, num_steps)}


def test_steps_go_through_the_epochs_and_end_at_the_last():
    recorder, end = run(cadence())
    shares = [entry[2] for entry in recorder.did if entry[0] == "train"]
    assert shares == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (2, 0)]
    assert (end.step, end.epoch, end.steps_in_epoch) == (7, 2, 1)


def test_each_step_is_reported_before_it_is_validated_and_validated_before_it_is_saved():
    recorder, _ = run(cadence(num_steps=1), losses=falling())
    assert [entry[0] for entry in recorder.did] == ["train", "report", "validate", "save"]


def test_validation_is_at_the_end_of_each_epoch_or_counted_in_steps():
    assert run(cadence(), losses=falling())[0].steps_of("validate") == [3, 6, 7]
    assert run(cadence(validate_every=2), losses=falling())[0].steps_of("validate") == [2, 4, 6, 7]


def test_the_last_step_is_validated_and_saved_once():
    recorder, _ = run(cadence(num_steps=6, save_every=6, save_every_epochs=1, validate_every=6), losses=falling())
    assert recorder.steps_of("validate") == [6]
    assert recorder.steps_of("save") == [3, 6]


@pytest.mark.parametrize(
    ("keys", "saved"),
    [
        ({}, [7]),
        ({"save_every": 2}, [2, 4, 6, 7]),
        ({"save_every_epochs": 1}, [3, 6, 7]),
        ({"save_every_epochs": 2}, [6, 7]),
        ({"save_every": 2, "save_every_epochs": 1}, [2, 3, 4, 6, 7]),
    ],
)
def test_checkpoints_are_counted_in_steps_or_epochs_or_both(keys, saved):
    recorder, end = run(cadence(**keys))
    assert recorder.steps_of("save") == saved
    assert (recorder.steps_of("validate"), end.best_step) == ([], None), "there is no validation split"


LOSSES = dict(enumerate([9.0, 8.0, 8.5, 7.0, 7.5, 7.4, 6.0, 6.5, 6.6, 6.7, 6.8, 6.9], start=1))


@pytest.mark.parametrize(
    ("keys", "patience"),
    [({"validate_every": 2}, None), ({"validate_every": 1}, 3), ({"save_every_epochs": 1}, 2)],
)
def test_a_run_resumed_after_any_step_does_what_the_whole_run_did(keys, patience):
    plan = cadence(steps_per_epoch=5, num_steps=12, save_every=1, **keys)
    whole, end = run(plan, losses=LOSSES, patience=patience)
    assert len(whole.saved) == end.step
    for stopped_at, state in {0: TrainerState(), **whole.saved}.items():
        resumed, resumed_end = run(plan, state=state, losses=LOSSES, patience=patience)
        before = [entry for entry in whole.did if entry[1] <= stopped_at]
        assert before + resumed.did == whole.did
        assert resumed_end == end


@pytest.mark.parametrize("when", ["told_at", "cut_short_at"])
@pytest.mark.parametrize("keys", [{}, {"validate_every": 1}, {"validate_every": 2}])
@pytest.mark.parametrize("patience", [None, 3])
def test_a_run_that_was_told_to_stop_at_any_step_goes_on_as_the_whole_run_did(keys, patience, when):
    plan = cadence(steps_per_epoch=5, num_steps=12, save_every=4, **keys)
    whole, end = run(plan, losses=LOSSES, patience=patience)
    for step in range(1, 13):
        stopped, state = run(plan, losses=LOSSES, patience=patience, **{when: [step]})
        if not stopped.is_preempted:
            assert stopped.did == whole.did
            continue
        assert (state.step, stopped.steps_of("save")[-1]) == (step, step)
        resumed, resumed_end = run(plan, state=stopped.saved[step], losses=LOSSES, patience=patience)
        assert resumed_end == end
        for what in ("train", "report", "validate"):
            assert stopped.steps_of(what) + resumed.steps_of(what) == whole.steps_of(what), step
        assert not resumed.is_preempted


def test_a_run_that_is_told_to_stop_in_its_last_step_completes():
    recorder, end = run(cadence(), losses=falling(), told_at=[7])
    assert (recorder.is_preempted, end.best_step) == (False, 7)
    assert recorder.steps_of("validate")[-1] == recorder.steps_of("save")[-1] == 7


def test_patience_stops_the_run_and_saves_where_it_stopped():
    plan = cadence(steps_per_epoch=5, num_steps=12, validate_every=1)
    recorder, end = run(plan, losses=LOSSES, patience=3)
    assert (end.step, end.best_step, end.best_loss) == (10, 7, 6.0)
    assert recorder.steps_of("save")[-1] == recorder.steps_of("train")[-1] == 10
    again, same = run(plan, state=recorder.saved[10], losses=LOSSES, patience=3)
    assert (again.did, same) == ([], end), "it does not go on when it is resumed"


def test_a_resumed_run_may_be_given_more_steps():
    recorder, _ = run(cadence())
    longer, end = run(cadence(num_steps=9), state=recorder.saved[7])
    assert longer.steps_of("train") == [8, 9]
    assert end.step == 9


@pytest.mark.parametrize("answer", [True, False])
def test_what_rank_0_decides_about_stopping_counts(answer):
    plan = cadence(steps_per_epoch=2, num_steps=6, validate_every=1)
    asked = []

    def agree(mine):
        asked.append(mine)
        return answer

    recorder, _ = run(plan, losses=falling(), patience=5, answer=agree)
    assert recorder.steps_of("train") == ([1] if answer else [1, 2, 3, 4, 5, 6])
    assert recorder.steps_of("save")[-1] == recorder.steps_of("train")[-1]
    assert not any(asked)


def test_skipped_steps_are_counted_and_reported_and_trained_on_nothing():
    recorder, end = run(cadence(), skipped_at=[2, 6], limit=2)
    assert (end.step, end.num_skipped_steps) == (7, 2)
    assert end.num_targets == 1 + 3 + 4 + 5 + 7
    assert recorder.steps_of("report") == [1, 2, 3, 4, 5, 6, 7]
    assert {step: rows for step, rows in recorder.rows.items() if rows} == {
        2: ["rows.jsonl:2", "rows.jsonl:99"],
        6: ["rows.jsonl:6", "rows.jsonl:99"],
    }


def test_a_step_behind_the_limit_ends_the_run_before_it_is_saved():
    plan = cadence(save_every=1)
    recorder = Recorder(steps_per_epoch=3, losses=None, skipped_at=[2, 3, 6])
    with pytest.raises(RunFailedError, match=r"step 6: the loss is nan; training\.max_skipped_steps is 2, and 2 were"):
        run(plan, recorder=recorder, limit=2)
    assert (recorder.steps_of("train")[-1], recorder.steps_of("report")[-1], max(recorder.saved)) == (6, 5, 5)
    assert run(plan, state=recorder.saved[5], skipped_at=[6], limit=3)[1].num_skipped_steps == 3


def test_without_skipping_the_first_ends_the_run_and_says_how_to_skip():
    advice = (
        r"step 2: .*on_nonfinite is stop.*left as before.* rows of this step \(rows\.jsonl:2, rows\.jsonl:99\), or "
        r".*on_nonfinite=skip.*resume=auto resume\.allow=optim"
    )
    with pytest.raises(RunFailedError, match=advice):
        run(cadence(), skipped_at=[2])
    advice = r"The loss of rows\.jsonl:2 alone is not finite either: correct or remove.*resume=auto resume\.allow=data$"
    with pytest.raises(RunFailedError, match=advice):
        run(cadence(), skipped_at=[2], named_at=[2])


@pytest.mark.parametrize("stopped_at", range(8))
def test_a_resumed_run_goes_on_counting_what_was_skipped_before(stopped_at):
    plan = cadence(save_every=1)
    whole, end = run(plan, skipped_at=[2, 3, 6], limit=3)
    state = {0: TrainerState(), **whole.saved}[stopped_at]
    assert run(plan, state=state, skipped_at=[2, 3, 6], limit=3)[1] == end
    if stopped_at < 6:
        with pytest.raises(RunFailedError, match="step 6"):
            run(plan, state=state, skipped_at=[2, 3, 6], limit=2)


@pytest.mark.parametrize(("loss", "limit"), [(float("nan"), 0), (float("-inf"), 9)])
def test_a_validation_that_is_not_finite_ends_the_run_before_it_is_saved(loss, limit):
    plan = cadence(save_every=1, validate_every=2)
    recorder = Recorder(steps_per_epoch=3, losses=falling() | {4: loss})
    with pytest.raises(RunFailedError, match=f"validation loss after step 4 is {loss}: these weights are not saved"):
        run(plan, recorder=recorder, limit=limit)
    assert max(recorder.saved) == 3
    assert recorder.saved[3].best_step == 2


def test_a_callback_ends_training_after_its_step_and_the_state_says_so():
    recorder, end = run(cadence(), asks_at={2: "stop"})
    assert recorder.steps_of("train") == [1, 2]
    assert recorder.saved[2].is_stopped
    resumed, _ = run(cadence(), state=end)
    assert resumed.did == []


def test_a_callback_that_stops_the_last_step_stops_nothing():
    """Otherwise the run could not be given more steps."""
    _, end = run(cadence(), asks_at={7: "stop"})
    assert (end.step, end.is_stopped) == (7, False)


def test_a_callback_saves_after_its_step():
    recorder, _ = run(cadence(), asks_at={2: "save"})
    assert recorder.steps_of("save")[:1] == [2]
    assert not recorder.saved[2].is_stopped


@pytest.mark.parametrize("when", ["told_at", "cut_short_at"])
def test_a_callback_ends_training_though_a_signal_comes_in_the_same_step(when):
    plan = cadence(validate_every=2)
    stopped, _ = run(plan, losses=falling(), asks_at={2: "stop"}, **{when: [2]})
    assert stopped.is_preempted
    resumed, end = run(plan, losses=falling(), state=stopped.saved[2])
    assert resumed.did == [("validate", 2), ("save", 2)]
    assert end == run(plan, losses=falling(), asks_at={2: "stop"})[1]


def test_a_run_that_a_callback_stopped_trains_no_further_though_it_owes_a_validation():
    stopped, _ = run(cadence(validate_every=5), losses=falling(), asks_at={4: "stop"})
    resumed, end = run(cadence(validate_every=4), losses=falling(), state=stopped.saved[4])
    assert (resumed.steps_of("train"), resumed.steps_of("validate")) == ([], [4])
    assert end.is_stopped


def test_a_callback_that_is_told_of_a_save_ends_training_after_the_same_step():
    plan = cadence(save_every=2)
    recorder, end = run(plan, asks_on_save={2: "save", 4: "stop"})
    assert (recorder.steps_of("train"), recorder.steps_of("save")) == ([1, 2, 3, 4], [2, 4, 4])
    assert recorder.saved[4].is_stopped
    assert run(plan, state=end)[0].did == []


def test_a_checkpoint_tells_whether_it_is_there_only_because_the_run_was_preempted():
    plan = cadence(steps_per_epoch=5, num_steps=12, validate_every=1, save_every=4)
    saved = run(plan, losses=LOSSES, patience=3, asks_at={2: "save"})[0].saved
    assert {step: state.is_due for step, state in saved.items()} == {2: True, 4: True, 8: True, 10: True}
    for step, is_due in {3: False, 4: True}.items():
        preempted = run(plan, losses=LOSSES, told_at=[step])[0].saved[step]
        resumed, _ = run(plan, losses=LOSSES, state=preempted)
        assert (preempted.is_due, step in resumed.saved) == (is_due, is_due)
    preempted = run(plan, losses=LOSSES, asks_at={3: "save"}, told_at=[3])[0].saved[3]
    resumed, end = run(plan, losses=LOSSES, state=preempted)
    whole, whole_end = run(plan, losses=LOSSES, asks_at={3: "save"})
    assert (resumed.saved, end) == ({step: state for step, state in whole.saved.items() if step >= 3}, whole_end)


@pytest.mark.parametrize(
    ("number", "says"), [(signal.SIGTERM, " (launchers also send it when another rank ends)"), (signal.SIGUSR1, "")]
)
def test_a_rank_that_sigterm_ends_in_the_test_phase_does_not_claim_that_a_person_sent_it(number, says):
    """torchrun sends SIGTERM to all other ranks when one is killed."""
    two = SimpleNamespace(
        rank=0,
        world_size=2,
        stop_requests=SimpleNamespace(is_on_this_rank=True),
        placement=SimpleNamespace(shard_size=None),
    )
    with stops_after_step():
        begin_steps()
        os.kill(os.getpid(), number)
        with pytest.raises(PreemptedError) as caught, preempted_in_test(two):
            raise Terminated
    assert f"as asked by {number.name} on rank 0{says}; training is complete" in str(caught.value)


def test_a_loader_without_encoded_rows_names_none():
    """Of rewards, or of a script."""
    setup = SimpleNamespace(config=compose([], complete=False), runtime=None)
    rows = StepRows(setup, SimpleNamespace(), compute=None, step=1)
    assert (rows.names(), rows.name_broken()) == ([], "")


@pytest.mark.parametrize("saves_first", [True, False])
def test_a_validation_that_fails_loses_no_step_if_the_error_says_so(saves_first):
    error = DataError("the metric fails")
    error.saves_first = saves_first
    recorder = Recorder(steps_per_epoch=9, losses={2: 1.0, 4: 1.0}, fails_at={4: error})
    with pytest.raises(DataError, match="the metric fails"):
        run(cadence(steps_per_epoch=9, num_steps=9, validate_every=2), recorder=recorder)
    assert (recorder.steps_of("train"), recorder.steps_of("save")) == ([1, 2, 3, 4], [4] if saves_first else [])
    if saves_first:
        state = recorder.saved[4]
        assert (state.step, state.validated_step) == (4, 2)
        again, _ = run(
            cadence(steps_per_epoch=9, num_steps=9, validate_every=2), state=state, losses=dict.fromkeys(range(10), 1.0)
        )
        assert again.did[0] == ("validate", 4), "the resumed run owes the validation"
