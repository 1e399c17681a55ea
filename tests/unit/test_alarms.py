"""When an alarm is raised, repeated and over, on curves made for it; on real runs: test_watch_run.py."""

import json
from collections.abc import Sequence
from typing import Literal

import pytest

from trainer.config.watch import LEVELS, Watch
from trainer.watch.alarms import CLEARED_AFTER, REPEATED_EVERY, Alarm, Alarms, rolled_back_by, stopped_by
from trainer.watch.causes import CAUSES, FIXED_CAUSES, suspected
from trainer.watch.rules import RULES

HEALTHY = {
    "garble_rate": 0.0,
    "kl": 0.01,
    "kl_std": 0.02,
    "kl_rank_min": 0.009,
    "kl_rank_max": 0.011,
    "entropy": 0.6,
    "surprise": 0.61,
    "scored_per_sampled": 1.0,
    "advantage_bias": 1e-7,
    "rewards/judge/failed_fraction": 0.01,
    "text_unlike_ids": 0.0,
    "reward_mean": 0.4,
    "reward_std": 0.5,
    "top_token_share": 0.1,
    "repetition": 0.05,
    "truncated_fraction": 0.05,
    "grad_norm": 0.2,
    "clip_fraction": 0.0,
    "sampling_logp_gap": 1e-6,
    "held_memory_gib": 2.0,
}
Row = dict[str, float]


def told(alarms: Alarms, rows: Sequence[Row], first_step: int = 1) -> list[Alarm]:
    """Before any update there is no KL."""
    begun = [HEALTHY | ({"kl": 0.0} if step == 1 else {}) | row for step, row in enumerate(rows, first_step)]
    return [alarm for step, row in enumerate(begun, first_step) for alarm in alarms.look(step, row)]


def steps_of(found: Sequence[Alarm], name: str) -> list[tuple[int, str, int]]:
    return [(alarm.step, alarm.event, alarm.count) for alarm in found if alarm.alarm == name]


BREAKS: dict[str, tuple[Row, int]] = {
    "garble": ({"garble_rate": 0.4}, 2),
    "garble_rising": ({"garble_rate": 0.2}, 3),
    "sampling_gap": ({"sampling_logp_gap": 0.2}, 3),
    "kl": ({"kl": 2.1, "kl_std": 3.0}, 3),
    "collapse": ({"kl": 1.1, "kl_std": 2.0, "reward_mean": 0.1}, 1),
    "scored_tokens": ({"scored_per_sampled": 1.01}, 1),
    "advantages": ({"advantage_bias": 0.3}, 1),
    "decoded_text": ({"text_unlike_ids": 0.1}, 1),
    "reward_failing": ({"rewards/judge/failed_fraction": 0.3}, 3),
    "entropy_collapse": ({"entropy": 0.1, "surprise": 0.1}, 10),
    "entropy_rise": ({"entropy": 1.8, "surprise": 1.8}, 3),
    "one_token": ({"top_token_share": 0.7}, 3),
    "repetition": ({"repetition": 0.4}, 5),
    "truncation": ({"truncated_fraction": 0.6}, 5),
    "gradient": ({"grad_norm": 5.0}, 3),
    "clipping": ({"clip_fraction": 0.6}, 5),
    "reward_fall": ({"reward_mean": 0.1}, 10),
    "memory": ({"held_memory_gib": 3.0}, 50),
}
"""A change that raises one alarm alone, and after how many steps."""


@pytest.mark.parametrize("name", BREAKS)
def test_each_alarm_is_raised_at_the_last_step_of_its_patience_and_alone(name: str) -> None:
    change, patience = BREAKS[name]
    found = told(Alarms(Watch()), [{}] * 30 + [change] * patience)
    assert [(alarm.alarm, alarm.step, alarm.since) for alarm in found] == [(name, 30 + patience, 31)]
    assert told(Alarms(Watch()), [{}] * 30 + [*[change] * (patience - 1), {}] * 3) == []


def test_every_rule_is_broken_by_some_test() -> None:
    others = {"garbled_from_start", "kl_at_start", "kl_outliers", "entropy_floor", "reward_kl_ratio"}
    assert {rule.alarm for rule in RULES} == set(BREAKS) | others


