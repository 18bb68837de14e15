"""Every option of the engine, once: launch flags, `LLM` keywords, environment variables and config-file keys.

A field's flag is its name with dashes; its environment variable is ``MINISGL_`` and the name in capitals. Imports
nothing heavy.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from minisgl_core.errors import InvalidValueError
from minisgl_core.suggest import did_you_mean

AUTO = "auto"
"""Value of an option that is to be chosen from the hardware and the model."""


@dataclass(frozen=True, slots=True)
class Option:
    """How one field appears to users.

    Attributes:
        help: one sentence for ``--help``.
        kind: the plugin kind whose providers it names; empty for plain values.
        choices: the values allowed; empty for any.
        low, high: bounds of a number, both allowed; None for none.
        metavar: placeholder in ``--help``.
        env: further environment variables that set it, such as an older name.
        secret: the value must not be shown.
    """

    help: str
    kind: str = ""
    choices: tuple[str, ...] = ()
    low: float | None = None
    high: float | None = None
    metavar: str | None = None
    env: tuple[str, ...] = ()
    secret: bool = False


LIST = "tuple[str, ...]"
"""The type of an option that may be given several times."""


def option(default: Any, help: str, **details: Any) -> Any:
    """A dataclass field that is an option."""
    return field(default=default, metadata={"option": Option(help, **details)})


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """Which model, and in what precision."""

    model: str | None = option(
        None,
        "Folder, .gguf file or hub id; the embedded SmolLM2-135M-Instruct where it is missing.",
        metavar="PATH_OR_ID",
    )
    model_source: str = option("huggingface", "Hub that ids refer to.", choices=("huggingface", "modelscope"))
    revision: str | None = option(None, "Branch, tag or commit on the hub.")
    dtype: str = option(AUTO, "Precision of weights and activations.", choices=(AUTO, "bfloat16", "float16", "float32"))
    dummy_weight: bool = option(False, "Random weights instead of the checkpoint's, for benchmarks.")
    chat_template: str | None = option(
        None,
        "Jinja template of conversations, or a file that holds it, instead of the model's.",
        metavar="FILE_OR_TEXT",
    )
    max_seq_len_override: int | None = option(
        None, "Longest sequence in tokens, prompt and output; the model's own where it is missing.", low=1
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheOptions:
    """The KV pool and the prefix cache."""

    cache: str = option(AUTO, "Prefix cache.", kind="prefix_cache")
    page_size: int | str = option(AUTO, "Tokens in a page of KV.", low=1)
    kv_dtype: str = option(
        AUTO,
        "Precision of KV: auto is that of --dtype; fp8 (float8 e4m3) takes half the memory of bfloat16.",
        choices=(AUTO, "bfloat16", "float16", "float32", "fp8", "fp8_e4m3"),
    )
    num_pages: int | None = option(None, "Pages of KV; sized by --memory-ratio where it is missing.", low=2)
    memory_ratio: float = option(
        0.9,
        "Share of the device's memory for weights, steps and KV (on a CPU: of half the free memory, for KV).",
        low=0.05,
        high=1.0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerOptions:
    """What runs together."""

    max_running_requests: int = option(256, "Most requests in a batch.", low=1)
    max_prefill_length: int | str = option(
        AUTO, "Most prompt tokens computed in one step; longer prompts take several.", low=1
    )
    max_queued_requests: int = option(
        4096, "Most requests waiting for a place in the batch; more are refused with status 429.", low=1
    )
    policy: str = option("fcfs", "Order of the waiting requests.", kind="policy")
    disable_overlap: bool | str = option(
        AUTO,
        "Prepare a step only when the one before is done; auto overlaps where the device runs beside the host.",
        env=("MINISGL_DISABLE_OVERLAP_SCHEDULING",),
    )
    cuda_graph_max_bs: int | str = option(
        AUTO, "Largest decode batch that is recorded as a graph; 0 records none.", low=0
    )
    piecewise_cuda_graph_max_tokens: int | str = option(
        AUTO,
        "Most tokens of a step without a decode graph, such as one with prompts, that is recorded between attention calls;"
        " 0 records none, and auto none where decodes are not recorded.",
        low=0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelOptions:
    """How the model is split."""

    tp: int = option(1, "Tensor-parallel ranks.", low=1)
    executor: str = option("local", "Where the ranks run: local is processes of this host.", kind="executor")


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendOptions:
    """Which providers do the work."""

    attn: str = option(AUTO, "Attention backend; 'a,b' takes a for prefill and b for decode.", kind="attention")
    moe: str = option(AUTO, "Mixture-of-experts kernel.", kind="moe")
    ops: str = option(
        AUTO,
        "Kernels between attention calls. With 'a,b', each role is served by the first provider that has it and the rest by"
        " torch; auto among them stands for this platform's list.",
        kind="ops",
    )
    quantization: str = option(
        AUTO,
        "Precision of the layers' matrices: fp8, or none for that of --dtype; auto takes fp8 where the checkpoint has it.",
        kind="quantization",
    )
    communicator: str = option(AUTO, "Collectives between ranks.", kind="communicator")
    platform: str = option(AUTO, "Device.", kind="platform")
    grammar: str = option(AUTO, "Structured output.", kind="grammar")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """All options of an engine, grouped by the part that reads them."""

    model: ModelOptions = ModelOptions()
    cache: CacheOptions = CacheOptions()
    scheduler: SchedulerOptions = SchedulerOptions()
    parallel: ParallelOptions = ParallelOptions()
    backends: BackendOptions = BackendOptions()

    @classmethod
    def from_flat(cls, **values: Any) -> EngineConfig:
        """Build from option names, as `LLM` and ``minisgl launch`` pass them.

        Raises:
            InvalidValueError: an unknown option or a value that is not allowed.
        """
        return cls().with_flat(**values)

    def with_flat(self, **values: Any) -> EngineConfig:
        """A copy with some options changed, by name."""
        known = {item.name: (section, item) for section, item in _all_fields()}
        changes: dict[str, dict[str, Any]] = {}
        for name, value in values.items():
            if name not in known:
                allowed = f"one of the options {', '.join(sorted(known))}"
                raise InvalidValueError(name, value, allowed, did_you_mean(name, known))
            section, item = known[name]
            changes.setdefault(section, {})[name] = check_value(name, value, item)
        parts = {section: replace(getattr(self, section), **part) for section, part in changes.items()}
        return replace(self, **parts)

    def flat(self) -> dict[str, Any]:
        """Every option and its value, by name."""
        return {item.name: getattr(getattr(self, section), item.name) for section, item in _all_fields()}


def engine_options() -> Mapping[str, dataclasses.Field[Any]]:
    """Every engine option's dataclass field by name, in the order of ``--help``."""
    return {item.name: item for _, item in _all_fields()}


