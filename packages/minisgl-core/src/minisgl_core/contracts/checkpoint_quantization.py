"""Reader of the ``quantization_config`` in a checkpoint's ``config.json``.

The reader of GGUF files generates one: ``quant_method`` is gguf, and ``types`` maps the names of modules to GGML's types.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from re import _parser  # type: ignore[attr-defined]
from types import MappingProxyType
from typing import Any

from minisgl_core.errors import ModelFormatError

_COMPRESSED = "compressed-tensors"
_GGUF = "gguf"
_SPECIAL = frozenset(r"\^$*+?{}[]|():")
"""Characters that make an entry a regular expression. An entry without them is a name, in which a dot is literal."""
_MAX_NAME_LENGTH = 64
"""Longest name of a module that `_paths` assumes: a repetition such as ``.*`` matches at most this many characters."""
_MAX_PATHS = 1 << 20
"""Maximum number of paths that the regular expressions of a list may try together, by backtracking, to match one name."""
_MAX_PATTERN_CHARS = 1 << 16
"""Maximum characters of the regular expressions of a list. 24 that ignore case may take 8 ms to compile."""
_MAX_GROUPS = 16
"""Maximum number of groups of modules, each of which has a list."""
_NONE: Mapping[str, str] = MappingProxyType({})


class CheckpointQuantization:
    """Method of a checkpoint's quantization, and the modules that it leaves unquantized.

    Attributes:
        config: content of the ``quantization_config``.
        method: value of ``quant_method``, such as ``fp8``.
    """

    @classmethod
    def of(cls, raw: Mapping[str, Any]) -> "CheckpointQuantization | None":
        """Return the quantization of a model's config; None if the weights are not quantized.

        Raises:
            ModelFormatError: the ``quantization_config`` is malformed.
        """
        config = raw.get("quantization_config") or raw.get("compression_config")
        return None if not config else cls(config)

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Parse a ``quantization_config``.

        Raises:
            ModelFormatError: ``quant_method`` is missing, or a list of modules has entries other than names and patterns.
        """
        if not isinstance(config, Mapping) or not isinstance(config.get("quant_method"), str):
            raise ModelFormatError("config: quantization_config has no quant_method")
        self.config, self.method = config, str(config["quant_method"])
        if self.method == _GGUF:
            types = config.get("types")
            if not isinstance(types, Mapping) or not all(isinstance(each, str) for each in types.values()):
                raise ModelFormatError("config: quantization_config.types must map the modules of a GGUF file to types")
        if self.method != _COMPRESSED:
            excluded = _excluded(config) if self.method == "gptq" else _NONE
            # AutoFP8 writes ignored_layers, which vLLM prefers, too.
            is_auto_fp8 = self.method == "fp8" and config.get("ignored_layers")
            key = "ignored_layers" if is_auto_fp8 else "modules_to_not_convert"
            self._ignored = _Modules(config, key, excluded)
            self._groups = [(_Modules({}, "targets"), config)]  # one group of all linear layers
            return
        self._ignored = _Modules(config, "ignore")
        groups = config.get("config_groups") or {}
        if not isinstance(groups, Mapping) or not all(isinstance(each, Mapping) for each in groups.values()):
            raise ModelFormatError("config: quantization_config.config_groups must map names to groups")
        if len(groups) > _MAX_GROUPS:
            raise ModelFormatError(
                f"config: quantization_config.config_groups has {len(groups)} groups, and at most {_MAX_GROUPS} are supported"
            )
        self._groups = []
        for group in groups.values():
            weights = group.get("weights") or {}
            if not isinstance(weights, Mapping):
                raise ModelFormatError("config: quantization_config.config_groups: weights must be a mapping")
            self._groups.append((_Modules(group, "targets"), weights))

    @property
    def is_gguf(self) -> bool:
        """Return True for a GGUF file. Its reader dequantizes the weights of layers that do not load packed ones."""
        return self.method == _GGUF

    @property
    def is_float8(self) -> bool:
        """Return True if the quantized weights are float8, with scales per tensor, channel or block."""
        if self.method != _COMPRESSED:
            return self.method == "fp8"
        kinds = [(each.get("type"), each.get("num_bits")) for each in self.groups]
        return bool(kinds) and all(kind == ("float", 8) for kind in kinds)

    @property
    def groups(self) -> list[Mapping[str, Any]]:
        """Weight formats of all groups of modules; only compressed-tensors has several groups."""
        return [weights for _, weights in self._groups]

    def weights_of(self, name: str) -> Mapping[str, Any] | None:
        """Return the weight format of a linear module; None if the module is not quantized.

        Args:
            name: name of the module in the checkpoint, such as ``model.layers.0.self_attn.q_proj``.
        """
        if self._ignored.contains(name):
            return None
        if self.method == _GGUF:
            kind = self.config["types"].get(name)
            return None if kind is None else {"type": kind}
        return next(
            (weights for targets, weights in self._groups if targets.has_all_linear or targets.contains(name)), None
        )

    def has_unquantized(self, names: Iterable[str]) -> bool:
        """Return True if the checkpoint leaves any of these modules unquantized."""
        return any(self.weights_of(name) is None for name in names)


