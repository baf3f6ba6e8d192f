"""`LocalExecutor`: a model on this process's device, behind the core's `Executor` protocol; and how it is loaded."""

from __future__ import annotations

import math
from collections.abc import Callable

from octavo.config import EngineArgs, EngineConfig, ModelFacts, check_args, resolve_config, resolve_quantization
from octavo.core.interfaces import AdapterReport, ModelRunnerOutput, ScheduledSequence, SchedulerOutput
from octavo.core.sampling_params import SamplingParams
from octavo.errors import ConfigError, ModelLoadError
from octavo.executor.adapters import ExecutorAdapters
from octavo.executor.kv_cache import (
    KVCacheLayout,
    allocate_kv_cache,
    count_elements_per_slot,
    count_vectors_per_slot,
    group_layers,
)
from octavo.executor.load_model import count_table_bytes, load_model, load_model_config, refuse_reordered
from octavo.executor.model_runner import ModelRunner
from octavo.lora.adapter import count_elements_per_rank
from octavo.machine import Machine, detect_machine
from octavo.models.config import ModelConfig
from octavo.models.registry import DecoderModel
from octavo.ops.interface import Ops
from octavo.ops.reference import ReferenceOps
from octavo.report import StartReport, Timeline, describe_formats
from octavo.weights.checkpoint import Checkpoint, open_checkpoint
from octavo.weights.load import estimate_weights_bytes
from octavo.weights.source import ModelSource

OnProgress = Callable[[str, int, int], None]  # (what is being done, how much is done, of how much or 0)

# No request has it: the core numbers its sequences from 0.
_SELF_CHECK_SEQ_ID = -1

# The C++ kernels read a value in whole vectors of 16, so its head size is padded to them.
_VALUE_ALIGNMENT = {"auto": 16, "cpu": 16, "reference": 1}


class LocalExecutor:
    """config.core must have the model's KV cache groups: asserted.

    model_config, report: what was loaded and how; the report is there after `load` only
    """

    report: StartReport

    def __init__(self, model: DecoderModel, ops: Ops, config: EngineConfig):
        core = config.core
        layout = group_layers(model.config.layer_windows)
        assert core.kv_group_windows == layout.windows, (core.kv_group_windows, layout.windows)
        self.model = model
        self.model_config: ModelConfig = model.config
        self.config = config
        self.ops = ops
        self.kv_cache = allocate_kv_cache(
            ops,
            layout,
            core.num_blocks,
            core.block_size,
            model.config.num_kv_heads,
            model.config.head_dim,
            config.kv_cache_dtype,
        )
        self._adapters = ExecutorAdapters(model, ops, config) if config.enable_lora else None
        self._runner = ModelRunner(model, ops, self.kv_cache, layout, core.block_size, self._adapters)

    @classmethod
    def load(
        cls,
        args: EngineArgs,
        source: ModelSource,
        on_progress: OnProgress | None = None,
        machine: Machine | None = None,
    ) -> LocalExecutor:
        """Read the model and reserve the cache. Raises ConfigError, ModelLoadError.

        The options are resolved twice: before the weights are read, so that what cannot work is refused in
        milliseconds, and after, with what the weights really take in memory.
        """
        check_args(args)
        timeline = Timeline()
        with timeline.measure("read the model's description"):
            machine = machine or detect_machine()
            checkpoint = open_checkpoint(source)
            model_config = load_model_config(checkpoint, bool(args.trust_remote_code))
            layout = group_layers(model_config.layer_windows)
            facts = describe_model(
                model_config, layout, source.name, checkpoint, _VALUE_ALIGNMENT[args.device or "auto"]
            )
            quantization = resolve_quantization(args, facts)
            if quantization == "checkpoint":
                refuse_reordered(checkpoint)
            estimate = estimate_weights_bytes(checkpoint, args.dtype or "auto", quantization)
            estimate += count_table_bytes(model_config, min(args.max_model_len or facts.window, facts.window))
            first = resolve_config(args, facts, machine, estimate)
        with timeline.measure("start the backend"):
            ops = make_ops(first.device, first.threads)
        with timeline.measure("load the weights"):
            model = load_model(
                ops,
                checkpoint,
                args.dtype or "auto",
                _scale_progress(on_progress),
                max_positions=first.core.max_model_len,
                trust_remote_code=first.trust_remote_code,
                quantization=first.quantization,
            )
        with timeline.measure("reserve the KV cache"):
            weights_bytes = model.num_weight_bytes
            config = resolve_config(
                args,
                facts,
                machine,
                weights_bytes,
                max_positions=first.core.max_model_len,
                kv_cache_dtype=ops.choose_kv_cache_dtype(first.core.block_size, model_config.head_dim),
            )
            executor = cls(model, ops, config)
        with timeline.measure("run a first step"):
            executor.check_itself()
        cache_bytes = executor.kv_cache.num_bytes
        assert cache_bytes == config.ledger.get_bytes("KV cache"), (cache_bytes, config.ledger)
        executor.report = _make_report(executor, checkpoint, facts, timeline)
        return executor

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        return self._runner.execute(plan)

    def load_adapter(self, adapter_id: int, path: str) -> AdapterReport:
        """A LoRA adapter of this id, from a PEFT folder or a GGUF file. Raises ModelLoadError, ConfigError."""
        return self._get_adapters().load(adapter_id, path)

    def unload_adapter(self, adapter_id: int) -> None:
        self._get_adapters().unload(adapter_id)

    def _get_adapters(self) -> ExecutorAdapters:
        if self._adapters is None:
            raise ConfigError("LoRA adapters are off; start with --enable-lora.", option="--enable-lora")
        return self._adapters

    def check_itself(self) -> None:
        """Run one token, without writing to the cache's blocks, so that broken weights are found now and not by a user.

        Raises ModelLoadError.
        """
        # The token counts as written, so no slot is touched; what it reads from block 0 is still zero.
        token_id = self.model_config.bos_token_id or 0
        sequence = ScheduledSequence(
            seq_id=_SELF_CHECK_SEQ_ID,
            token_ids=[token_id],
            num_prompt_tokens=1,
            num_computed_tokens=0,
            num_scheduled_tokens=1,
            num_written_tokens=1,
            block_tables=[[0] for _ in self.config.core.kv_group_windows],
            is_sampling=True,
            sampling_params=SamplingParams(temperature=0.0),
            seed=0,
        )
        output = self.execute(SchedulerOutput(scheduled=[sequence]))
        self.execute(SchedulerOutput(finished_seq_ids=[_SELF_CHECK_SEQ_ID]))
        if output.failures:
            raise ModelLoadError(f"The model fails its first step: {output.failures[_SELF_CHECK_SEQ_ID]}")


