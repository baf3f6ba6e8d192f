"""A model without weights: its next token is the last one plus one, so that "a" goes on with "bcdef...".

`load` stands in for LocalExecutor.load, also by name in a real engine process. Some prompts make it misbehave.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from octavo.config import EngineArgs, ModelFacts, resolve_config
from octavo.core.interfaces import ModelRunnerOutput, SchedulerOutput, TokenLogprobs
from octavo.engine.loaded import OnProgress
from octavo.errors import CorruptFileError
from octavo.machine import Machine
from octavo.report import StartReport
from octavo.text.tokenizer import Tokenizer
from octavo.weights.source import ModelSource

EXECUTOR_NAME = "tests.engine.fake_model:load"
VOCAB_SIZE = 260
EOS, BOS = 256, 257
# A prompt that ends with one of these: the step raises; the process kills itself; the step never ends; what the step
# raises is more than an Exception, as only a bug in the engine itself would.
RAISE, DIE, HANG, TEAR = 1, 2, 3, 4


def source(name: str = "fake") -> ModelSource:
    """name: "fake", "slow" (a millisecond a step), "corrupt" (cannot be loaded) or "crash" (dies while loading)."""
    return ModelSource(path=Path("nowhere"), kind="folder", name=name)


def make_tokenizer(*, has_bos: bool = True, chat_template: str | None = None) -> Tokenizer:
    """One token a byte, its value the id; then <eos> and <bos>."""
    alphabet = _byte_alphabet()
    library = tokenizers.Tokenizer(models.BPE({alphabet[byte]: byte for byte in range(256)}, []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(["<eos>", "<bos>"])
    return Tokenizer(
        library,
        bos_token_id=BOS if has_bos else None,
        eos_token_ids=[EOS],
        chat_template_source=chat_template,
        adds_bos=False,
    )


@dataclass(frozen=True)
class FakeModelConfig:
    vocab_size: int = VOCAB_SIZE
    eos_token_ids: tuple[int, ...] = (EOS,)


class CountingExecutor:
    """The next token is the last plus one; after "z" comes <eos>."""

    def __init__(self, args: EngineArgs, name: str):
        facts = ModelFacts(
            name=name,
            architecture="fake",
            window=100_000,
            vocab_size=VOCAB_SIZE,
            kv_group_windows=(None,),
            kv_elements_per_slot=2,
            kv_vectors_per_slot=2,
            row_elements=16,
        )
        machine = Machine(total_bytes=2**32, available_bytes=2**32, num_cores=1, num_cpus=1)
        self.config = resolve_config(args, facts, machine, weights_bytes=1000)
        self.model_config = FakeModelConfig()
        self.step_s = 0.001 if name == "slow" else 0.0
        core = self.config.core
        self.report = StartReport(
            model=name,
            served_model_names=self.config.served_model_names,
            architecture="fake",
            num_parameters=0,
            weights_dtype="float32",
            weights_bytes=1000,
            ledger=self.config.ledger,
            block_size=core.block_size,
            num_blocks=core.num_blocks,
            kv_cache_dtype=self.config.kv_cache_dtype,
            max_model_len=core.max_model_len,
            max_model_len_reason=self.config.max_model_len_reason,
            model_window=facts.window,
            max_full_length_sequences=self.config.ledger.max_full_length_sequences,
            max_num_seqs=core.max_num_seqs,
            max_num_batched_tokens=core.max_num_batched_tokens,
            device=self.config.device,
            threads=1,
            isa="none",
        )

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        time.sleep(self.step_s)
        output = ModelRunnerOutput()
        for scheduled in plan.scheduled:
            last = scheduled.token_ids[-1]
            if last == RAISE:
                raise RuntimeError("the device hiccuped")
            if last == DIE:
                os.kill(os.getpid(), signal.SIGKILL)
            if last == HANG:
                signal.pause()
            if last == TEAR:
                raise SystemExit("the books are torn")
            if scheduled.is_sampling:
                token_id = EOS if last == ord("z") and EOS not in scheduled.banned_token_ids else (last + 1) % 256
                # The misbehaving ones are for prompts only.
                token_id = token_id if token_id > TEAR else TEAR + 1
                output.token_ids[scheduled.seq_id] = token_id
                num_top = scheduled.sampling_params.logprobs
                if num_top is not None:
                    top = tuple((token_id - rank, -0.5 - rank) for rank in range(num_top))
                    output.logprobs[scheduled.seq_id] = TokenLogprobs(token_id, -0.5, top)
        return output


def load(args: EngineArgs, source: ModelSource, on_progress: OnProgress) -> CountingExecutor:
    on_progress("count to ten", 10, 10)
    if source.name == "corrupt":
        raise CorruptFileError("The file fake.gguf is damaged; download it again.")
    if source.name == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    return CountingExecutor(args, source.name)


def _byte_alphabet() -> list[str]:
    """GPT-2's characters for the 256 bytes."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256))
    return [chr(byte) if byte in printable else chr(0x100 + next(others)) for byte in range(256)]
