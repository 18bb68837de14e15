from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import pytest

from minisgl_core.errors import MinisglError
from minisgl_server.shell.chat_models import LocalModel, RemoteModel, _contents
from minisgl_server.shell.command import TEMPERATURE
from minisgl_server.shell.repl import Conversation, parse_setting, run
from minisgl_server.web_ui.routes import STATIC

PROMPT, ANSWER = r"\x1b\[\?2004h.*>", r"\x1b\[\?2004l"
"""A prompt begins by switching the terminal's bracketed paste on and ends by switching it off."""
MINISGL = str(Path(sys.executable).with_name("minisgl"))


class Terminal:
    """``minisgl shell`` in a pseudo-terminal."""

    def __init__(self, home: Path, *flags: str) -> None:
        environ = {**os.environ, "XDG_STATE_HOME": str(home), "PROMPT_TOOLKIT_NO_CPR": "1", "TERM": "xterm"}
        self._pid, self._fd = pty.fork()
        if self._pid == 0:
            os.execve(MINISGL, ["minisgl", "shell", *flags], environ)
        self.screen = ""

    def type(self, keys: str) -> None:
        os.write(self._fd, keys.encode())

    def wait_for(self, pattern: str) -> str:
        """Read until the screen shows `pattern` after the previous match. Return the output up to it."""
        while not (found := re.search(pattern, self.screen, re.DOTALL)):
            if not select.select([self._fd], [], [], 60)[0]:
                pytest.fail(f"waited for {pattern!r}, the screen has {self.screen!r}")
            self.screen += os.read(self._fd, 65536).decode(errors="replace")
        before, self.screen = self.screen[: found.start()], self.screen[found.end() :]
        return before

    def status(self) -> int:
        try:
            while os.read(self._fd, 65536):
                pass
        except OSError:
            pass  # Linux reports the end of a terminal by this error
        os.close(self._fd)
        return os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])


@pytest.fixture(params=["in process", "over a server"])
def flags(request: pytest.FixtureRequest, tiny_checkpoint: Path) -> Iterator[list[str]]:
    if request.param == "in process":
        yield ["--model", str(tiny_checkpoint), "--num-pages", "1100"]
    else:
        launch: Callable[..., Any] = request.getfixturevalue("launch")
        server = launch("--model", str(tiny_checkpoint), "--num-pages", "1100").wait_started()
        yield ["--url", server.url]


def test_on_a_terminal(flags: list[str], tmp_path: Path) -> None:
    """A random model generates without end, so that Ctrl-C interrupts an output."""
    terminal = Terminal(tmp_path, *flags)
    terminal.wait_for("/help lists the commands")
    terminal.wait_for(PROMPT)
    for turn in range(2):
        terminal.type(f"Tell me more, {turn}\r")
        terminal.wait_for(ANSWER + ".{100}")
        terminal.type("\x03")
        terminal.wait_for(PROMPT)
    terminal.type("half a line\x03")
    terminal.wait_for(PROMPT)
    terminal.type("/help\r")
    terminal.wait_for("start a new conversation")
    terminal.wait_for(PROMPT)
    terminal.type("/set max_tokens 5\r")
    terminal.wait_for(PROMPT)
    terminal.type("Briefly\r")
    line = terminal.wait_for(r"5 output tokens, [\d.]+ s\]")
    assert re.search(r"\[[\d.]+ s to the first token, [\d.]+ tok/s, \d+ prompt tokens \(\d+ cached\), $", line)
    terminal.wait_for(PROMPT)
    terminal.type("/set colour red\r")
    terminal.wait_for("/set='colour' is not valid: must be one of max_tokens")
    terminal.wait_for(PROMPT)
    terminal.type("/stats\r")
    terminal.wait_for("hidden")
    terminal.wait_for(PROMPT)
    terminal.type("/reset\r")
    terminal.wait_for(PROMPT)
    terminal.type("\x04")
    assert terminal.status() == 0
    history = (tmp_path / "minisgl" / "shell_history").read_text()
    assert history.count("Tell me more") == 2