def block_shape(weights: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the numbers of rows and columns that share a scale; None if there are no block scales.

    Args:
        weights: weight format; see `CheckpointQuantization.weights_of`.

    Raises:
        ModelFormatError: the block size is not two integers above 0.
    """
    sizes = weights.get("weight_block_size") or weights.get("block_structure")
    if not sizes:
        return None
    is_pair = isinstance(sizes, list | tuple) and [type(each) for each in sizes] == [int, int]
    if not is_pair or min(sizes) <= 0:
        raise ModelFormatError(f"config: block size {sizes!r} of quantization_config must be two integers above 0")
    return sizes[0], sizes[1]


@dataclass(frozen=True, slots=True)
class Int4Format:
    """Format of 4-bit integer weights, each of which is ``(code - zero_point) * scale``.

    Attributes:
        layout: quant_method, which determines the names of the tensors and the order of the codes in them.
        group_size: consecutive inputs that share a scale and a zero point; None for all inputs of an output channel.
        has_zero_points: True if there are tensors of zero points; otherwise they are 8.
        has_group_index: True if a tensor has the group of each input, which need not be consecutive (act-order).
        zero_point_offset: number that is added to a stored zero point.
    """

    layout: str
    group_size: int | None
    has_zero_points: bool
    has_group_index: bool = False
    zero_point_offset: int = 0


def is_int8(stored: CheckpointQuantization, weights: Mapping[str, Any]) -> bool:
    """Return True for 8-bit integers with a scale per tensor or output channel, as in W8A8 checkpoints.

    Args:
        stored: quantization of the checkpoint.
        weights: weight format, one of ``stored.groups``.

    Raises:
        ModelFormatError: the weights are 8-bit integers of a kind that is not supported; the message names the key.
    """
    if not _is_compressed_int(stored, weights) or weights.get("num_bits") != 8:
        return False
    _one_of(weights, "strategy", None, ("channel", "tensor"))
    _one_of(weights, "symmetric", True, (True,))
    _one_of(weights, "dynamic", False, (False,))
    _one_of(weights, "actorder", None, (None, "weight", "static"))
    for group in (stored.config, *stored.config["config_groups"].values()):
        _one_of(group, "format", "int-quantized", ("int-quantized",))
        inputs = group.get("input_activations") or {}
        if isinstance(inputs, Mapping) and inputs:
            _one_of(inputs, "type", "int", ("int",))
            _one_of(inputs, "num_bits", 8, (8,))
    return True


def _is_compressed_int(stored: CheckpointQuantization, weights: Mapping[str, Any]) -> bool:
    return stored.method == _COMPRESSED and weights.get("type", "int") == "int"


def int4_format(stored: CheckpointQuantization, weights: Mapping[str, Any]) -> Int4Format | None:
    """Return the format of 4-bit integers; None if the checkpoint has weights of another kind.

    Args:
        stored: quantization of the checkpoint.
        weights: weight format, one of ``stored.groups``.

    Raises:
        ModelFormatError: a value is malformed or not supported; the message names its key.
    """
    if stored.method == _COMPRESSED:
        is_other = not _is_compressed_int(stored, weights) or weights.get("num_bits") == 8
        return None if is_other else _compressed_int4(stored.config, weights)
    if stored.method not in ("awq", "gptq"):
        return None
    _one_of(weights, "w_bit" if "w_bit" in weights else "bits", None, (4,))
    size = _group_size(weights, "q_group_size" if "q_group_size" in weights else "group_size")
    if stored.method == "awq":
        _one_of(weights, "version", "gemm", ("gemm", "GEMM"))
        return Int4Format("awq", size, bool(_one_of(weights, "zero_point", True, (True, False))))
    _one_of(weights, "lm_head", False, (False,))
    _one_of(weights, "is_marlin_format", False, (False,))
    _one_of(weights, "sym", True, (True, False))
    version = _one_of(weights, "checkpoint_format", "gptq", ("gptq", "gptq_v2"))
    is_reordered = bool(_one_of(weights, "desc_act", False, (True, False)))
    return Int4Format("gptq", size, True, is_reordered, zero_point_offset=int(version == "gptq"))


def _compressed_int4(config: Mapping[str, Any], weights: Mapping[str, Any]) -> Int4Format:
    _one_of(weights, "num_bits", None, (4,))
    _one_of(weights, "dynamic", False, (False,))
    for group in (config, *config["config_groups"].values()):
        _one_of(group, "format", "pack-quantized", ("pack-quantized",))
        _one_of(group, "input_activations", None, (None,))
    is_channel = _one_of(weights, "strategy", None, ("group", "channel")) == "channel"
    order = _one_of(weights, "actorder", None, (None, False, True, "weight", "static", "group", "dynamic"))
    symmetric = _one_of(weights, "symmetric", True, (True, False))
    size = None if is_channel else _group_size(weights, "group_size")
    return Int4Format(_COMPRESSED, size, not symmetric, order in (True, "group", "dynamic"))


def _one_of(config: Mapping[str, Any], key: str, default: object, allowed: tuple[object, ...]) -> object:
    """Return the value of a key; a value of null means the default."""
    value = config.get(key)
    value = default if value is None else value
    # Types are compared, too, since 0 == False and 1 == True.
    if not any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in allowed):
        raise ModelFormatError(
            f"config: quantization_config has {key}={value!r}, but only {', '.join(map(repr, allowed))} is supported"
        )
    return value


def _group_size(config: Mapping[str, Any], key: str) -> int | None:
    """Return the inputs per group; None for -1."""
    size = config.get(key)
    if type(size) is not int or not (size == -1 or (size > 0 and size % 32 == 0)):
        raise ModelFormatError(
            f"config: quantization_config has {key}={size!r}, which must be a multiple of 32, or -1 for one scale per channel"
        )
    return None if size == -1 else size


def _excluded(config: Mapping[str, Any]) -> Mapping[str, str]:
    """Return the regular expressions of the modules that GPTQModel's ``dynamic`` excludes, each mapped to its config key.

    Raises:
        ModelFormatError: ``dynamic`` has other rules, or ``modules_in_block_to_quantize`` selects modules.
    """
    if config.get("modules_in_block_to_quantize"):
        raise ModelFormatError("config: quantization_config.modules_in_block_to_quantize is not supported")
    rules = config.get("dynamic") or {}
    if not isinstance(rules, Mapping) or not all(isinstance(each, str) and each.startswith("-:") for each in rules):
        raise ModelFormatError("config: quantization_config.dynamic has rules other than exclusions ('-:PATTERN')")
    return {f"re:{each.removeprefix('-:')}": "dynamic" for each in rules}


class _Modules:
    """List of modules. An entry is a name, the end of a name, or a regular expression that matches the beginning of a name.

    Attributes:
        has_all_linear: True if the list selects every linear layer.
    """

    def __init__(self, config: Mapping[str, Any], key: str, extra: Mapping[str, str] = _NONE) -> None:
        """Compile the regular expressions of the list.

        Args:
            config: mapping that has the list.
            key: key of the list.
            extra: further regular expressions, each with the key of `config` that it is from.

        Raises:
            ModelFormatError: the list is malformed, or a regular expression is invalid or could run too long.
        """
        wanted = config.get(key) or []
        if not isinstance(wanted, list | tuple) or not all(isinstance(each, str) for each in wanted):
            raise ModelFormatError(f"config: quantization_config.{key} must be a list of names")
        self.has_all_linear = "Linear" in wanted or (key == "targets" and not wanted)
        # As in transformers, an entry matches the beginning of a name up to a dot, or the end of a name.
        self._names = frozenset(each for each in wanted if not set(each) & _SPECIAL)
        patterns = {each: key for each in wanted if each not in self._names} | dict(extra)
        if (num_chars := sum(map(len, patterns))) > _MAX_PATTERN_CHARS:
            raise ModelFormatError(
                f"config: quantization_config.{key} has regular expressions of {num_chars:,} characters, and at most "
                f"{_MAX_PATTERN_CHARS:,} are supported; list names instead"
            )
        compiled, paths = [], 0
        for each, source in patterns.items():
            text = each.removeprefix("re:") if each.startswith("re:") else rf"(?:{each})(?:\.|$)"
            try:
                compiled.append(re.compile(text))
                paths += _paths(_parser.parse(text), is_end=True)
            except (re.error, OverflowError, RecursionError) as error:
                raise ModelFormatError(
                    f"config: quantization_config.{source} has an invalid regular expression {each!r}: {error}"
                ) from error
            if paths > _MAX_PATHS:
                raise ModelFormatError(
                    f"config: quantization_config.{source} has the regular expression {each!r}, which could take too long to "
                    "match; list names instead, or use no repeated groups and at most two repetitions"
                )
        self._patterns = compiled

    def contains(self, name: str) -> bool:
        """Return True if the list contains a module or a module that contains it."""
        words = name.split(".")
        parts = (".".join(part) for i in range(len(words)) for part in (words[: i + 1], words[i:]))
        return not self._names.isdisjoint(parts) or any(each.match(name) for each in self._patterns)


def _paths(items: Iterable[Any], *, is_end: bool = False) -> int:
    """Return an upper bound on the paths that a parsed regular expression tries to match a name, at most `_MAX_PATHS` + 1.

    Args:
        items: parsed expression.
        is_end: True if nothing follows, so that the last repetition of a single character never backtracks.
    """
    total, items = 1, list(items)
    for index, (operation, value) in enumerate(items):
        kind, ways = str(operation), 1
        if kind.endswith("_REPEAT"):
            min_repeats, max_repeats, body = value
            max_repeats = min(max_repeats, _MAX_NAME_LENGTH)
            ways = _paths(body)
            if ways > 1 or not (is_end and index == len(items) - 1):
                ways = ways**max_repeats * (max_repeats - min(min_repeats, max_repeats) + 1)
        elif kind == "BRANCH":
            ways = sum(map(_paths, value[1]))
        elif kind in ("SUBPATTERN", "ASSERT", "ASSERT_NOT"):
            ways = _paths(value[-1])
        elif kind == "ATOMIC_GROUP":
            ways = _paths(value)
        elif kind == "GROUPREF_EXISTS":
            ways = sum(_paths(each) for each in value[1:] if each is not None)
        total = min(total * ways, _MAX_PATHS + 1)
    return total