def _all_fields() -> Iterator[tuple[str, dataclasses.Field[Any]]]:
    for section in fields(EngineConfig):
        for item in fields(section.default):  # type: ignore[arg-type]
            yield section.name, item


def check_value(name: str, value: Any, item: dataclasses.Field[Any]) -> Any:
    """Check `value` against a field's type, choices and bounds; paths, and numbers written as text, are converted.

    Raises:
        InvalidValueError: names the option, the value and what is allowed.
    """
    meta: Option = item.metadata["option"]
    words = type_words(item)
    if value is None and ("None" in words or item.default is None):
        return None
    if words == [LIST]:
        values = [value] if isinstance(value, str) else value
        if not isinstance(values, (list, tuple)) or not all(isinstance(each, str) for each in values):
            raise InvalidValueError(name, "(hidden)" if meta.secret else value, "a text or a list of texts")
        return tuple(values)
    if isinstance(value, os.PathLike) and "str" in words:
        value = os.fspath(value)
    if isinstance(value, str) and not (AUTO in (value, item.default) and value == AUTO and "str" in words):
        value = _from_text(name, value, words)
    if isinstance(value, bool) and "bool" not in words:
        raise InvalidValueError(name, value, _expected(words))
    if "float" in words and isinstance(value, int):
        value = float(value)
    allowed_types = {"int": int, "float": float, "bool": bool, "str": str}
    if not isinstance(value, tuple(kind for word, kind in allowed_types.items() if word in words)):
        raise InvalidValueError(name, value, _expected(words))
    if isinstance(value, str):
        if meta.choices and value not in meta.choices:
            raise InvalidValueError(name, value, f"one of {', '.join(meta.choices)}")
        if words[0] != "str" and value != AUTO:
            raise InvalidValueError(name, value, _expected(words))
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        _check_bounds(name, value, meta)
    return value


def type_words(item: dataclasses.Field[Any]) -> list[str]:
    """The types a field allows, such as ``["int", "str"]``, whether its annotation is text or a type."""
    return (item.type.__name__ if isinstance(item.type, type) else str(item.type)).split(" | ")


def _from_text(name: str, value: str, words: list[str]) -> Any:
    if "bool" in words:
        lowered = value.lower()
        if lowered in ("1", "true", "yes", "on"):
            return True
        if lowered in ("0", "false", "no", "off", ""):
            return False
        raise InvalidValueError(name, value, _expected(words))
    for word, kind in (("int", int), ("float", float)):
        if word in words:
            try:
                return kind(value)
            except ValueError:
                raise InvalidValueError(name, value, _expected(words)) from None
    return value


def _expected(words: list[str]) -> str:
    """What a field of these types takes, for people; a text besides another type can only be ``auto``."""
    texts = ["a text"] if words[0] == "str" else [AUTO]
    named = {"int": ["a whole number"], "float": ["a number"], "bool": ["true", "false"], "str": texts, "None": []}
    *others, last = [each for word in words for each in named[word]]
    return f"{', '.join(others)} or {last}" if others else last


def _check_bounds(name: str, value: float, meta: Option) -> None:
    low = -math.inf if meta.low is None else meta.low
    high = math.inf if meta.high is None else meta.high
    if not low <= value <= high:  # also true of nan
        bounds = [f"at least {meta.low:g}"] if meta.low is not None else []
        bounds += [f"at most {meta.high:g}"] if meta.high is not None else []
        raise InvalidValueError(name, value, ", ".join(bounds) or "a number")
