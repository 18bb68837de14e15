"""The shell itself: reads messages and commands, shows answers."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from io import TextIOWrapper
from pathlib import Path
from typing import Any

import click

from minisgl_core.errors import InvalidValueError, MinisglError
from minisgl_server.shell.answers import Answers, Message
from minisgl_server.shell.settings import parse_setting

HELP = """\
/set                show how answers are sampled
/set NAME VALUE     change it: /set temperature 0.2; the value 'default' undoes it
/system             show the system prompt
/system TEXT        change it and begin a new conversation; 'default' is the chat template's own
/reset              forget the conversation
/stats              show or hide the statistics after each answer
/help               show this
/exit               leave, as Ctrl-D does
Ctrl-C stops an answer. Everything else is a message to the model."""


class Conversation:
    """What was said so far.

    Args:
        answers: who answers.
        system: a system prompt that every conversation begins with.
        settings: sampling parameters by name, beside the model's own.
        shows_statistics: print a line about each answer.
    """

    def __init__(
        self,
        answers: Answers,
        system: str | None = None,
        settings: Mapping[str, Any] | None = None,
        shows_statistics: bool = False,
    ) -> None:
        self.answers, self.system, self.settings = answers, system, dict(settings or {})
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

    def say(self, text: str) -> None:
        """Print the answer to a message as it comes. Of an answer that is stopped, what was shown stays said.

        Raises:
            MinisglError: there is no answer; the message counts as not said.
        """
        start: list[Message] = [] if self.system is None else [{"role": "system", "content": self.system}]
        question: Message = {"role": "user", "content": text}
        shown: list[str] = []

        def show(piece: str) -> None:
            shown.append(piece)
            click.echo(piece, nl=False)

        turn = self.answers.answer([*start, *self.messages, question], show, self.settings)
        click.echo()
        if self.shows_statistics:
            click.secho(turn.describe(), dim=True)
        self.messages += [question, {"role": "assistant", "content": "".join(shown)}]

    def handle(self, line: str) -> bool:
        """Do what a line asks for. Returns whether to go on.

        Raises:
            MinisglError: see `say`; or a command's value is not allowed, or the line is not text.
        """
        text = check_text("the line", line).strip()
        name, _, rest = text.partition(" ")
        if name == "/exit":
            return False
        if command := self._commands.get(name):
            command(rest.strip())
        elif text.startswith("/"):
            click.echo(f"No such command: {text}. /help lists them.", err=True)
        elif text:
            self.say(text)
        return True

    def _set(self, rest: str) -> None:
        if not rest:
            lines = [f"{name} {value}" for name, value in self.settings.items()]
            return click.echo("\n".join(lines) or "The model's own sampling, all of it.")
        name, value = parse_setting(rest)
        if value is None:
            self.settings.pop(name, None)
        else:
            self.settings[name] = value
        return None

    def _system(self, text: str) -> None:
        if not text:
            return click.echo("The chat template's own." if self.system is None else self.system)
        self.system = None if text == "default" else text
        self.messages.clear()
        return None

    def _toggle_statistics(self) -> None:
        self.shows_statistics = not self.shows_statistics
        click.echo(f"Statistics are {'shown' if self.shows_statistics else 'hidden'}.")


def check_text(name: str, text: str) -> str:
    """`text` itself, which `name` names.

    Raises:
        InvalidValueError: it was made of bytes that are none.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidValueError(name, text, "text in the locale's encoding, as a rule UTF-8") from None
    return text


def run(conversation: Conversation) -> None:
    """Read and answer until the input ends or says /exit.

    Raises:
        MinisglError: there is no answer, where nobody sits at a terminal to ask otherwise.
    """
    if sys.stdin.isatty():
        _run_terminal(conversation)
    else:
        if isinstance(sys.stdin, TextIOWrapper):
            # As on the command line, so that it is `check_text` that finds a line that is not text.
            sys.stdin.reconfigure(errors="surrogateescape")
        all(conversation.handle(line) for line in sys.stdin)


def _run_terminal(conversation: Conversation) -> None:
    """With history and editing; Ctrl-C clears the line, Ctrl-D ends."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.history import FileHistory

    click.echo(f"{conversation.answers.name}: /help lists the commands.")
    conversation.shows_statistics = True
    completer = WordCompleter(list(conversation.commands), sentence=True)
    session: PromptSession[str] = PromptSession(history=FileHistory(str(history_file())), completer=completer)
    goes_on = True
    while goes_on:
        try:
            goes_on = conversation.handle(session.prompt("> ", complete_while_typing=False))
        except MinisglError as error:
            click.echo(f"minisgl: {error}", err=True)
        except KeyboardInterrupt:
            continue
        except EOFError:
            return


def history_file() -> Path:
    """Where typed lines are kept, in the user's state directory; for the user's eyes alone."""
    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "minisgl"
    state.mkdir(mode=0o700, parents=True, exist_ok=True)
    return state / "shell_history"