def test_a_second_ctrl_c_ends_the_shell_immediately(tiny_checkpoint: Path) -> None:
    def press_twice(piece: str, is_reasoning: bool) -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    messages, handler = [{"role": "user", "content": "Hi"}], signal.getsignal(signal.SIGINT)
    with LocalModel({"model": str(tiny_checkpoint), "num_pages": 1100}) as model:
        with pytest.raises(KeyboardInterrupt):
            model.chat(messages, press_twice, {})
        assert signal.getsignal(signal.SIGINT) is handler
        model.chat(messages, lambda *_: signal.raise_signal(signal.SIGINT), {})
        assert model.was_interrupted
        assert "5 output tokens" in model.chat(messages, lambda *_: None, {"max_tokens": 5})
        assert not model.was_interrupted


def shell(*flags: str, text: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [MINISGL, "shell", *flags], input=text, capture_output=True, text=True, check=False, timeout=200
    )


def test_in_a_pipe_each_line_is_a_message(server: Any) -> None:
    done = shell("--url", f"{server.url}/v1", "--max-tokens", "5", text="Hi\n\n/nope\nHi\n/exit\nnever\n")
    assert done.returncode == 0
    assert done.stdout.strip()
    assert done.stderr == "No such command: /nope. /help lists them.\n"


def test_a_closed_standard_input_is_refused() -> None:
    done = subprocess.run(["sh", "-c", f"{MINISGL} shell <&-"], capture_output=True, text=True, check=False)
    message = "minisgl: standard input (closed) is not valid: must be a terminal, a pipe or a file.\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", message)