def test_a_healthy_run_that_learns_raises_none() -> None:
    """Reward up, entropy to a tenth, KL from 0 to 0.9 with heavy tails, gradients uneven: the demo's kind."""
    rows = []
    for i in range(200):
        gone = i / 199
        rows.append(
            {
                "reward_mean": 0.4 + 0.5 * gone,
                "reward_std": 0.5 - 0.3 * gone,
                "entropy": 0.6 - 0.55 * gone,
                "surprise": 0.6 - 0.55 * gone + (0.04 if i % 2 else -0.04),
                "kl": 0.9 * gone,
                "kl_std": 9 * gone,
                "grad_norm": 0.2 if i % 7 else 3.0,
                "garble_rate": 0.02 if i % 5 == 0 else 0.0,
                "truncated_fraction": 0.2 * gone,
            }
        )
    assert told(Alarms(Watch()), rows) == []
    assert told(Alarms(Watch(level="quiet")), rows) == []


def test_an_alarm_that_stands_is_told_every_50_steps_with_a_count() -> None:
    found = told(Alarms(Watch()), [{}] * 10 + [{"kl": 3.0}] * 120)
    assert steps_of(found, "kl") == [(13, "raised", 1), (13 + REPEATED_EVERY, "stands", 2), (113, "stands", 3)]
    assert "told 3 times" in found[-1].line()


def test_one_that_comes_and_goes_is_told_no_more_often() -> None:
    flapping = ([{"kl": 3.0}] * 3 + [{}] * CLEARED_AFTER) * 8
    steps = [
        step for step, event, _ in steps_of(told(Alarms(Watch()), [{}] * 10 + flapping), "kl") if event != "cleared"
    ]
    assert len(steps) == 2 and steps[1] - steps[0] >= REPEATED_EVERY


def test_garble_has_two_thresholds() -> None:
    """Entered at 0.40, left after 10 steps below 0.05, and nothing in between moves it."""
    alarms = Alarms(Watch())
    assert steps_of(told(alarms, [{}] * 10 + [{"garble_rate": 0.39}] * 5), "garble") == []
    found = told(alarms, [{"garble_rate": 0.41}] * 2, 16)
    assert steps_of(found, "garble") == [(17, "raised", 1)]
    between = [{"garble_rate": 0.2}] * 20 + [{"garble_rate": 0.04}] * 9 + [{"garble_rate": 0.06}]
    assert steps_of(told(alarms, between, 18), "garble") == []
    assert alarms.standings["garble"].active
    found = told(alarms, [{"garble_rate": 0.04}] * 10, 48)
    assert steps_of(found, "garble") == [(57, "cleared", 1)]


def test_garble_within_the_first_steps_is_seen_against_step_1() -> None:
    found = told(Alarms(Watch()), [{}] + [{"garble_rate": 0.9}] * 2)
    assert steps_of(found, "garble") == [(3, "raised", 1)]


def test_a_model_that_comes_garbled_is_told_at_once_and_does_not_end_the_run() -> None:
    found = told(Alarms(Watch()), [{"garble_rate": 0.95}] * 30)
    assert [(alarm.alarm, alarm.step) for alarm in found] == [("garbled_from_start", 1)]
    assert found[0].cause == "not_from_training" and stopped_by(found, Watch()) == ""


@pytest.mark.parametrize("before", [0.4, 0.75])
def test_one_that_comes_garbled_and_gets_worse_goes_on_as_well(before: float) -> None:
    """A base model that rambles, or a random one: what training does to it cannot be told."""
    found = told(Alarms(Watch()), [{"garble_rate": before}] * 12 + [{"garble_rate": 1.0}] * 20)
    assert steps_of(found, "garble") == [] and stopped_by(found, Watch()) == ""


@pytest.mark.parametrize("before", [0.0, 0.001])
def test_a_hard_task_that_begins_to_learn_has_no_gradient_alarm(before: float) -> None:
    """Rewards so sparse that the first steps had nothing to train on, and no KL term."""
    rows = [{"grad_norm": before}] * 10 + [{"grad_norm": 0.4}] * 5
    assert told(Alarms(Watch()), rows) == []


