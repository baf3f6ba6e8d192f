"""Run the commands of the pages and put what they print behind them: python docs/print_outputs.py [PAGE.md ...]

A block of sh with curl in it, or of Python with openai in it, that is followed by a block without a language or of
json is run against a server on the default model (another: OCTAVO_DOCS_MODEL), and the second block is replaced by what
it printed. `<!-- server: --lenient -->` anywhere above sets the server's options for the blocks below it. The server's
own output is in the file server.log of the folder that the commands run in.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_PART = re.compile(
    r"<!-- server: (?P<options>.*?) -->|"
    r"```(?P<language>sh|python)\n(?P<code>(?:(?!```).*\n)*?)```\n(?P<between>\n```(?:json)?\n)(?P<output>(?:(?!```).*\n)*?)```",
)
_SHOWN_ADDRESS = "127.0.0.1:8000"


class Server:
    def __init__(self, options: str, folder: Path):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{free.getsockname()[1]}"
        command = [sys.executable, "-m", "octavo.cli.main", "serve", *options.split()]
        command += ["--port", self.address.rpartition(":")[2], "--max-num-seqs", "16"]
        if model := os.environ.get("OCTAVO_DOCS_MODEL"):
            command += ["--model", model]
        with (folder / "server.log").open("w") as log:
            environment = {**os.environ, "PYTHONPATH": str(ROOT)}
            self._process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, env=environment)
        while not self._is_ready():
            if self._process.poll() is not None:
                raise SystemExit((folder / "server.log").read_text())
            time.sleep(0.2)

    def _is_ready(self) -> bool:
        try:
            return urllib.request.urlopen(f"http://{self.address}/health", timeout=5).status == 200
        except OSError:
            return False

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(60)


def print_outputs(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    server: Server | None = None
    options = ""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)

        def put_output(match: re.Match[str]) -> str:
            nonlocal server, options
            if match["options"] is not None:
                options = match["options"]
                if server is not None:
                    server.stop()
                server = None
                return match[0]
            language, code = match["language"], match["code"]
            if ("curl" if language == "sh" else "openai") not in code:
                return match[0]
            server = server or Server(options, folder)
            code_here = code.replace(_SHOWN_ADDRESS, server.address)
            program = ["bash", "-c", code_here] if language == "sh" else [sys.executable, "-c", code_here]
            result = subprocess.run(program, capture_output=True, text=True, cwd=folder, timeout=120)
            output = (result.stdout + result.stderr).replace(server.address, _SHOWN_ADDRESS).replace(name, "~")
            output = "".join(line.rstrip() + "\n" for line in output.rstrip().splitlines())
            return f"```{language}\n{code}```\n{match['between']}{output}```"

        try:
            text = _PART.sub(put_output, text)
        finally:
            if server is not None:
                server.stop()
    page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    named = [Path(argument) for argument in sys.argv[1:]]
    for page in named or sorted(ROOT.glob("docs/**/*.md")):
        sys.stdout.write(f"{page}\n")
        print_outputs(page)
