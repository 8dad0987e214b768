import numpy as np

from rl.loggers.samples import SamplesFile, choose_samples, read_samples, sample_of, visible
from rl.types import FinishReason, Prompt, Rollout, RolloutGroup


def make_group(rewards, *, group_id=0, text="4", question="2+2="):
    prompt = Prompt(f"sums:{group_id}", ({"role": "user", "content": question},), np.zeros(2, np.int32), "4", "sums")
    rollouts = [
        Rollout(
            group_id=group_id,
            index=index,
            token_ids=np.zeros(5, np.int32),
            loss_mask=np.array([False, False, True, True, True]),
            rollout_logprobs=np.zeros(5, np.float32),
            temperature=1.0,
            policy_versions=np.array([-1, -1, 7, 7, 7], np.int32),
            finish_reason=FinishReason.STOP,
            text=text,
            reward=reward,
        )
        for index, reward in enumerate(rewards)
    ]
    return RolloutGroup(group_id, prompt, rollouts)


def chosen(groups, count):
    return [(group.group_id, rollout.index) for group, rollout in choose_samples(groups, count)]


def test_best_and_worst_of_a_group_are_chosen_not_the_first():
    assert chosen([make_group([0.5, 1.0, 0.0, 0.5])], 4) == [(0, 1), (0, 2)]


def test_groups_that_teach_nothing_come_last_with_one_rollout_each():
    groups = [make_group([1.0, 1.0], group_id=0), make_group([0.0, 1.0], group_id=1)]
    assert chosen(groups, 4) == [(1, 1), (1, 0), (0, 0)]


def test_no_more_than_asked_for_and_none_of_nothing():
    groups = [make_group([0.0, 1.0], group_id=index) for index in range(5)]
    assert chosen(groups, 3) == [(0, 1), (0, 0), (1, 1)]
    assert chosen([], 3) == []


def test_an_entry_says_what_was_asked_answered_and_how_it_was_graded(tmp_path):
    SamplesFile(tmp_path).write([make_group([0.0, 1.0], group_id=3)], step=20, count=1)
    assert (tmp_path / "samples.txt").read_text().splitlines()[1:] == [
        "step 20   sums:3   answer 2 of 2   policy version 7",
        "reward 1   advantage +0.000   finish stop   3 tokens",
        "prompt",
        "  | user: 2+2=",
        "response",
        "  | 4",
        "expected answer",
        "  | 4",
    ]


def test_model_text_can_neither_drive_a_terminal_nor_pass_for_our_lines(tmp_path):
    hostile = "\x1b[2J\x1b]0;title\x07\r\x9b31m\u202e\u2028\nstep 99   forged\n" + "=" * 100
    SamplesFile(tmp_path).write([make_group([1.0], text=hostile, question=hostile)], step=1, count=4)
    content = (tmp_path / "samples.txt").read_text()
    assert visible(content) == content
    assert "\\x1b[2J" in content
    assert not [line for line in content.splitlines() if line.startswith("step 99")]
    assert sum(line.startswith("=") for line in content.splitlines()) == 1


def test_a_lone_surrogate_can_be_written(tmp_path):
    SamplesFile(tmp_path).write([make_group([1.0], text="\ud800")], step=1, count=1)
    assert "  | \\ud800\n" in (tmp_path / "samples.txt").read_text()


def test_the_middle_of_a_long_response_is_left_out(tmp_path):
    SamplesFile(tmp_path).write([make_group([1.0], text="a" * 20_000)], step=1, count=1)
    assert "[12000 characters left out]" in (tmp_path / "samples.txt").read_text()


def test_an_image_in_a_prompt_is_named():
    content = [{"type": "image"}, {"type": "text", "text": "How many?"}]
    group = make_group([1.0], question=content)
    assert sample_of(group, group.rollouts[0], step=1).prompt == "user: [image]How many?"


def test_the_lines_hold_what_the_text_shows(tmp_path):
    group = make_group([0.0, 1.0], group_id=3)
    group.rollouts[1].reward_parts = {"format": 0.5}
    written = SamplesFile(tmp_path).write([group], step=20, count=1)
    assert read_samples(tmp_path) == written
    (sample,) = written
    assert (sample.step, sample.prompt_id, sample.answer_number, sample.group_size) == (20, "sums:3", 2, 2)
    assert (sample.reward, sample.reward_parts, sample.num_tokens) == (1.0, {"format": 0.5}, 3)
    assert (sample.oldest_version, sample.newest_version, sample.finish_reason) == (7, 7, "stop")
    assert (sample.prompt, sample.response, sample.expected) == ("user: 2+2=", "4", "4")


def test_a_resume_sets_samples_of_steps_that_are_done_again_aside_and_says_so_in_the_text(tmp_path):
    file = SamplesFile(tmp_path)
    for step in (1, 10, 20):
        file.write([make_group([1.0], text=f"first {step}")], step=step, count=1)
    resumed = SamplesFile(tmp_path)
    resumed.resume(10)
    resumed.write([make_group([1.0], text="again 20")], step=20, count=1)
    assert [(sample.step, sample.response) for sample in read_samples(tmp_path)] == [
        (1, "first 1"),
        (10, "first 10"),
        (20, "again 20"),
    ]
    text = (tmp_path / "samples.txt").read_text()
    assert text.index("first 20") < text.index("resumed after step 10") < text.index("again 20")