def test_a_mild_kl_counts_where_the_reward_has_fallen() -> None:
    for reward, expected in ((0.4, []), (0.2, ["kl"])):
        found = told(Alarms(Watch()), [{}] * 10 + [{"kl": 0.5, "reward_mean": reward}] * 5)
        assert [alarm.alarm for alarm in found] == expected


def test_ranks_with_a_group_each_have_kls_that_differ() -> None:
    """The highest and the lowest of many ranks are others in each step; whether weights differ, weights say."""
    rows = [{"kl": 0.1, "kl_std": 0.2, "kl_rank_min": 0.02, "kl_rank_max": 0.3}] * 40
    assert told(Alarms(Watch(on_alarm="rollback")), [{}] * 10 + rows) == []


def test_a_metric_that_does_not_exist_raises_nothing_and_stops_no_count() -> None:
    for row in ({}, {"kl_rank_min": 0.1}, {"kl_rank_min": 0.1, "kl": 1.0}, {"kl_rank_max": 0.9, "kl": 1.0}):
        alarms = Alarms(Watch())
        for step in range(1, 40):
            assert alarms.look(step, row if step > 1 else {}) == []


def test_recorded_rollouts_have_no_gap_to_their_sampler() -> None:
    rows = [{}] * 10 + [{"sampling_logp_gap": 0.3}] * 5
    assert [alarm.alarm for alarm in told(Alarms(Watch()), rows)] == ["sampling_gap"]
    assert told(Alarms(Watch(), replays=True), rows) == []


@pytest.mark.parametrize(("gap", "cause"), [(1e-6, "reference_differs"), (0.08, "dropout")])
def test_a_kl_before_any_update_is_told_at_once(gap: float, cause: str) -> None:
    found = told(Alarms(Watch()), [{"kl": 0.05, "sampling_logp_gap": gap}] * 2)
    assert [(alarm.alarm, alarm.step, alarm.cause) for alarm in found] == [("kl_at_start", 1, cause)]


def test_a_surprise_of_chosen_completions_is_no_alarm() -> None:
    """Without the truncated ones, or those that nobody scored, what is read is likelier than what was sampled. Whether
    a filter is at work, the doctor says from the rollouts."""
    assert told(Alarms(Watch(on_alarm="stop")), [{"surprise": 0.45}] * 40) == []


@pytest.mark.parametrize(("scored", "cause"), [(1.2, "kl_outside_response"), (0.8, "end_not_trained")])
def test_other_tokens_scored_than_sampled(scored: float, cause: str) -> None:
    assert [alarm.cause for alarm in told(Alarms(Watch()), [{"scored_per_sampled": scored}] * 3)] == [cause]


def test_levels() -> None:
    """The document's fixed limits belong to the level "seed" alone; "quiet" knows what is broken beyond doubt."""
    rows = [{}] * 10 + [{"entropy": 0.4, "kl": 0.1, "kl_std": 0.6, "reward_kl_ratio": 1.5}] * 5
    levels: tuple[Literal["quiet", "normal", "seed"], ...] = ("quiet", "normal", "seed")
    names = {level: {alarm.alarm for alarm in told(Alarms(Watch(level=level)), rows)} for level in levels}
    assert names == {"quiet": set(), "normal": set(), "seed": {"entropy_floor", "kl_outliers", "reward_kl_ratio"}}
    quiet = Alarms(Watch(level="quiet"))
    assert told(quiet, [{}] * 10) == []
    every = [change for change, _ in BREAKS.values()]
    found = {alarm.alarm for i, change in enumerate(every) for alarm in told(quiet, [change] * 60, 60 * i + 11)}
    assert {"garble"} <= found <= {"garble", "scored_tokens", "advantages", "decoded_text", "sampling_gap", "kl"}


@pytest.mark.parametrize("key", LEVELS)
def test_a_single_limit_overrides_the_level_and_is_documented(key: str) -> None:
    assert Watch.model_validate({key: 0.123}).limits() == Watch().limits() | {key: 0.123}
    assert "As watch.level says" in (Watch.model_fields[key].description or "")


