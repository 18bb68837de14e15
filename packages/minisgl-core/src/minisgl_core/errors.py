"""Errors that minisgl raises on purpose.

Users catch `MinisglError`, and its subclasses tell the kinds of errors apart. A failed assertion means a bug.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from reprlib import Repr
from typing import Self

from minisgl_core.utils.exceptions import shortened


class _ShortRepr(Repr):
    def repr_int(self, x: int, level: int) -> str:
        """Return the digits, or the number of bits if Python refuses to convert so large a number."""
        try:
            return super().repr_int(x, level)
        except ValueError:
            return f"<int of {x.bit_length()} bits>"


_SHORT = _ShortRepr()
_SHORT.maxlevel = 3
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 200
_SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxdict = _SHORT.maxset = _SHORT.maxfrozenset = 40
"""Shortens values for messages."""


class Summary(str):
    """Summary of a value, such as ``257 strings``, that a message shows instead of the value."""


class MinisglError(Exception):
    """Base class of all errors that minisgl raises on purpose."""


class InvalidValueError(MinisglError, ValueError):
    """A flag, field or argument holds a value that is not allowed.

    Args:
        name: the flag (``--page-size``), request field (``temperature``) or keyword (``tp``) as the user wrote it.
        value: the value that was given, or a `Summary` of it.
        allowed: the values that are accepted, as a phrase that follows "must be".
        remedy: what to do about it, as a sentence; optional.
    """

    def __init__(self, name: str, value: object, allowed: str, remedy: str = "") -> None:
        super().__init__(name, value, allowed, remedy)  # as arguments, with which the error is unpickled
        self.name, self.value, self.allowed, self.remedy = name, value, allowed, remedy

    def __str__(self) -> str:
        value = self.value
        shown = f" ({value})" if isinstance(value, Summary) else f"={shortened(_SHORT.repr(value), 80)}"
        return f"{self.name}{shown} is not valid: must be {self.allowed}.{' ' + self.remedy if self.remedy else ''}"

    def renamed(self, names: Mapping[str, str]) -> Self:
        """Return this error with another name; `names` maps names to those that the user knows."""
        _, *others = self.args
        return type(self)(names.get(self.name, self.name), *others)


def context_length_message(max_seq_len: int, what: str) -> str:
    """Return the message on the context limit that clients recognise. `what` is a clause that says what exceeds it."""
    return f"This model's maximum context length is {max_seq_len} tokens. However, {what}."


class ContextLengthError(InvalidValueError):
    """The prompt and the requested output do not fit in the context. Clients recognise its message.

    Args:
        name: the field at fault: the prompt or the number of output tokens.
        num_prompt: tokens of the prompt.
        num_output: requested output tokens.
        max_seq_len: tokens that the context holds.
        kind: ``messages`` for a conversation, else ``prompt``.
        remedy: what to do besides shortening it, as a sentence; optional.
        is_cut: True if only the beginning of the prompt was tokenized, so that it has at least `num_prompt` tokens.
    """

    def __init__(
        self,
        name: str,
        num_prompt: int,
        num_output: int,
        max_seq_len: int,
        kind: str = "prompt",
        remedy: str = "",
        is_cut: bool = False,
    ) -> None:
        super().__init__(name, num_prompt + num_output, f"at most {max_seq_len} tokens with the output", remedy)
        self.args = name, num_prompt, num_output, max_seq_len, kind, remedy, is_cut

    def __str__(self) -> str:
        name, num_prompt, num_output, max_seq_len, kind, remedy, is_cut = self.args
        least = "at least " if is_cut else ""
        sizes = f"{least}{num_prompt} in the {kind}, {_SHORT.repr(num_output)} in the completion"
        what = f"you requested {least}{_SHORT.repr(num_prompt + num_output)} tokens ({sizes})"
        shorten = f"Please reduce the length of the {kind} or completion{'' if name == kind else f' ({name})'}."
        return f"{context_length_message(max_seq_len, what)} {shorten}{' ' + remedy if remedy else ''}"


class PluginError(MinisglError):
    """A plugin fails, or its name is wrong."""


class ProviderNotFoundError(PluginError):
    """No installed distribution provides the requested name."""


class DuplicateProviderError(PluginError):
    """Two distributions register the same name in the same group."""


class ProviderLoadError(PluginError):
    """A registered provider cannot be imported, or breaks its contract. The message has the cause and any remedy."""


class ProviderUnsupportedError(PluginError):
    """The selected provider, or each one that ``auto`` tried, cannot be used here.

    Args:
        kind: the kind of plugin, such as ``attention``.
        name: the provider's name, or ``auto``.
        reasons: the reasons, one sentence each.
    """

    def __init__(self, kind: str, name: str, reasons: Iterable[str]) -> None:
        self.kind, self.name, self.reasons = kind, name, list(reasons)
        super().__init__(kind, name, self.reasons)

    def __str__(self) -> str:
        return f"the {self.kind} provider {self.name!r} cannot be used here: {'; '.join(self.reasons)}"


class ModelNotFoundError(MinisglError):
    """The model named by ``--model`` is neither a folder, a file nor a reachable hub id."""


class ModelFormatError(MinisglError):
    """A checkpoint or its config is incomplete, inconsistent or not supported."""


class TokenizerNotFoundError(ModelFormatError):
    """A checkpoint has no tokenizer, so that prompts must be token ids."""


class OutOfMemoryError(MinisglError):
    """The weights and the smallest useful KV pool do not fit in the device's memory."""


class CacheFullError(MinisglError):
    """A prefix cache was asked to evict more pages than it can."""


class OutOfPagesError(MinisglError):
    """More KV pages were requested than are free."""


class QueueFullError(MinisglError):
    """The scheduler's queue is full, or too much text of grammars waits to be compiled; the request was not accepted."""


class WorkerDiedError(MinisglError):
    """A worker process ended unexpectedly. The message names it, and the cause if that is known.

    Args:
        message: the message.
        process: name of the process, as its supervisor knows it.
    """

    def __init__(self, message: str, process: str = "") -> None:
        super().__init__(message)
        self.process = process


class WorkerRefusedError(WorkerDiedError):
    """A worker process ended with an error that the user can correct, such as an invalid option."""


USER_ERRORS = (
    InvalidValueError,
    PluginError,
    ModelNotFoundError,
    ModelFormatError,
    OutOfMemoryError,
    WorkerRefusedError,
)
"""Errors that the user can correct."""
