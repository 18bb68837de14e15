"""Rendering of chat templates that requests bring, each in a process of its own with limits."""

from __future__ import annotations

import multiprocessing
import os
import resource
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

import psutil

RENDER_S = 2.0
"""Longest time to render one template."""
RENDER_BYTES = 512 * 2**20
"""Most memory that rendering takes, beside the worker's own."""
MAX_PROMPT_CHARS = 16 * 2**20
"""Longest text that a template may make."""


def render_in_process(tokenizer: Any, messages: list[dict[str, Any]], options: Mapping[str, Any]) -> str:
    """Return what ``tokenizer.apply_chat_template`` makes of a template that is not trusted.

    A thread could neither be stopped nor kept from taking memory. The process is a copy of this one, so that it starts in
    milliseconds and has the tokenizer.

    Raises:
        ValueError: the template fails, or exceeds a limit.
    """
    receiver, sender = multiprocessing.Pipe(duplex=False)
    child = os.fork()
    if child == 0:
        _render(sender, tokenizer, messages, options)
    sender.close()
    try:
        found = receiver.recv_bytes(4 * MAX_PROMPT_CHARS) if receiver.poll(RENDER_S) else None
    except (EOFError, OSError):
        found = b""
    finally:
        receiver.close()
        os.kill(child, 9)
        os.waitpid(child, 0)
    if found is None:
        raise ValueError(f"it takes more than {RENDER_S:g} s to render")
    if not found:
        raise ValueError(f"it takes more than {RENDER_BYTES >> 20} MiB of memory or {MAX_PROMPT_CHARS} characters")
    if found[:1] == b"e":
        raise ValueError(found[1:].decode())
    return found[1:].decode()


def _render(sender: Connection, tokenizer: Any, messages: list[dict[str, Any]], options: Mapping[str, Any]) -> None:
    """Body of the process; it never returns, as the process is a copy of a server's."""
    try:
        size = psutil.Process().memory_info().vms
        resource.setrlimit(resource.RLIMIT_AS, (size + RENDER_BYTES, size + RENDER_BYTES))
        resource.setrlimit(resource.RLIMIT_CPU, (int(RENDER_S) + 1, int(RENDER_S) + 1))
        try:
            text = tokenizer.apply_chat_template(messages, tokenize=False, **options)
            answer = b"t" + text.encode()
        except MemoryError:
            answer = b""
        except Exception as error:
            answer = b"e" + str(error)[:1000].encode(errors="replace")
        sender.send_bytes(answer if len(answer) <= MAX_PROMPT_CHARS else b"")
    finally:
        os._exit(0)