def test_only_garble_ends_a_run_unless_asked() -> None:
    found = told(Alarms(Watch()), [{}] * 10 + [{"kl": 3.0, "garble_rate": 0.6}] * 4)
    assert {alarm.alarm for alarm in found} == {"garble", "kl"}
    assert "garble" in stopped_by(found, Watch()) and "ALARM kl" not in stopped_by(found, Watch())
    assert "ALARM kl" in stopped_by(found, Watch(on_alarm="stop"))
    assert stopped_by(found, Watch(on_garble="warn")) == ""
    standing = [alarm for alarm in told(Alarms(Watch()), [{}] * 10 + [{"kl": 3.0}] * 70) if alarm.event == "stands"]
    assert standing and stopped_by(standing, Watch(on_alarm="stop")) == "", "a run that goes on has 50 steps"


def test_the_state_survives_a_checkpoint_at_any_step() -> None:
    rows = [{}] * 12 + [{"kl": 3.0}] * 8 + [{}] * 15 + [{"kl": 3.0, "garble_rate": 0.5}] * 60
    watch = Watch(on_garble="warn")
    whole = told(Alarms(watch), rows)
    for cut in (1, 9, 13, 16, 25, 40, 70):
        before = Alarms(watch)
        found = told(before, rows[:cut])
        after = Alarms(watch)
        after.restore(json.loads(json.dumps(before.progress())))
        assert found + told(after, rows[cut:], cut + 1) == whole, cut


@pytest.mark.parametrize("action", ["stop", "rollback"])
def test_a_run_that_goes_on_after_its_alarm_is_guarded_as_before(action: str) -> None:
    """Resumed from the checkpoint of the step that stopped it, or back at an older one that knew the alarm."""
    watch = Watch.model_validate({"on_garble": action, "on_alarm": action})
    before = Alarms(watch)
    (first,) = told(before, [{}] * 10 + [{"garble_rate": 0.6}] * 2)
    for broken, again, step in (({"garble_rate": 0.6}, "garble", 14), ({"kl": 3.0}, "kl", 15)):
        after = Alarms(watch)
        after.restore(json.loads(json.dumps(before.progress())))
        found = told(after, [broken] * 5, 13)
        assert steps_of(found, again)[0][:2] == (step, "raised")
        assert bool(stopped_by(found, watch)) == (action == "stop")
        assert bool(rolled_back_by(found, watch)) == (action == "rollback")
    assert first.alarm == "garble"


def test_an_alarm_that_ends_the_run_is_raised_whenever_it_comes() -> None:
    """Of one that only warns the words are kept back for 50 steps."""
    twice = [{}] * 10 + ([{"kl": 3.0}] * 3 + [{}] * CLEARED_AFTER) * 2
    for action, expected in (("warn", [13]), ("stop", [13, 26]), ("rollback", [13, 26])):
        found = told(Alarms(Watch.model_validate({"on_alarm": action})), twice)
        assert [step for step, event, _ in steps_of(found, "kl") if event == "raised"] == expected


def test_a_checkpoint_is_good_while_nothing_speaks_against_it() -> None:
    alarms = Alarms(Watch())
    for step, row in enumerate([{"kl": 0.0}] + [{}] * 19 + [{"kl": 3.0}] * 10 + [{}] * 30, 1):
        alarms.look(step, HEALTHY | row)
        if step % 7 == 0:
            alarms.saved(step)
        if step == 35:
            assert alarms.good_step == 14, "21 and 28 were saved while the KL was past its limit, 35 before it was over"
    assert alarms.good_step == 56


def test_a_model_that_comes_garbled_has_good_checkpoints() -> None:
    alarms = Alarms(Watch())
    for step in range(1, 21):
        alarms.look(step, HEALTHY | {"garble_rate": 0.9, "kl": 0.0})
        alarms.saved(step)
    assert alarms.good_step == 20


@pytest.mark.parametrize(
    ("row", "alarm"),
    [
        ({"rewards/judge/failed_fraction": 0.3}, "reward_failing"),
        ({"held_memory_gib": 3.0}, "memory"),
        ({"sampling_logp_gap": 0.3}, "sampling_gap"),
    ],
)
def test_what_older_weights_have_as_well_speaks_against_no_checkpoint(row: Row, alarm: str) -> None:
    for watch in (Watch(), Watch(on_alarm="rollback", on_garble="rollback")):
        alarms = Alarms(watch)
        told(alarms, [{}] * 10 + [row] * 60)
        alarms.saved(70)
        assert alarms.standings[alarm].active and alarms.good_step == 70


