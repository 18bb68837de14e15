"""Renders the chat template of a request in a child process, with limits on time and memory."""

import multiprocessing
import os
import resource
import signal
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

import psutil

RENDER_S = 2.0
"""Maximum time to render a template."""
RENDER_BYTES = 512 * 2**20
"""Maximum memory for rendering, beside that of the worker."""
MAX_PROMPT_CHARS = 16 * 2**20
"""Maximum length of a rendered prompt."""


def render_in_child_process(tokenizer: Any, messages: list[dict[str, Any]], options: Mapping[str, Any]) -> str:
    """Return the result of ``tokenizer.apply_chat_template`` for an untrusted template; raise `ValueError` beyond a limit.

    The limits of `minisgl_core.text.render_limit`, which hold for the model's own template, are not enough here: a thread is
    stopped between two operations only, and comparing nested lists is one operation that may take hours. The child is forked, so
    that it starts within milliseconds and has the tokenizer. A lock that another thread held at the fork may never be released
    in the child; the time limit then ends it.
    """
    receiver, sender = multiprocessing.Pipe(duplex=False)
    child = os.fork()
    if child == 0:
        _render(sender, tokenizer, messages, options)
    sender.close()
    try:
        result = receiver.recv_bytes(1 + 4 * MAX_PROMPT_CHARS) if receiver.poll(RENDER_S) else None
    except (EOFError, OSError):
        result = b""
    finally:
        receiver.close()
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    if result is None:
        raise ValueError(f"it takes more than {RENDER_S:g} s to render")
    if not result:
        raise ValueError(f"it takes more than {RENDER_BYTES >> 20} MiB of memory or {MAX_PROMPT_CHARS} characters")
    if result[:1] == b"e":
        raise ValueError(result[1:].decode())
    return result[1:].decode()


def _render(sender: Connection, tokenizer: Any, messages: list[dict[str, Any]], options: Mapping[str, Any]) -> None:
    """Render in the forked process and exit; this must never return into the code of the server.

    Sends ``t`` and the text, ``e`` and an error, or no bytes if the limit on memory or characters is exceeded.
    """
    try:
        size = psutil.Process().memory_info().vms
        resource.setrlimit(resource.RLIMIT_AS, (size + RENDER_BYTES, size + RENDER_BYTES))
        resource.setrlimit(resource.RLIMIT_CPU, (int(RENDER_S) + 1, int(RENDER_S) + 1))
        try:
            text = tokenizer.apply_chat_template(messages, tokenize=False, **options)
            result = b"t" + text.encode() if len(text) <= MAX_PROMPT_CHARS else b""
        except MemoryError:
            result = b""
        except Exception as error:
            result = b"e" + str(error)[:1000].encode(errors="replace")
        sender.send_bytes(result)
    finally:
        os._exit(0)
