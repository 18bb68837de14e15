"""The shell itself: reads messages and commands, shows answers."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import click

from minisgl_core.errors import MinisglError
from minisgl_server.shell.answers import Answers, Message

HELP = """\
/reset  forget the conversation
/help   show this
/exit   leave, as Ctrl-D does
Ctrl-C stops an answer. Everything else is a message to the model."""
COMMANDS = ("/reset", "/help", "/exit")


class Conversation:
    """What was said so far.

    Args:
        answers: who answers.
        system: a system prompt that every conversation begins with.
    """

    def __init__(self, answers: Answers, system: str | None = None) -> None:
        self.answers = answers
        self._start: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        self.messages = list(self._start)

    def reset(self) -> None:
        """Begin anew."""
        self.messages = list(self._start)

    def say(self, text: str) -> None:
        """Print the answer to a message as it comes. Of an answer that is stopped, what was shown stays said.

        Raises:
            MinisglError: there is no answer; the message counts as not said.
        """
        question: Message = {"role": "user", "content": text}
        shown: list[str] = []
        try:
            with _interrupts(self.answers.may_be_interrupted) as stopped:
                pieces = self.answers.stream([*self.messages, question])
                with closing(pieces):  # type: ignore[type-var]  # both are generators
                    for piece in pieces:
                        shown.append(piece)
                        click.echo(piece, nl=False)
                        if stopped:
                            break
        except KeyboardInterrupt:
            pass
        click.echo()
        self.messages += [question, {"role": "assistant", "content": "".join(shown)}]


def run(conversation: Conversation) -> None:
    """Read and answer until the input ends or says /exit.

    Raises:
        MinisglError: there is no answer, where nobody sits at a terminal to ask otherwise.
    """
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        click.echo(f"{conversation.answers.name}: /help lists the commands.")
    for line in _prompted() if is_terminal else sys.stdin:
        text = line.strip()
        if text == "/exit":
            return
        if text == "/reset":
            conversation.reset()
        elif text == "/help":
            click.echo(HELP)
        elif text.startswith("/"):
            click.echo(f"No such command: {text}. /help lists them.", err=True)
        elif text:
            try:
                conversation.say(text)
            except MinisglError as error:
                if not is_terminal:
                    raise
                click.echo(f"minisgl: {error}", err=True)


def _prompted() -> Iterator[str]:
    """Lines typed on a terminal, with history and editing; Ctrl-C clears the line, Ctrl-D ends."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.history import FileHistory

    completer = WordCompleter(list(COMMANDS), sentence=True)
    session: PromptSession[str] = PromptSession(history=FileHistory(str(history_file())), completer=completer)
    while True:
        try:
            yield session.prompt("> ", complete_while_typing=False)
        except KeyboardInterrupt:
            continue
        except EOFError:
            return


def history_file() -> Path:
    """Where typed lines are kept, in the user's state directory; for the user's eyes alone."""
    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "minisgl"
    state.mkdir(mode=0o700, parents=True, exist_ok=True)
    return state / "shell_history"


@contextmanager
def _interrupts(may_raise: bool) -> Iterator[list[bool]]:
    """Ctrl-C inside raises KeyboardInterrupt, or only fills the list, where an exception could break a step."""
    stopped: list[bool] = []

    def note(*_: object) -> None:
        stopped.append(True)
        if may_raise:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, note)
    try:
        yield stopped
    finally:
        signal.signal(signal.SIGINT, before)