def test_a_kl_at_the_start_never_ends_and_speaks_against_no_checkpoint() -> None:
    alarms = Alarms(Watch(on_garble="rollback"))
    told(alarms, [{"kl": 0.05}] * 30)
    alarms.saved(30)
    assert alarms.standings["kl_at_start"].active and alarms.good_step == 30


def test_an_alarm_that_only_warns_against_the_beginning_speaks_against_no_checkpoint() -> None:
    """A run that cuts its answers from step 11 on would go back there from step 900."""
    for on_alarm, good in (("warn", 40), ("rollback", None)):
        alarms = Alarms(Watch.model_validate({"on_alarm": on_alarm, "on_garble": "rollback"}))
        told(alarms, [{}] * 10 + [{"truncated_fraction": 0.6}] * 30)
        alarms.saved(40)
        assert alarms.standings["truncation"].active and alarms.good_step == good


def test_one_step_past_a_limit_counts_where_few_make_an_alarm() -> None:
    for row, good in (({"reward_mean": 0.1}, 31), ({"kl": 3.0}, None), ({"garble_rate": 0.5}, None)):
        alarms = Alarms(Watch(on_alarm="rollback", on_garble="rollback"))
        told(alarms, [{}] * 30 + [row])
        alarms.saved(31)
        assert alarms.good_step == good, row


def test_every_cause_is_one_that_has_words() -> None:
    for rule in RULES:
        for reward in (0.0, 0.4, 0.9):
            for kl in (0.001, 0.5):
                assert suspected(rule.alarm, {"reward_mean": reward, "kl": kl}, HEALTHY) in CAUSES
    assert set(FIXED_CAUSES.values()) <= set(CAUSES)


@pytest.mark.parametrize(
    ("alarm", "row", "cause"),
    [
        ("garble", {"kl": 0.01, "reward_mean": 0.3}, "decoding"),
        ("garble", {"kl": 0.5, "reward_mean": 0.9}, "reward_hacking"),
        ("garble", {"kl": 3.0, "reward_mean": 0.0}, "update_too_large"),
        ("entropy_collapse", {"kl": 0.3, "reward_mean": 0.4}, "nothing_to_choose"),
        ("entropy_floor", {"kl": 0.3, "reward_mean": 0.9}, "grown_sure"),
        ("reward_fall", {"kl": 0.02, "reward_mean": 0.1}, "wrong_direction"),
        ("repetition", {"kl": 0.3, "reward_mean": 0.8}, "reward_hacking"),
    ],
)
def test_the_cause_depends_on_what_else_moved(alarm: str, row: Row, cause: str) -> None:
    assert suspected(alarm, row, HEALTHY) == cause


def test_an_alarm_says_what_where_why_and_what_to_do() -> None:
    (alarm,) = told(Alarms(Watch()), [{}] * 30 + [{"entropy": 1.8}] * 3)
    line = alarm.line()
    for part in ("step 33", "entropy_rise", "1.8", "limit 1.7", "0.6 at the beginning", "since step 31", "Fix: "):
        assert part in line, part
    record = json.loads(json.dumps(alarm.record()))
    assert record["step"] == 33 and record["baseline"] == 0.6 and record["fix"] and record["cause_in_words"]


def test_a_rollback_answers_what_older_weights_do_not_have() -> None:
    found = told(Alarms(Watch()), [{"garble_rate": 0.95}])
    found += told(Alarms(Watch()), [{}] * 10 + [{"kl": 3.0, "sampling_logp_gap": 0.3, "garble_rate": 0.6}] * 4)
    found += told(Alarms(Watch()), [{}] * 10 + [{"held_memory_gib": 3.0}] * 60)
    names = ["garbled_from_start", "garble", "kl", "memory", "sampling_gap"]
    assert sorted({alarm.alarm for alarm in found}) == sorted(names)
    back = {alarm.alarm for alarm in rolled_back_by(found, Watch(on_alarm="rollback", on_garble="rollback"))}
    assert back == {"kl", "garble"}
    assert rolled_back_by(found, Watch(on_garble="stop")) == []
    assert [alarm.alarm for alarm in rolled_back_by(found, Watch(on_garble="rollback"))] == ["garble"]
