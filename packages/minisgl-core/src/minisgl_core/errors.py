"""Every error that minisgl raises on purpose.

Users catch :class:`MinisglError`; the leaves say what went wrong. Assertions, by contrast, guard invariants and mean a bug.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from reprlib import Repr
from typing import Self

_SHORT = Repr()
_SHORT.maxlevel = 3
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 200
_SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxdict = _SHORT.maxset = _SHORT.maxfrozenset = 40
"""Shows as much of a value as a message has room for, at the same cost for large ones."""


class MinisglError(Exception):
    """Base of every error raised on purpose."""


class InvalidValueError(MinisglError, ValueError):
    """A flag, field or argument holds a value that is not allowed.

    Args:
        name: the flag (``--page-size``), request field (``temperature``) or keyword (``tp``) as the user wrote it.
        value: what was given.
        allowed: what would have been accepted, as a phrase that follows "must be".
        remedy: what to do about it, as a sentence; optional.
    """

    def __init__(self, name: str, value: object, allowed: str, remedy: str = "") -> None:
        self.name, self.value, self.allowed, self.remedy = name, value, allowed, remedy
        shown = _SHORT.repr(value)
        shown = shown if len(shown) <= 80 else shown[:77] + "..."
        super().__init__(f"{name}={shown} is not valid: must be {allowed}.{' ' + remedy if remedy else ''}")

    def renamed(self, names: Mapping[str, str]) -> Self:
        """The same of what the user calls otherwise: `names` has the user's name by this one, where they differ."""
        return type(self)(names.get(self.name, self.name), self.value, self.allowed, self.remedy)

    def __reduce__(self) -> tuple[type[InvalidValueError], tuple[object, ...]]:
        return type(self), (self.name, self.value, self.allowed, self.remedy)


def beyond_context(max_seq_len: int, what: str) -> str:
    """Return the sentences that clients recognise: the limit, and `what` exceeds it."""
    return f"This model's maximum context length is {max_seq_len} tokens. However, {what}."


class ContextLengthError(InvalidValueError):
    """The context has no room for a prompt and the output asked for. Clients recognise its sentence.

    Args:
        name: the field at fault: the prompt's, or the one that asks for so many output tokens.
        num_prompt: tokens of the prompt.
        num_output: output tokens asked for.
        max_seq_len: tokens that the context holds.
        kind: ``messages`` for a conversation, else ``prompt``.
        remedy: what to do besides shortening it, as a sentence; optional.
        is_cut: the prompt has at least `num_prompt` tokens; how many more was not looked at.
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
        allowed = f"at most {max_seq_len} tokens with the output"
        super().__init__(name, num_prompt + num_output, allowed, remedy)
        self._numbers, self._is_cut = (num_prompt, num_output, max_seq_len, kind), is_cut
        least = "at least " if is_cut else ""
        sizes = f"{least}{num_prompt} in the {kind}, {num_output} in the completion"
        what = f"you requested {least}{num_prompt + num_output} tokens ({sizes})"
        shorten = f"Please reduce the length of the {kind} or completion{'' if name == kind else f' ({name})'}."
        self.args = (f"{beyond_context(max_seq_len, what)} {shorten}{' ' + remedy if remedy else ''}",)

    def renamed(self, names: Mapping[str, str]) -> Self:
        """See `InvalidValueError.renamed`."""
        return type(self)(names.get(self.name, self.name), *self._numbers, self.remedy, self._is_cut)

    def __reduce__(self) -> tuple[type[ContextLengthError], tuple[object, ...]]:
        return type(self), (self.name, *self._numbers, self.remedy, self._is_cut)


class PluginError(MinisglError):
    """Something is wrong with a plugin or with the name of one."""


class ProviderNotFoundError(PluginError):
    """No installed distribution provides the name that was asked for."""


class DuplicateProviderError(PluginError):
    """Two distributions register the same name in the same group."""


class ProviderLoadError(PluginError):
    """A provider is registered but importing it failed; the message holds the cause and the remedy."""


class ProviderUnsupportedError(PluginError):
    """A provider was asked for by name and does not apply here.

    Args:
        kind: what it provides, such as ``attention``.
        name: the provider's name.
        reasons: why it does not apply, one sentence each.
    """

    def __init__(self, kind: str, name: str, reasons: Iterable[str]) -> None:
        self.kind, self.name, self.reasons = kind, name, list(reasons)
        super().__init__(f"the {kind} provider {name!r} cannot be used here: {'; '.join(self.reasons)}")

    def __reduce__(self) -> tuple[type[ProviderUnsupportedError], tuple[object, ...]]:
        return type(self), (self.kind, self.name, self.reasons)


class ModelNotFoundError(MinisglError):
    """The model named by ``--model`` is neither a folder, a file nor a reachable hub id."""


class ModelFormatError(MinisglError):
    """A checkpoint or its config is incomplete, inconsistent or of a kind that is not supported."""


class TokenizerNotFoundError(ModelFormatError):
    """A checkpoint holds no tokenizer: it takes prompts as token ids only."""


class OutOfMemoryError(MinisglError):
    """The weights and the smallest useful KV pool do not fit in the device's memory."""


class CacheFullError(MinisglError):
    """A prefix cache was asked to evict more pages than it can."""


class OutOfPagesError(MinisglError):
    """More KV pages were asked for than are free."""


class QueueFullError(MinisglError):
    """The scheduler's waiting queue is at its bound; the request was not accepted."""


class WorkerDiedError(MinisglError):
    """A worker process ended unexpectedly; the message names it and says why where that is known."""


class WorkerRefusedError(WorkerDiedError):
    """A worker process ended by one of `USER_ERRORS`."""


USER_ERRORS = (
    InvalidValueError,
    PluginError,
    ModelNotFoundError,
    ModelFormatError,
    OutOfMemoryError,
    WorkerRefusedError,
)
"""What the user can put right."""
