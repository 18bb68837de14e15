"""The shell itself: reads messages and commands, shows answers."""

from __future__ import annotations

import os
import sys
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

        def show(piece: str) -> None:
            shown.append(piece)
            click.echo(piece, nl=False)

        self.answers.answer([*self.messages, question], show)
        click.echo()
        self.messages += [question, {"role": "assistant", "content": "".join(shown)}]

    def handle(self, line: str) -> bool:
        """Do what a line asks for. Returns whether to go on.

        Raises:
            MinisglError: see `say`.
        """
        text = line.strip()
        if text == "/reset":
            self.reset()
        elif text == "/help":
            click.echo(HELP)
        elif text.startswith("/") and text != "/exit":
            click.echo(f"No such command: {text}. /help lists them.", err=True)
        elif text and text != "/exit":
            self.say(text)
        return text != "/exit"


def run(conversation: Conversation) -> None:
    """Read and answer until the input ends or says /exit.

    Raises:
        MinisglError: there is no answer, where nobody sits at a terminal to ask otherwise.
    """
    if sys.stdin.isatty():
        _run_terminal(conversation)
    else:
        all(conversation.handle(line) for line in sys.stdin)


def _run_terminal(conversation: Conversation) -> None:
    """With history and editing; Ctrl-C clears the line, Ctrl-D ends."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.history import FileHistory

    click.echo(f"{conversation.answers.name}: /help lists the commands.")
    completer = WordCompleter(list(COMMANDS), sentence=True)
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