def describe_model(
    config: ModelConfig,
    layout: KVCacheLayout,
    name: str,
    checkpoint: Checkpoint | None = None,
    value_alignment: int = 1,
) -> ModelFacts:
    """checkpoint: where the weights are to come from; None stands for float weights. value_alignment: the backend's."""
    attention = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    # One layer's activations are alive at a time: the residual, a norm's output and an op's; queries, keys, values and
    # the attention's output; gate and up and their product.
    row_elements = (
        3 * config.hidden_size + attention + config.num_heads * config.head_dim + 3 * config.intermediate_size
    )
    return ModelFacts(
        name=name,
        architecture=config.architecture,
        window=config.max_position_embeddings,
        vocab_size=config.vocab_size,
        kv_group_windows=layout.windows,
        kv_elements_per_slot=count_elements_per_slot(layout, config.num_kv_heads, config.head_dim, value_alignment),
        kv_vectors_per_slot=count_vectors_per_slot(layout, config.num_kv_heads),
        row_elements=row_elements,
        stored_quantization=None if checkpoint is None else checkpoint.quantization,
        is_reordered=checkpoint is not None and checkpoint.reordered is not None,
        lora_elements_per_rank=count_elements_per_rank(config),
    )


def make_ops(device: str, threads: int) -> Ops:
    """The backend, chosen once. Raises ConfigError when its compiled part is missing."""
    if device == "reference":
        return ReferenceOps()
    try:
        # Here and not above: the reference backend and the tests of the parts around it need no compiled kernels.
        from octavo.ops.cpu import CpuOps
    except ImportError as error:
        raise ConfigError(
            f"The CPU kernels cannot be loaded ({error}). Install Octavo with pip so that they are built, or use "
            "--device reference, which is slow.",
            option="--device",
        ) from error
    return CpuOps(num_threads=threads)


def _count_parameters(checkpoint: Checkpoint) -> int:
    return sum(math.prod(shape) for shape in checkpoint.tensor_shapes.values())


def _scale_progress(on_progress: OnProgress | None) -> Callable[[int, int], None] | None:
    if on_progress is None:
        return None
    return lambda num_bytes, total_bytes: on_progress("load the weights", num_bytes, total_bytes)


def _make_report(executor: LocalExecutor, checkpoint: Checkpoint, facts: ModelFacts, timeline: Timeline) -> StartReport:
    config, core = executor.config, executor.config.core
    notes = list(config.notes)
    unused = group_layers(executor.model_config.layer_windows).num_unused_layer_slots
    if unused:
        share = unused / (len(core.kv_group_windows) * len(executor.kv_cache.physical))
        notes.append(f"{share:.0%} of the KV cache is never written: the layers do not divide evenly into groups.")
    return StartReport(
        model=config.model,
        served_model_names=config.served_model_names,
        architecture=facts.architecture,
        num_parameters=_count_parameters(checkpoint),
        weights_dtype=describe_formats(executor.model.matrix_bytes),
        weights_bytes=executor.model.num_weight_bytes,
        ledger=config.ledger,
        block_size=core.block_size,
        num_blocks=core.num_blocks,
        kv_cache_dtype=config.kv_cache_dtype,
        max_model_len=core.max_model_len,
        max_model_len_reason=config.max_model_len_reason,
        model_window=facts.window,
        max_full_length_sequences=config.ledger.max_full_length_sequences,
        max_num_seqs=core.max_num_seqs,
        max_num_batched_tokens=core.max_num_batched_tokens,
        device=config.device,
        threads=config.threads,
        isa=getattr(executor.ops, "isa", "numpy"),
        timeline=tuple(timeline.entries),
        notes=tuple(notes),
    )
