"""Read-eval-print loop of the shell: reads messages and commands, and shows responses."""

import json
import os
import sys
from collections.abc import Callable, Mapping
from io import TextIOWrapper
from pathlib import Path
from typing import Any

import click

from minisgl_core.errors import InvalidValueError, MinisglError
from minisgl_core.sampling_params import SamplingParams
from minisgl_core.utils.suggestions import did_you_mean
from minisgl_server.shell.chat_models import LocalModel, Message, RemoteModel

HELP = """\
/set                show the sampling parameters
/set NAME VALUE     change one: /set temperature 0.2; the value 'default' is the model's
/system             show the system prompt
/system TEXT        change it and start a new conversation; 'default' is that of the chat template
/reset              start a new conversation
/stats              show or hide the statistics after each response
/help               show this
/exit               leave; Ctrl-D does the same
Ctrl-C stops a response at its next piece of text, and a second one at once.
Everything else is a message to the model."""
SETTINGS = (
    *("max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty"),
    *("repetition_penalty", "seed", "stop", "ignore_eos"),
)
"""Sampling parameters that ``/set`` accepts: those that apply to a single text response."""


class Conversation:
    """Conversation of the shell. Its `settings` are sampling parameters by name; the model's defaults apply to the others."""

    def __init__(
        self,
        model: LocalModel | RemoteModel,
        system: str | None = None,
        settings: Mapping[str, Any] | None = None,
        shows_statistics: bool = False,
    ) -> None:
        self.model, self.system, self.settings = model, system, dict(settings or {})
        self.shows_statistics = shows_statistics
        self.messages: list[Message] = []
        self._commands: dict[str, Callable[[str], None]] = {
            "/set": self._set,
            "/system": self._system,
            "/reset": lambda _: self.messages.clear(),
            "/stats": lambda _: self._toggle_statistics(),
            "/help": lambda _: click.echo(HELP),
        }
        self.commands = (*self._commands, "/exit")

    def send(self, text: str) -> None:
        """Send a message and print the response as it comes. A response that is stopped stays in the conversation.

        Reasoning content is shown, but does not become part of the conversation, nor does a message without response.
        """
        start: list[Message] = [] if self.system is None else [{"role": "system", "content": self.system}]
        message: Message = {"role": "user", "content": text}
        shown: list[str] = []
        was_reasoning = False

        def show(piece: str, is_reasoning: bool) -> None:
            nonlocal was_reasoning
            if was_reasoning and not is_reasoning:
                click.echo("\n")
            was_reasoning = is_reasoning
            if is_reasoning:
                click.secho(piece, dim=True, nl=False)
            else:
                shown.append(piece)
                click.echo(piece, nl=False)

        try:
            statistics = self.model.chat([*start, *self.messages, message], show, self.settings)
        finally:
            click.echo()
        if self.shows_statistics:
            click.secho(statistics, dim=True)
        self.messages += [message, {"role": "assistant", "content": "".join(shown)}]

    def handle(self, line: str) -> bool:
        """Run a command or send a message. Return False if the shell should exit."""
        text = check_text("the line", line).strip()
        name, _, rest = text.partition(" ")
        if name == "/exit":
            return False
        if command := self._commands.get(name):
            command(rest.strip())
        elif text.startswith("/"):
            click.echo(f"No such command: {text}. /help lists them.", err=True)
        elif text:
            self.send(text)
        return True

    def _set(self, rest: str) -> None:
        if not rest:
            lines = [f"{name} {value}" for name, value in self.settings.items()]
            click.echo("\n".join(lines) or "All sampling parameters have the model's defaults.")
            return
        name, value = parse_setting(rest)
        if value is None:
            self.settings.pop(name, None)
        else:
            self.settings[name] = value

    def _system(self, text: str) -> None:
        if not text:
            click.echo("The system prompt of the chat template." if self.system is None else self.system)
            return
        self.system = None if text == "default" else text
        self.messages.clear()

    def _toggle_statistics(self) -> None:
        self.shows_statistics = not self.shows_statistics
        click.echo(f"Statistics are {'shown' if self.shows_statistics else 'hidden'}.")


def parse_setting(text: str) -> tuple[str, Any]:
    """Return the name and value of a line such as ``temperature 0.2``; the value ``default`` becomes None."""
    name, _, rest = text.partition(" ")
    if name not in SETTINGS:
        raise InvalidValueError("/set", name, f"one of {', '.join(SETTINGS)}", did_you_mean(name, SETTINGS))
    rest = rest.strip()
    if rest in ("", "default"):
        return name, None
    try:
        value = json.loads(rest)
    except ValueError:
        value = rest
    if name == "stop" and not isinstance(value, (str, list)):
        value = rest  # a text that happens to be JSON, such as 5 or null
    SamplingParams(**{"max_tokens": 2**31, name: value})  # checks the value; many tokens allow any min_tokens
    return name, value


def check_text(name: str, text: str) -> str:
    """Return `text`; `name` describes it in errors."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidValueError(name, text, "text in the locale's encoding, as a rule UTF-8") from None
    return text


def run(conversation: Conversation) -> None:
    """Read and handle lines until the input ends or /exit. Errors and Ctrl-C end it unless standard input is a terminal."""
    if sys.stdin.isatty():
        _run_terminal(conversation)
    else:
        if isinstance(sys.stdin, TextIOWrapper):
            # Lines that are not text are then found by `check_text`, as for arguments.
            sys.stdin.reconfigure(errors="surrogateescape")
        for line in sys.stdin:
            if not conversation.handle(line):
                return
            if conversation.model.was_interrupted:
                raise KeyboardInterrupt


def _run_terminal(conversation: Conversation) -> None:
    """Run the loop with history and line editing; Ctrl-C clears the line, Ctrl-D exits."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    click.echo(f"{conversation.model.name}: /help lists the commands.")
    conversation.shows_statistics = True
    completer = WordCompleter(list(conversation.commands), sentence=True)
    history: FileHistory | InMemoryHistory
    try:
        history = FileHistory(str(history_file()))
    except (OSError, RuntimeError) as error:  # a RuntimeError if the user has no home
        click.echo(f"The history of lines is not kept: {error}", err=True)
        history = InMemoryHistory()
    session: PromptSession[str] = PromptSession(history=history, completer=completer)
    is_running = True
    while is_running:
        try:
            is_running = conversation.handle(session.prompt("> ", complete_while_typing=False))
        except MinisglError as error:
            click.echo(f"minisgl: {error}", err=True)
        except KeyboardInterrupt:
            continue
        except EOFError:
            return


def history_file() -> Path:
    """Return the file of the line history, in the user's state directory; only the user can read it."""
    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "minisgl"
    state.mkdir(mode=0o700, parents=True, exist_ok=True)
    file = state / "shell_history"
    file.open("ab").close()
    return file