def test_ctrl_c_in_a_pipe_ends_the_shell(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(RemoteModel):
        def chat(self, messages: Any, show: Any, settings: Any) -> str:
            return super().chat(messages, lambda *_: signal.raise_signal(signal.SIGINT), settings)

    monkeypatch.setattr("sys.stdin", io.StringIO("Hi\nnever\n"))
    conversation = Conversation(Interrupted(server.url))
    with pytest.raises(KeyboardInterrupt):
        run(conversation)
    assert [message["content"] for message in conversation.messages if message["role"] == "user"] == ["Hi"]


def test_the_history_file_may_be_unwritable(server: Any, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    terminal = Terminal(tmp_path / "file", "--url", server.url)
    terminal.wait_for("The history of lines is not kept: .*Not a directory")
    terminal.wait_for(PROMPT)
    terminal.type("/exit\r")
    assert terminal.status() == 0


def test_commands_set_sampling_and_system_prompt(server: Any) -> None:
    text = """/system
/set
/set max_tokens 3
/set temperature 0
/set ignore_eos true
/set
Hi
/system Answer in French.
/system
Hi
/set max_tokens default
/set temperature default
/set ignore_eos default
/set
/set temperature -1
"""
    done = shell("--url", server.url, "--system", "You are a cat.", text=text)
    assert done.stderr.startswith("minisgl: temperature=-1 is not valid")
    assert done.returncode == 2
    lines = done.stdout.splitlines()
    assert lines[:5] == ["You are a cat.", "temperature 0.7", "temperature 0", "max_tokens 3", "ignore_eos True"]
    assert "Answer in French." in lines[6:]
    assert lines[-1] == "All sampling parameters have the model's defaults."
    assert "tok/s" not in done.stdout, "nothing else is written to a pipe"


def test_the_default_temperature_is_that_of_the_web_ui() -> None:
    page = (STATIC / "index.html").read_text()
    assert re.findall('id="temperature".* value="(.*?)"', page) == [str(TEMPERATURE)]


def test_the_temperature_of_a_generation_config_stays(
    launch: Callable[..., Any], tiny_checkpoint: Path, tmp_path: Path
) -> None:
    model = shutil.copytree(tiny_checkpoint, tmp_path / "model")
    (model / "generation_config.json").write_text('{"temperature": 0.3, "top_k": 20}')
    url = launch("--model", str(model), "--num-pages", "1100").wait_started().url
    for flags in (["--model", str(model), "--num-pages", "1100"], ["--url", url]):
        assert shell(*flags, text="/set\n").stdout == "All sampling parameters have the model's defaults.\n"
    [card] = httpx.get(f"{url}/v1/models").json()["data"]
    assert card["default_sampling"] == {"temperature": 0.3, "top_k": 20}


@pytest.mark.parametrize("card", [{}, {"default_sampling": None}, {"default_sampling": "none"}])
def test_servers_that_list_no_defaults_choose_the_temperature(card: dict[str, Any]) -> None:
    class OtherServer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.wfile.write(b"HTTP/1.0 200 OK\r\n\r\n" + json.dumps({"data": [{"id": "other", **card}]}).encode())

    with HTTPServer(("127.0.0.1", 0), OtherServer) as other:
        Thread(target=other.handle_request, daemon=True).start()
        done = shell("--url", f"http://127.0.0.1:{other.server_port}", text="/set\n")
    assert done.stdout == "All sampling parameters have the model's defaults.\n"


@pytest.mark.parametrize("separator", ["\u2028", "\u0085"])
def test_outputs_may_contain_unicode_line_separators(server: Any, separator: str) -> None:
    shown: list[str] = []
    answer = f"first{separator}second"
    settings = {"temperature": 0, "structured_outputs": {"choice": [answer]}}
    statistics = RemoteModel(server.url).chat(
        [{"role": "user", "content": "Hi"}], lambda piece, _: shown.append(piece), settings
    )
    assert "".join(shown) == answer
    assert "output tokens" in statistics, "the events after the text were read, too"


@pytest.mark.parametrize(
    ("line", "value"), [("stop 5", "5"), ("stop null", "null"), ('stop "5"', "5"), ('stop ["a", "b"]', ["a", "b"])]
)
def test_a_stop_setting_is_a_string_or_a_list(line: str, value: Any) -> None:
    assert parse_setting(line) == ("stop", value)


def test_invalid_utf8_is_refused(server: Any) -> None:
    environ = {**os.environ, "PYTHONIOENCODING": "utf-8"}
    command = [MINISGL, "shell", "--url", server.url]
    done = subprocess.run(command, input=b"/set seed 7\n/set\nHi \xff\n", env=environ, capture_output=True, timeout=200)
    assert (done.returncode, done.stdout) == (2, b"temperature 0.7\nseed 7\n"), "the lines before it count"
    assert done.stderr.startswith(b"minisgl: the line='Hi \\udcff\\n' is not valid: must be text")
    done = subprocess.run([*command, "--system", b"\xff"], env=environ, capture_output=True, timeout=200)
    assert done.returncode == 2
    assert done.stderr.startswith(b"minisgl: --system=")


def test_invalid_urls_and_flags_are_refused(server: Any) -> None:
    nobody = shell("--url", "http://127.0.0.1:1", text="Hi\n")
    assert nobody.returncode == 2
    assert "--url" in nobody.stderr
    both = shell("--url", server.url, "--page-size", "16", text="Hi\n")
    assert both.returncode == 2
    assert "--page-size" in both.stderr


def test_reasoning_content_is_shown_but_not_sent_again(capsys: pytest.CaptureFixture[str]) -> None:
    deltas = [
        {"role": "assistant", "content": ""},
        {"reasoning_content": "Hm"},
        {"reasoning_content": "."},
        {"content": "Yes"},
    ]
    lines = [b"data: " + json.dumps({"choices": [{"delta": each}]}).encode() for each in deltas]
    pieces = [piece for line in lines for piece in _contents(line, {})]
    assert pieces == [("Hm", True), (".", True), ("Yes", False)]

    class Model:
        def chat(self, messages: Any, show: Any, settings: Any) -> str:
            for piece in pieces:
                show(*piece)
            return ""

    conversation = Conversation(Model())  # type: ignore[arg-type]
    conversation.send("Is it?")
    assert capsys.readouterr().out == "Hm.\n\nYes\n"
    assert [each["content"] for each in conversation.messages] == ["Is it?", "Yes"]


@pytest.mark.parametrize("event", ["{", "[]", '{"choices": [{}]}', '{"error": "no"}', '{"choices": 3}'])
def test_a_stream_in_another_format_is_an_error(event: str) -> None:
    with pytest.raises(MinisglError, match="not in OpenAI's format") as caught:
        list(_contents(b"data: " + event.encode() + b"\r", {}))
    assert event in str(caught.value)
    with pytest.raises(MinisglError, match=r"^too slow$"):
        list(_contents(b'data: {"error": {"message": "too slow"}}', {}))
