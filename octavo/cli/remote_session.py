"""A conversation with a running server, ours or any other with OpenAI's API. Standard library only."""

from __future__ import annotations

import asyncio
import json
import threading
import urllib.error
import urllib.request
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from typing import Any
from urllib.parse import urlsplit

from octavo import __version__
from octavo.cli.reasoning import Reasoning
from octavo.core.sampling_params import SamplingParams
from octavo.errors import AuthenticationError, ConfigError, InvalidRequestError, RequestFailedError

_MODEL_LIST_TIMEOUT_S = 10.0
# Between two pieces of an answer; a long prompt in a long queue may take its time.
_READ_TIMEOUT_S = 600.0
_MAX_ERROR_BYTES = 65536


class RemoteSession:
    """base_url: ends with /v1, or whatever the server has there. model: as requests name it"""

    def __init__(self, base_url: str, model: str, api_key: str | None):
        self._base_url = base_url
        self._api_key = api_key
        self.model = model

    async def answer(self, messages: Sequence[dict[str, Any]], params: SamplingParams) -> AsyncGenerator[str, None]:
        """The answer's text as it comes, and `Reasoning` before it. Closing it aborts the answer at the server.

        Raises ClientError, RequestFailedError.
        """
        body = make_body(self.model, messages, params)
        loop = asyncio.get_running_loop()
        pieces: asyncio.Queue[str | BaseException | None] = asyncio.Queue()
        has_left = threading.Event()

        def put(piece: str | BaseException | None) -> None:
            if not has_left.is_set():
                loop.call_soon_threadsafe(pieces.put_nowait, piece)

        # A daemon: whoever leaves does not wait for a server that says nothing.
        reader = threading.Thread(target=self._read_answer, args=(body, put, has_left.is_set), daemon=True)
        reader.start()
        try:
            while (piece := await pieces.get()) is not None:
                if isinstance(piece, BaseException):
                    raise piece
                yield piece
        finally:
            has_left.set()

    def _read_answer(
        self, body: dict[str, Any], put: Callable[[str | BaseException | None], None], has_left: Callable[[], bool]
    ) -> None:
        try:
            with open_url(f"{self._base_url}/chat/completions", self._api_key, body, _READ_TIMEOUT_S) as response:
                is_stream = response.headers.get_content_type() == "text/event-stream"
                for piece in read_pieces(response) if is_stream else read_whole(response.read()):
                    if has_left():
                        return
                    if piece:
                        put(piece)
        except (InvalidRequestError, AuthenticationError, RequestFailedError) as error:
            put(error)
        except (OSError, ValueError) as error:
            put(RequestFailedError(f"The connection to {self._base_url} broke: {_name(error)}."))
        else:
            put(None)


def connect(url: str, model: str | None, api_key: str | None) -> RemoteSession:
    """model: by default the first that the server lists. Raises ConfigError, ClientError, RequestFailedError."""
    base_url = make_base_url(url)
    if model is None:
        with open_url(f"{base_url}/models", api_key, None, _MODEL_LIST_TIMEOUT_S) as response:
            try:
                model = str(json.load(response)["data"][0]["id"])
            except (ValueError, LookupError, TypeError):
                raise RequestFailedError(f"{base_url}/models lists no model; name one with --model.") from None
    return RemoteSession(base_url, model, api_key)


def make_base_url(url: str) -> str:
    """With /v1 at its end, unless it ends with a version already. Raises ConfigError."""
    parts = urlsplit(url if "://" in url else f"http://{url}")
    try:
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        is_url = False
    if not is_url:
        raise ConfigError(f"--url is {url!r}, but it must be a URL such as http://127.0.0.1:8000.", option="--url")
    path = parts.path.rstrip("/")
    if not path.rpartition("/")[2].startswith("v"):
        path += "/v1"
    return f"{parts.scheme}://{parts.netloc}{path}"


def make_body(model: str, messages: Sequence[dict[str, Any]], params: SamplingParams) -> dict[str, Any]:
    """What is not OpenAI's is sent only where it changes something, as other servers may refuse it."""
    body: dict[str, Any] = {
        "model": model,
        "messages": list(messages),
        "stream": True,
        "temperature": params.temperature,
        "top_p": params.top_p,
    }
    if params.max_tokens is not None:
        body["max_tokens"] = params.max_tokens
    if params.seed is not None:
        body["seed"] = params.seed
    if params.top_k:
        body["top_k"] = params.top_k
    if params.min_p:
        body["min_p"] = params.min_p
    return body


def open_url(url: str, api_key: str | None, body: dict[str, Any] | None, timeout_s: float) -> Any:
    """The response, to be closed. Raises ClientError for a refusal, RequestFailedError for everything else."""
    headers = {"User-Agent": f"octavo/{__version__}", "Accept": "application/json, text/event-stream"}
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    data = None
    if body is not None:
        headers["Content-Type"] = "application/json"
        data = json.dumps(body).encode()
    try:
        return urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=timeout_s)
    except urllib.error.HTTPError as error:
        with error:
            message = f"HTTP {error.code}: {_read_message(error.read(_MAX_ERROR_BYTES)) or error.reason}"
        if error.code in (401, 403):
            raise AuthenticationError(f"{message} (give a key with --api-key or OCTAVO_API_KEY)") from None
        kind = InvalidRequestError if error.code < 500 else RequestFailedError
        raise kind(message) from None
    except urllib.error.URLError as error:
        raise RequestFailedError(f"No answer from {url}: {_name(error.reason)}. Is the server there?") from None
    except (OSError, ValueError) as error:
        raise RequestFailedError(f"No answer from {url}: {_name(error)}.") from None


def read_pieces(lines: Iterator[bytes]) -> Iterator[str]:
    """The texts of a stream of server-sent events. Raises RequestFailedError for an error in it, or a cut-off."""
    is_whole = False
    for line in lines:
        if not line.startswith(b"data:"):
            continue
        content = line[5:].strip()
        if content == b"[DONE]":
            return
        event = json.loads(content)
        if isinstance(event, dict) and event.get("error"):
            raise RequestFailedError(_message_of(event) or "The server could not finish this answer.")
        for choice in event.get("choices") or ():
            is_whole = is_whole or bool(choice.get("finish_reason"))
            yield from _read_texts(choice.get("delta") or {})
    if not is_whole:
        raise RequestFailedError("The server closed the connection in the middle of its answer.")


def read_whole(content: bytes) -> list[str]:
    """The texts of an answer that came in one piece."""
    try:
        return list(_read_texts(json.loads(content)["choices"][0]["message"]))
    except (ValueError, LookupError, TypeError, AttributeError):
        raise RequestFailedError(f"The server's answer is no chat completion: {content[:80]!r}.") from None


def _read_texts(message: dict[str, Any]) -> Iterator[str]:
    """Of a message, or of a piece of one. Some servers call its reasoning by the shorter name, or by both."""
    yield Reasoning(message.get("reasoning_content") or message.get("reasoning") or "")
    yield str(message.get("content") or "")


def _read_message(content: bytes) -> str:
    try:
        return _message_of(json.loads(content))
    except ValueError:
        return ""


def _message_of(body: Any) -> str:
    """{"error": {"message": ...}}, {"error": "..."}, {"message": ...} and {"detail": ...} are all in use."""
    if not isinstance(body, dict):
        return ""
    error = body.get("error", body)
    if isinstance(error, dict):
        error = error.get("message") or error.get("detail") or ""
    return str(error)


def _name(error: object) -> str:
    return str(getattr(error, "strerror", None) or error or type(error).__name__).lower().rstrip(".")
