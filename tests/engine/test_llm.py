"""`LLM` on a model that counts: prompts in, outputs in order, errors before any work, interrupts that harm nothing."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.config import EngineArgs
from octavo.core.interfaces import ModelRunnerOutput, SchedulerOutput
from octavo.engine.outputs import RequestOutput
from octavo.errors import ConfigError, EngineDeadError, InvalidRequestError, RequestFailedError

from . import fake_model
from .fake_model import BOS, EOS, RAISE, CountingExecutor, make_tokenizer

TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}{% if add_generation_prompt %}:{% endif %}"


def make_llm(executor_class: type[CountingExecutor] = CountingExecutor, **options: Any) -> LLM:
    template = options.pop("chat_template", None)
    return LLM(
        "fake",
        source=fake_model.source(),
        tokenizer=make_tokenizer(chat_template=template),
        executor_factory=lambda args, source, on_progress: executor_class(args, source.name),
        **{"max_model_len": 1000, **options},
    )


def texts(outputs: list[RequestOutput]) -> list[str]:
    return [output.outputs[0].text for output in outputs]


def test_a_text_is_completed() -> None:
    (output,) = make_llm().generate("a", SamplingParams(max_tokens=4, temperature=0))
    assert (output.prompt, output.prompt_token_ids, output.finished) == ("a", [97], True)
    completion = output.outputs[0]
    assert (completion.text, completion.token_ids, completion.finish_reason) == ("bcde", list(b"bcde"), "length")


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        ("a", ["bc"]),
        (["a", "d"], ["bc", "ef"]),
        ([97, 100], ["ef"]),
        ([[97], [100]], ["bc", "ef"]),
        ({"prompt_token_ids": [97]}, ["bc"]),
        ([{"prompt": "a"}, "d", [104]], ["bc", "ef", "ij"]),
        ([], []),
    ],
)
def test_the_forms_of_a_prompt(prompts: Any, expected: list[str]) -> None:
    assert texts(make_llm().generate(prompts, SamplingParams(max_tokens=2))) == expected


@pytest.mark.parametrize(
    ("prompts", "param"), [(None, "prompts"), (5, "prompts"), (["a", None], "prompt[1]"), ([None, "a"], "prompt[0]")]
)
def test_what_is_no_prompt_is_refused_by_name(prompts: Any, param: str) -> None:
    with pytest.raises(InvalidRequestError, match="a prompt is a text") as caught:
        make_llm().generate(prompts)
    assert caught.value.param == param


@pytest.mark.parametrize(
    "messages", [None, 5, "hi", {"role": "user", "content": "a"}, [None], [[]], [{"role": "user"}], [{"content": "a"}]]
)
def test_what_is_no_conversation_is_refused(messages: Any) -> None:
    llm = make_llm(chat_template=TEMPLATE)
    with pytest.raises(InvalidRequestError, match="a conversation is a list of messages"):
        llm.chat(messages)


def test_parameters_of_another_type_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="must be a SamplingParams"):
        make_llm().generate("a", {"max_tokens": 2})  # type: ignore[arg-type]


def test_without_parameters_they_are_the_usual_ones() -> None:
    (output,) = make_llm().generate("a")
    assert len(output.outputs[0].token_ids) == 16


def test_outputs_are_in_the_order_of_the_prompts_whatever_ends_first() -> None:
    params = [SamplingParams(max_tokens=n) for n in (5, 1, 3)]
    assert texts(make_llm(max_num_seqs=2).generate(["a", "b", "c"], params)) == ["bcdef", "c", "def"]


def test_the_models_end_token_ends() -> None:
    (output,) = make_llm().generate("x", SamplingParams(max_tokens=None))
    completion = output.outputs[0]
    assert (completion.text, completion.token_ids, completion.finish_reason) == ("yz", [121, 122, EOS], "stop")


def test_a_stop_string_ends_only_its_own_sequence_and_frees_its_blocks() -> None:
    llm = make_llm()
    outputs = llm.generate(["a", "q"], SamplingParams(max_tokens=6, stop="de"))
    assert texts(outputs) == ["bc", "rstuvw"]
    assert [output.outputs[0].stop_reason for output in outputs] == ["de", None]
    assert outputs[0].outputs[0].token_ids == list(b"bcde")
    assert llm.stats().latest.num_used_blocks == 0


def test_n_generations() -> None:
    (output,) = make_llm().generate("a", SamplingParams(n=3, max_tokens=2))
    assert [(completion.index, completion.text) for completion in output.outputs] == [(0, "bc"), (1, "bc"), (2, "bc")]


def test_logprobs_have_the_sampled_token_first() -> None:
    (output,) = make_llm().generate("a", SamplingParams(max_tokens=2, logprobs=2))
    completion = output.outputs[0]
    assert completion.logprobs is not None
    assert [list(entry) for entry in completion.logprobs] == [[98, 97], [99, 98]]
    assert completion.cumulative_logprob == -1.0


def test_an_empty_prompt_starts_from_bos() -> None:
    (output,) = make_llm().generate("", SamplingParams(max_tokens=1))
    assert output.prompt_token_ids == [BOS]


@pytest.mark.parametrize("wrong", [[97, 260], [-1]])
def test_one_bad_prompt_is_refused_before_any_work(wrong: list[int]) -> None:
    llm = make_llm()
    with pytest.raises(InvalidRequestError, match=r"prompt\[1\] has the token id"):
        llm.generate([[97], wrong])
    assert llm.stats().num_scheduled_tokens_total == 0
    assert not llm._core.has_unfinished()


def test_as_many_parameters_as_prompts() -> None:
    with pytest.raises(InvalidRequestError, match="has 2 entries, but there are 3 prompts"):
        make_llm().generate(["a", "b", "c"], [SamplingParams()] * 2)


def test_a_dict_without_a_prompt_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="prompt_token_ids"):
        make_llm().generate({"text": "a"})


def test_an_unknown_option_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="no option 'max_modl_len'"):
        make_llm(max_modl_len=10)


def test_chat_goes_through_the_template() -> None:
    llm = make_llm(chat_template=TEMPLATE)
    (output,) = llm.chat([{"role": "user", "content": "ab"}], SamplingParams(max_tokens=1))
    assert (output.prompt, output.outputs[0].text) == ("ab:", ";")
    outputs = llm.chat(
        [[{"role": "user", "content": "a"}], [{"role": "user", "content": "b"}]],
        SamplingParams(max_tokens=1),
        add_generation_prompt=False,
    )
    assert texts(outputs) == ["b", "c"]


def test_chat_without_a_template_says_what_to_do() -> None:
    with pytest.raises(InvalidRequestError, match="use generate"):
        make_llm().chat([{"role": "user", "content": "a"}])


def test_a_failure_in_the_engine_is_raised_with_its_prompt_and_the_engine_goes_on() -> None:
    llm = make_llm()
    with pytest.raises(RequestFailedError, match=r"Prompt 1: .*the device hiccuped"):
        llm.generate([[97], [97, RAISE], [98]])
    assert texts(llm.generate("a", SamplingParams(max_tokens=1))) == ["b"]
    assert llm.stats().latest.num_used_blocks == 0


class InterruptedExecutor(CountingExecutor):
    """Presses Ctrl-C in the third step, and once more when `presses` is 2."""

    presses = 1

    def __init__(self, args: EngineArgs, name: str):
        super().__init__(args, name)
        self.num_steps = 0

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        self.num_steps += 1
        if self.num_steps == 3:
            for _ in range(self.presses):
                signal.raise_signal(signal.SIGINT)
        return super().execute(plan)


def test_an_interrupt_aborts_everything_and_leaves_the_engine_usable() -> None:
    llm = make_llm(InterruptedExecutor)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a"] * 5, SamplingParams(max_tokens=None, ignore_eos=True))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    stats = llm.stats().latest
    assert (stats.num_running, stats.num_waiting, stats.num_used_blocks) == (0, 0, 0)
    assert texts(llm.generate("a", SamplingParams(max_tokens=2))) == ["bc"]


class TwiceInterruptedExecutor(InterruptedExecutor):
    presses = 2


def test_a_second_interrupt_ends_the_step_and_the_engine() -> None:
    llm = make_llm(TwiceInterruptedExecutor)
    with pytest.raises(KeyboardInterrupt):
        llm.generate("a", SamplingParams(max_tokens=None, ignore_eos=True))
    with pytest.raises(EngineDeadError, match="make a new LLM"):
        llm.generate("a")


def test_drawn_seeds_repeat_with_the_engines_seed() -> None:
    def seeds(**options: Any) -> list[int]:
        seen: list[int] = []

        class Recorder(CountingExecutor):
            def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
                seen.extend(scheduled.seed for scheduled in plan.scheduled)
                return super().execute(plan)

        make_llm(Recorder, **options).generate(["a", "b"], SamplingParams(max_tokens=1))
        return seen

    assert seeds(seed=3) == seeds(seed=3)
    assert seeds() != seeds()


def test_counters_add_up() -> None:
    llm = make_llm()
    llm.generate(["ab", "cd"], SamplingParams(max_tokens=3))
    stats = llm.stats()
    assert (stats.num_prompt_tokens_total, stats.num_generated_tokens_total, stats.num_preemptions_total) == (4, 6, 0)


def test_preempted_sequences_give_the_same_answer_and_are_counted() -> None:
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    roomy, tight = make_llm(max_model_len=64), make_llm(max_model_len=64, kv_cache_memory_bytes=6 * 64)
    assert tight.config.core.num_blocks == 6  # each sequence grows to 4
    assert texts(tight.generate(["a", "b", "c"], params)) == texts(roomy.generate(["a", "b", "c"], params))
    assert tight.stats().num_preemptions_total > 0
    assert roomy.stats().num_preemptions_total == 0
