"""Endpoints that other servers have and this one does not: a 404 says so, instead of pointing to a neighbour."""

from __future__ import annotations

# Beginnings of paths, each with what is there, and what this server has for it, if anything. The longest one counts.
_OTHERS: dict[str, tuple[str, str]] = {
    # OpenAI
    "/v1/responses": ("OpenAI's Responses API", "send chats to /v1/chat/completions"),
    "/v1/embeddings": ("OpenAI's embeddings", ""),
    "/v1/audio/": ("OpenAI's audio API", ""),
    "/v1/images/": ("OpenAI's image API", ""),
    "/v1/videos": ("OpenAI's video API", ""),
    "/v1/moderations": ("OpenAI's moderation", ""),
    "/v1/files": ("OpenAI's files", ""),
    "/v1/uploads": ("OpenAI's files", ""),
    "/v1/batches": ("OpenAI's batches", "send the requests one by one"),
    "/v1/fine_tuning/": ("OpenAI's fine-tuning", ""),
    "/v1/fine-tunes": ("OpenAI's fine-tuning", ""),
    "/v1/assistants": ("OpenAI's assistants", "send chats to /v1/chat/completions"),
    "/v1/threads": ("OpenAI's assistants", "send chats to /v1/chat/completions"),
    "/v1/vector_stores": ("OpenAI's vector stores", ""),
    "/v1/conversations": ("OpenAI's conversations", "send chats to /v1/chat/completions"),
    "/v1/realtime": ("OpenAI's realtime API", ""),
    "/v1/edits": ("OpenAI's edits", "send chats to /v1/chat/completions"),
    "/v1/chat/completions/": ("stored completions", "this server keeps no answers"),
    # Anthropic
    "/v1/messages": ("Anthropic's messages API", "send chats to /v1/chat/completions"),
    "/v1/complete": ("Anthropic's older API", "send prompts to /v1/completions"),
    # vLLM and others that rank
    "/v1/score": ("vLLM's scoring", ""),
    "/score": ("vLLM's scoring", ""),
    "/v1/rerank": ("reranking", ""),
    "/v2/rerank": ("reranking", ""),
    "/rerank": ("reranking", ""),
    "/pooling": ("vLLM's pooling", ""),
    "/classify": ("vLLM's classification", ""),
    "/v1/load_lora_adapter": ("vLLM's loading of adapters", ""),
    "/v1/unload_lora_adapter": ("vLLM's loading of adapters", ""),
    "/generate": ("vLLM's or TGI's own API", "send prompts to /v1/completions"),
    "/generate_stream": ("TGI's own API", "send prompts to /v1/completions, with stream true"),
    "/ping": ("vLLM's ping", "use /health"),
    "/load": ("vLLM's load", "use /metrics"),
    # llama.cpp
    "/completion": ("llama.cpp's own API", "send prompts to /v1/completions"),
    "/embedding": ("llama.cpp's embeddings", ""),
    "/infill": ("llama.cpp's infilling", ""),
    "/props": ("llama.cpp's properties", "use /v1/models"),
    "/slots": ("llama.cpp's slots", "use /metrics"),
    # Ollama
    "/api/generate": ("Ollama's API", "send prompts to /v1/completions"),
    "/api/chat": ("Ollama's API", "send chats to /v1/chat/completions"),
    "/api/tags": ("Ollama's API", "use /v1/models"),
    "/api/show": ("Ollama's API", "use /v1/models"),
    "/api/": ("Ollama's API", "the OpenAI API is at /v1"),
}
# Paths of ours without /v1, which clients send when their base URL lacks it.
_WITHOUT_VERSION = ("/chat/completions", "/completions", "/models")


def explain_path(path: str) -> str | None:
    """A sentence about a path of another server; None if it is none that we know."""
    for prefix in sorted(_OTHERS, key=len, reverse=True):
        if path == prefix.rstrip("/") or path.startswith(prefix.rstrip("/") + "/"):
            what, instead = _OTHERS[prefix]
            return f"This server does not have {what} ({path[:100]}){'; ' + instead if instead else ''}."
    for ours in _WITHOUT_VERSION:
        if path in (ours, f"/v1/v1{ours}"):
            return f"There is nothing at {path}; it is /v1{ours}, so a client's base URL must end in /v1, once."
    return None
