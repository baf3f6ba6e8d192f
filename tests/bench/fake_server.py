"""A server with OpenAI's API that gives the answers a test wants, byte for byte: sockets and a thread, no engine."""

from __future__ import annotations

import json
import socketserver
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Answer = Callable[["Connection", dict[str, Any]], None]


class Connection:
    """What an answer can do with its client."""

    def __init__(self, write: Callable[[bytes], object]):
        self._write = write

    def send(self, data: bytes) -> None:
        self._write(data)

    def send_json(self, status: int, body: Any) -> None:
        content = json.dumps(body).encode()
        head = (
            f"HTTP/1.1 {status} Something\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        )
        self.send(head.encode() + content)

    def start_stream(self) -> None:
        self.send(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")

    def send_event(self, event: Any) -> None:
        data = f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n".encode()
        self.send(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    def end_stream(self) -> None:
        self.send_event("[DONE]")
        self.send(b"0\r\n\r\n")


def text_event(text: str, finish_reason: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": text, "finish_reason": finish_reason}]}


def usage_event(num_prompt: int, num_output: int, **more: Any) -> dict[str, Any]:
    return {"choices": [], "usage": {"prompt_tokens": num_prompt, "completion_tokens": num_output, **more}}


def answer_in_full(connection: Connection, body: dict[str, Any]) -> None:
    """As many tokens as were asked for."""
    is_chat = "messages" in body
    prompt = body["messages"][0]["content"] if is_chat else body["prompt"]
    connection.start_stream()
    if is_chat:
        connection.send_event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
    for _ in range(body["max_tokens"]):
        event = {"choices": [{"index": 0, "delta": {"content": "a "}}]} if is_chat else text_event("a ")
        connection.send_event(event)
    connection.send_event(usage_event(len(prompt.split()), body["max_tokens"]))
    connection.end_stream()


class FakeServer:
    """bodies: of the requests so far, in order of arrival"""

    def __init__(self, url: str):
        self.url = url
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[str] = []


@contextmanager
def fake_server(answer: Answer = answer_in_full, models: Any = None) -> Iterator[FakeServer]:
    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            head = b""
            while not head.endswith(b"\r\n\r\n"):
                line = self.rfile.readline()
                if not line:
                    return
                head += line
            connection = Connection(self.wfile.write)
            server.headers.append(head.decode())
            try:
                if head.startswith(b"GET"):
                    connection.send_json(200, models or {"data": [{"id": "fake-model"}]})
                    return
                length = next(
                    int(line.split(b":")[1])
                    for line in head.split(b"\r\n")
                    if line.lower().startswith(b"content-length")
                )
                body = json.loads(self.rfile.read(length))
                server.bodies.append(body)
                answer(connection, body)
            except (BrokenPipeError, ConnectionResetError):
                pass  # the client has left, which some tests want

    class Listener(socketserver.ThreadingTCPServer):
        allow_reuse_address = True
        request_queue_size = 64

    with Listener(("127.0.0.1", 0), Handler) as listener:
        server = FakeServer(f"http://127.0.0.1:{listener.server_address[1]}")
        thread = threading.Thread(target=listener.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            listener.shutdown()
            thread.join()
