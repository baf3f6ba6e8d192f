"""Qwen3 (dense): a Llama whose q and k heads are normed before the rotary embedding. Qwen Team 2025.

The norms are `Attention`'s, which reads `config.has_qk_norm`; nothing else differs.
"""

from __future__ import annotations

from octavo.models.llama import LlamaModel


class Qwen3Model(LlamaModel):
    pass
