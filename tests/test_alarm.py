"""The alarm fires once per episode and not on noise, and does what is configured: in the rules alone, and in a run."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_runs import LOCKSTEP, events, metrics, repeatable, small_config, small_trainer, status
from test_resume import At, newest, same_bits

from grpo_exp.alarm import MEASURES, Alarm, Fired, RuleState, look
from grpo_exp.checks import find_problems
from grpo_exp.config.alarms import THRESHOLDS
from grpo_exp.config.compose import compose, to_typed
from grpo_exp.config.schema import AlarmAction, AlarmConfig, AlarmRule
from grpo_exp.folder import State

WINDOW = 5


def fired_at(name: str, values: list[Any], threshold: float | None = None, hysteresis: float = 0.2) -> list[int]:
    """The places at which a rule fires."""
    default: AlarmRule = getattr(AlarmConfig(), name)
    rule, state = AlarmRule(threshold or default.threshold, WINDOW), RuleState()
    return [place for place, value in enumerate(values) if look(name, rule, hysteresis, state, value) is not None]


def test_every_rule_of_the_configuration_has_a_measure() -> None:
    names = {name for name, value in vars(AlarmConfig()).items() if isinstance(value, AlarmRule)}
    assert names == MEASURES.keys() == THRESHOLDS.keys()


COLLAPSES = {  # values of a quiet start, and of a collapse
    "beta": (0.04, 0.3),
    "ess": (0.8, 0.01),
    "kl": (0.002, 0.5),
    "entropy": (1.2, 0.001),
    "gradient": (2.0, 40.0),
    "length": (100.0, 5.0),
}


@pytest.mark.parametrize("name", COLLAPSES)
def test_a_collapse_fires_once_as_soon_as_most_of_the_window_shows_it(name: str) -> None:
    quiet, collapsed = COLLAPSES[name]
    assert fired_at(name, [quiet] * 10 + [collapsed] * 20) == [12]  # three of the last five


@pytest.mark.parametrize("name", COLLAPSES)
def test_an_episode_that_ends_may_be_followed_by_another(name: str) -> None:
    quiet, collapsed = COLLAPSES[name]
    assert fired_at(name, ([quiet] * 10 + [collapsed] * 10) * 3) == [12, 32, 52]


@pytest.mark.parametrize("name", COLLAPSES)
@settings(max_examples=30)
@given(seed=st.integers(0, 1000))
def test_noise_and_single_steps_fire_nothing(name: str, seed: int) -> None:
    """Values half or twice as large as usual, and in between some as in a collapse, one in eight steps."""
    quiet, collapsed = COLLAPSES[name]
    draw = random.Random(seed)
    values = [quiet * 2.0 ** draw.uniform(-1, 1) if place % 8 or not place else collapsed for place in range(200)]
    if name == "ess":
        values = [min(value, 1.0) for value in values]
    assert fired_at(name, values) == []


def test_a_value_that_hovers_at_the_threshold_fires_once() -> None:
    """It has to recede by the hysteresis before the rule is armed again."""
    around = [0.11, 0.095] * 20
    assert len(fired_at("kl", [0.01] * 8 + [0.11] * 4 + around)) == 1
    assert len(fired_at("kl", [0.01] * 8 + ([0.11] * 5 + [0.09] * 5) * 4)) == 1
    assert len(fired_at("kl", [0.01] * 8 + ([0.11] * 5 + [0.07] * 5) * 4)) == 4
    assert len(fired_at("kl", [0.01] * 8 + ([0.11] * 5 + [0.09] * 5) * 4, hysteresis=0.0)) == 4


@pytest.mark.parametrize("value", [None, float("nan"), float("inf"), "0.5"])
def test_a_step_without_a_value_is_passed_over(value: Any) -> None:
    values = [0.01] * 8 + [0.5, value, 0.5, value, 0.5, value]
    assert fired_at("kl", values) == [12]


def test_length_may_change_either_way() -> None:
    assert fired_at("length", [10.0] * 4 + [200.0] * 4) == fired_at("length", [200.0] * 4 + [10.0] * 4) == [6]


def test_growth_of_next_to_nothing_is_none() -> None:
    """fp32 on both sides: a thousand times 1e-7 nats is still less than what any 16-bit run begins with."""
    assert fired_at("beta", [1e-7] * 5 + [1e-4] * 20) == []
    assert fired_at("beta", [1e-7] * 5 + [0.2] * 20) == [7]


def test_gradients_of_zero_are_no_start() -> None:
    """A task whose first rewards are all equal has no gradient at first."""
    assert fired_at("gradient", [0.0] * 20 + [2.0] * 20) == []
    assert fired_at("gradient", [0.0] * 20 + [2.0] * 4 + [50.0] * 4) == [26]


def test_an_entropy_of_zero_is_a_collapse() -> None:
    assert fired_at("entropy", [1.0] * 5 + [0.0] * 5) == [7]


def config(action: str, window: int = 3) -> AlarmConfig:
    found = AlarmConfig()
    for name in MEASURES:
        setattr(found, name, AlarmRule(getattr(found, name).threshold, window, AlarmAction[action]))
    return found


def row(step: int, kl: float, **others: float) -> dict[str, Any]:
    return {"step": step, "mismatch/k3": kl, "mismatch/ess": 0.9, **others}


def test_a_rule_without_an_action_is_off() -> None:
    alarm = Alarm(config("none"))
    assert [alarm.check(row(step, 9.0)) for step in range(1, 9)] == [[]] * 8


def test_a_lower_learning_rate_stays_low_and_falls_again_with_the_next_episode() -> None:
    alarm, factors = Alarm(config("lower_lr")), []
    for step, kl in enumerate([0.01] * 4 + [0.5] * 4 + [0.01] * 4 + [0.5] * 4, start=1):
        alarm.check(row(step, kl))
        factors.append(alarm.lr_factor)
    assert factors == [1.0] * 5 + [0.5] * 8 + [0.25] * 3


def test_a_stop_says_why_and_from_when_on_nothing_can_be_trusted() -> None:
    alarm = Alarm(config("stop", window=3))
    for step, kl in enumerate([0.01] * 6 + [0.5] * 3, start=1):
        alarm.check(row(step, kl))
    assert alarm.stop_reason == "alarm.kl: mismatch/k3 is 0.5 (threshold 0.1)"
    assert (alarm.good_until, alarm.reach) == (5, 3)
    assert Alarm(config("warn")).reach == 0


@given(st.lists(st.sampled_from([None, 0.01, 0.02, 0.5, 0.09]), min_size=1, max_size=30), st.integers(0, 30))
def test_an_alarm_that_was_saved_anywhere_goes_on_as_if_it_had_not(values: list[float | None], at: int) -> None:
    whole, broken = Alarm(config("lower_lr")), Alarm(config("lower_lr"))
    for step, value in enumerate(values, start=1):
        if step == at:
            state = json.loads(json.dumps(broken.state_dict()))
            broken = Alarm(config("lower_lr"))
            broken.load_state_dict(state)
        given_row = {"step": step, "mismatch/k3": value, "grad/norm": value}
        assert whole.check(given_row) == broken.check(given_row)
    assert whole.state_dict() == broken.state_dict()


def test_a_checkpoint_from_before_there_was_an_alarm_is_taken() -> None:
    alarm = Alarm(AlarmConfig())
    alarm.load_state_dict({})
    assert alarm.state_dict() == Alarm(AlarmConfig()).state_dict()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("alarm.beta.threshold", 1.0),
        ("alarm.ess.threshold", 1.5),
        ("alarm.ess.threshold", 0.0),
        ("alarm.kl.threshold", -1.0),
        ("alarm.entropy.threshold", 2.0),
        ("alarm.gradient.threshold", 0.5),
        ("alarm.length.threshold", float("nan")),
        ("alarm.kl.window", 0),
        ("alarm.hysteresis", 1.0),
        ("alarm.lr_factor", 1.0),
        ("alarm.lr_factor", 0.0),
    ],
)
def test_thresholds_that_make_no_sense_are_refused(key: str, value: float) -> None:
    assert [problem.key for problem in find_problems(small_config(f"{key}={value}"))] == [key]


def test_the_options_of_the_group_do_what_their_names_say() -> None:
    actions = {}
    for option in ("none", "warn", "stop", "lower_lr"):
        alarm = to_typed(compose([f"alarm={option}"]).config).alarm
        actions[option] = {getattr(alarm, name).action.name for name in MEASURES}
    assert actions == {
        "none": {"none"},
        "warn": {"warn"},
        "stop": {"stop", "warn"},
        "lower_lr": {"lower_lr", "warn"},
    }


# -- in a run: completions of the tiny model are always short, so a threshold that any length passes fires at once

RINGS = (
    "alarm.entropy.window=1",
    "alarm.entropy.threshold=0.9999999",
    "optim.lr=0.05",
    "optim.warmup_steps=0",
    LOCKSTEP,
)


def rung(path: Path, *overrides: str, **arguments: Any) -> State:
    given = (*RINGS, "trainer.save_every=1", "trainer.max_steps=6", "trainer.eval_every=0", "probe.every=0", *overrides)
    return small_trainer(path, *given, **arguments).train()


class Heard:
    def __init__(self) -> None:
        self.alarms: list[dict[str, Any]] = []

    def on_alarm(self, args: Any, state: Any, control: Any, alarm: dict[str, Any], **kwargs: Any) -> None:
        self.alarms.append(alarm)


def test_a_warning_is_an_event_and_is_told_to_callbacks(tmp_path: Path) -> None:
    heard = Heard()
    assert rung(tmp_path, callbacks=[heard]) is State.done
    written = events(tmp_path, "alarm")
    assert {event["rule"] for event in written} == {"entropy"}
    assert [{key: e[key] for key in ("rule", "metric", "value")} for e in written] == [
        {key: a[key] for key in ("rule", "metric", "value")} for a in heard.alarms
    ]
    assert status(tmp_path)["step"] == 6


def test_a_stop_ends_the_run_as_done_and_keeps_the_checkpoint_from_before(tmp_path: Path) -> None:
    """The weights of the alarm are not saved, and rotation has spared the last good ones."""
    given = ("alarm.entropy.action=stop", "alarm.entropy.window=3", "trainer.keep_checkpoints=1")
    assert rung(tmp_path, *given, "trainer.max_steps=20") is State.done
    [event] = events(tmp_path, "alarm")
    last = status(tmp_path)
    assert last["step"] == event["step"] < 20
    assert last["reason"].startswith("alarm.entropy: entropy/mean is ")
    kept = sorted(int(path.name.removeprefix("step-")) for path in (tmp_path / "checkpoints").iterdir())
    assert event["step"] - 3 in kept
    assert event["step"] not in kept
    assert "eval/accuracy" in metrics(tmp_path)[-1]


def test_the_learning_rate_is_lower_from_the_next_step_on(tmp_path: Path) -> None:
    assert rung(tmp_path, "alarm.entropy.action=lower_lr", "alarm.lr_factor=0.25") is State.done
    first = events(tmp_path, "alarm")[0]
    assert first["lr_factor"] == 0.25
    rates = {r["step"]: r["lr"] for r in metrics(tmp_path) if r["step"]}
    assert [rates[first["step"]], rates[first["step"] + 1]] == [0.05, 0.05 * 0.25]


class Sharpens:
    """A collapse: the policy becomes sure of itself, and 16 bits are too coarse for its logits."""

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            with torch.no_grad():
                model.get_output_embeddings().weight.mul_(8)


def test_every_rule_rings_in_a_run_and_its_event_says_what_was_done(tmp_path: Path) -> None:
    """With thresholds that next to nothing passes."""
    least = {"beta": 1.0001, "ess": 0.9999999, "kl": 1e-12, "entropy": 0.9999, "gradient": 1.0001, "length": 1.0001}
    given = [f"alarm.{name}.{key}" for name, value in least.items() for key in (f"threshold={value}", "window=1")]
    given += ["precision=fp32_rollout_bf16", "alarm.kl.action=lower_lr", "optim.lr=1e-4"]
    assert rung(tmp_path, *given, callbacks=[Sharpens()]) is State.done
    written = events(tmp_path, "alarm")
    assert {event["rule"] for event in written} == MEASURES.keys()
    for event in written:
        assert event["metric"] == MEASURES[event["rule"]].metric
        assert event["action"] == ("lower_lr" if event["rule"] == "kl" else "warn")


@pytest.mark.parametrize("action", ["lower_lr", "stop"])
def test_a_run_with_alarms_that_is_resumed_is_the_unbroken_one(tmp_path: Path, action: str) -> None:
    given = (f"alarm.entropy.action={action}", "alarm.entropy.window=2", "trainer.keep_checkpoints=100")
    assert rung(tmp_path / "whole", *given) is State.done
    for step in (1, 2, 3):
        asked: list[bool] = []
        stopper = At(step, lambda asked=asked: asked.append(True))  # type: ignore[misc]
        path = tmp_path / str(step)
        rung(path, *given, callbacks=[stopper], should_stop=lambda asked=asked: bool(asked))  # type: ignore[misc]
        given_again = (*RINGS, "trainer.save_every=1", "trainer.max_steps=6", "trainer.eval_every=0", "probe.every=0")
        assert small_trainer(path, *given_again, *given).train(resume_from_checkpoint=True) is State.done
        same_bits(newest(tmp_path / "whole"), newest(path))
        assert repeatable(metrics(tmp_path / "whole")) == repeatable(metrics(path))
        times = ("time",)
        whole, broken = (
            [{key: value for key, value in event.items() if key not in times} for event in events(place, "alarm")]
            for place in (tmp_path / "whole", path)
        )
        assert whole == broken != []


def test_a_fired_rule_says_what_it_saw() -> None:
    state = RuleState()
    rule = AlarmRule(10.0, 1)
    assert look("gradient", rule, 0.2, state, 2.0) is None
    assert look("gradient", rule, 0.2, state, 50.0) == Fired("gradient", "grad/norm", 25.0, 10.0, 2.0, AlarmAction.warn)
