"""The LoRA adapters of an executor: what they add is put around the model's layers, and set before each step."""

from __future__ import annotations

from dataclasses import replace

from octavo.config import EngineConfig
from octavo.core.interfaces import AdapterReport, SchedulerOutput
from octavo.errors import ModelLoadError
from octavo.lora.layer import AdapterStep, group_rows, wrap_layers
from octavo.lora.manager import AdapterManager, PackedAdapter
from octavo.models.registry import DecoderModel
from octavo.ops.interface import LoraRows, Ops


class ExecutorAdapters:
    """config: with enable_lora. The model's layers are replaced, once."""

    def __init__(self, model: DecoderModel, ops: Ops, config: EngineConfig):
        self._ops = ops
        self._step = AdapterStep()
        self.manager = AdapterManager(
            ops, model.config, config.max_lora_rank, config.max_cpu_loras, keeps_float32=config.dtype == "float32"
        )
        wrap_layers(model, self._step)

    def load(self, adapter_id: int, path: str) -> AdapterReport:
        adapter, num_bytes = self.manager.load(adapter_id, path)
        self._step.forget()  # whom it displaced
        return AdapterReport(
            rank=adapter.rank,
            num_bytes=num_bytes,
            target_modules=adapter.target_modules,
            base_model_name=adapter.base_model_name,
        )

    def unload(self, adapter_id: int) -> None:
        self.manager.unload(adapter_id)
        self._step.forget()

    def begin(self, plan: SchedulerOutput) -> tuple[SchedulerOutput, dict[int, str]]:
        """Set what the step's rows have; plan.lora must not be None. Returns what is left of the plan, and the
        sentence for each sequence whose adapter cannot be had any more."""
        assert plan.lora is not None
        found: dict[int, PackedAdapter] = {}
        lost: dict[int, str] = {}
        wanted = set(plan.lora) - {0}
        for adapter_id in wanted:
            try:
                found[adapter_id] = self.manager.get(adapter_id, in_use=wanted)
            except ModelLoadError as error:
                lost[adapter_id] = f"The request's LoRA adapter cannot be used any more: {error}"
        failures = {}
        if lost:
            pairs = list(zip(plan.scheduled, plan.lora, strict=True))
            failures = {sequence.seq_id: lost[adapter] for sequence, adapter in pairs if adapter in lost}
            kept = [(sequence, adapter) for sequence, adapter in pairs if adapter not in lost]
            plan = replace(plan, scheduled=[each for each, _ in kept], lora=[each for _, each in kept])
            assert plan.lora is not None
        counts = [sequence.num_scheduled_tokens for sequence in plan.scheduled]
        ids, rows, start = group_rows(plan.lora or (), counts)
        if ids:
            move = self._ops.to_device
            self._step.begin(LoraRows(move(rows), move(start)), tuple(found[adapter_id] for adapter_id in ids))
        return plan, failures

    def end(self) -> None:
        self._step.end()
