"""Resolution of all options with the value ``auto``, before anything is built.

`resolve` is a pure function of the options, the hardware, the model, and what the installed providers support. So its choices can
be tested without the hardware, and are printed with their reasons.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from minisgl_core.config.ops_roles import assign_roles
from minisgl_core.config.options import AUTO, EngineConfig, ParallelOptions
from minisgl_core.config.provider_picker import ProviderPicker, Unsupported
from minisgl_core.config.stages import describe_nodes, describe_stages
from minisgl_core.contracts.attention import AttentionSpec
from minisgl_core.contracts.checkpoint_quantization import CheckpointQuantization
from minisgl_core.contracts.communicator import CommunicatorSpec
from minisgl_core.contracts.executor import RankPlacement
from minisgl_core.contracts.model_config import ModelConfig
from minisgl_core.contracts.moe import MoeSpec
from minisgl_core.contracts.platform import Hardware
from minisgl_core.contracts.quantization import QuantizationSpec
from minisgl_core.contracts.shard import check_tp_size
from minisgl_core.errors import InvalidValueError, ProviderUnsupportedError
from minisgl_core.utils.fp8 import FP8


class Choice(NamedTuple):
    """One resolved option, and the reason for its value."""

    name: str
    value: str
    reason: str


@dataclass(frozen=True, slots=True)
class Resolved:
    """Config with resolved options, and the choices that were made.

    The sizes of CUDA graphs stay ``auto`` until `ModelRunnerFactory` resolves them. So does an option that the engine does not
    need: `moe` of a dense model, `communicator` of one rank.
    """

    config: EngineConfig
    choices: tuple[Choice, ...]
    uncompiled: tuple[str, ...] = ()
    """Attention backends that ``auto`` would have selected, had they been compiled."""


def resolve(
    config: EngineConfig,
    hardware: Hardware,
    model: ModelConfig,
    installed: Callable[[str], Iterable[str]],
    unsupported: Unsupported,
    preferred: Callable[[str], str | None],
    ops_roles: Callable[[str], Iterable[str]],
    uncompiled: Callable[[str, AttentionSpec], str] = lambda name, spec: "",
    placement: RankPlacement = RankPlacement(),  # noqa: B008  # frozen
) -> Resolved:
    """Resolve all options that are ``auto``, and check those that are not.

    The function is long because later choices depend on earlier ones: it is one list in the order of the dependencies.

    Args:
        config: options of the user. Their platform is ignored in favour of that of `hardware`.
        hardware: properties of the device.
        model: config of the model.
        installed: function that returns the names of the installed providers of a kind.
        unsupported: function that returns the reasons why a provider does not support a spec.
        preferred: function that returns the provider of a kind that a plugin prefers; None if there is none.
        ops_roles: function that returns the roles of an ops provider.
        uncompiled: function that returns what an attention backend would compile first; see `AttentionBackend.uncompiled`.
        placement: placement of this rank.

    Raises:
        ProviderUnsupportedError: a provider that the user named does not support the model or the hardware, or no provider does.
        InvalidValueError: the value of an option does not fit the model or the hardware.
    """
    picker = ProviderPicker(hardware.platform, installed, unsupported, preferred, uncompiled)
    choices: list[Choice] = []

    def choose(name: str, value: Any, why: str) -> None:
        nonlocal config
        config = config.with_flat(**{name: value})
        choices.append(Choice(name, f"{value:g}" if isinstance(value, float) else str(value), why))

    choose("platform", hardware.platform, hardware.device_name)
    choose("dtype", *_dtype(config.model.dtype, model.dtype, hardware))
    max_seq_len = config.model.max_seq_len_override or model.max_position
    if max_seq_len > model.max_position:
        allowed = f"at most {model.max_position}, the model's context"
        if model.rope.kind == "dynamic":
            allowed += "; the engine does not scale dynamic NTK beyond max_position_embeddings"
        raise InvalidValueError("--max-seq-len-override", max_seq_len, allowed)

    _check_parallel(config.parallel, hardware, model, placement)
    if config.parallel.pp > 1:
        choices.append(Choice("pp", str(config.parallel.pp), describe_stages(config.parallel, model.num_layers)))
    if placement.nodes:
        choices.append(Choice("placement", config.parallel.placement, describe_nodes(placement.nodes)))
    device, is_cpu = torch.device(hardware.torch_name), hardware.torch_name == "cpu"
    page_size, page_why = config.cache.page_size, "set by the user"
    if page_size == AUTO:
        page_size, page_why = 16, "little unused space per request, few page-table entries"
    kv_dtype = config.model.dtype if config.cache.kv_dtype == AUTO else config.cache.kv_dtype
    config = config.with_flat(max_seq_len_override=max_seq_len, page_size=page_size, kv_dtype=kv_dtype)

    attn_names = config.backends.attn.split(",")
    if not 1 <= len(attn_names) <= 2 or not all(attn_names):
        raise InvalidValueError("--attn", config.backends.attn, "one name, or two as 'prefill,decode'")
    spec = attention_spec(config, model, device)
    picks = [picker.pick("attention", name, spec) for name in attn_names]
    choose("attn", ",".join(value for value, _ in picks), "; ".join(reason for _, reason in picks))
    choices.append(Choice("page_size", str(page_size), page_why))
    if kv_dtype != config.model.dtype:
        choices.append(Choice("kv_dtype", kv_dtype, "set by the user"))

    choose("cache", *picker.pick("prefix_cache", config.cache.cache))
    ops, why = assign_roles(
        config.backends.ops,
        picker.automatic("ops"),
        lambda name: unsupported("ops", name, device, torch_dtype(config)),
        ops_roles,
    )
    choose("ops", ops, why)
    if model.moe is not None:
        choose("moe", *picker.pick("moe", config.backends.moe, moe_spec(config, model, device)))
    quantization = config.backends.quantization
    stored = CheckpointQuantization.of(model.raw)
    if quantization == AUTO and model.moe is not None and stored is not None and stored.is_float8:
        why = "experts use fp8 only with --quantization fp8"
        choose("quantization", "none", _with_checkpoint_format(model, "none", why))
    elif quantization != AUTO or model.quantization:
        # These providers would quantize the weights of a GGUF file again.
        skipped = ("int4", "int8", "fp8") if stored is not None and stored.is_gguf else ()
        needs = quantization_spec(model, torch_dtype(config), device)
        quantization, why = picker.pick("quantization", quantization, needs, skipped=skipped)
        choose("quantization", quantization, _with_checkpoint_format(model, quantization, why))
    else:
        config = config.with_flat(quantization="none")
    if config.parallel.size > 1:
        choose("communicator", *_communicators(config, picker, device, placement))

    grammar = config.backends.grammar
    if grammar == AUTO:
        # It is loaded later: by a thread after a server's start, or in `LLM` with the first request that needs it.
        config = config.with_flat(grammar=picker.first("grammar"))
    elif reasons := unsupported("grammar", grammar):
        raise ProviderUnsupportedError("grammar", grammar, reasons)

    if config.scheduler.disable_overlap == AUTO:
        config = config.with_flat(disable_overlap=is_cpu)
        why = "the device works synchronously" if is_cpu else "the device works asynchronously"
        choices.append(Choice("overlap", "off" if is_cpu else "on", why))
    if config.scheduler.max_prefill_length == AUTO:
        choose("max_prefill_length", 1024 if is_cpu else 8192, "longer steps would delay the other requests")
    if config.parallel.pp > 1 and config.scheduler.max_step_ms != 0:
        choose("max_step_ms", 0.0, "no limit with --pp, where steps overlap, so that their durations are not known")
    elif config.scheduler.max_step_ms == AUTO:
        choose("max_step_ms", 100.0 if is_cpu else 50.0, "longer steps would delay the tokens of decoding requests")
    return Resolved(config, tuple(choices), tuple(picker.to_compile))


def _dtype(wanted: str, model_dtype: str, hardware: Hardware) -> tuple[str, str]:
    if wanted != AUTO:
        return wanted, "set by the user"
    if model_dtype in hardware.dtypes:
        return model_dtype, "the checkpoint's dtype"
    return hardware.dtypes[0], f"the checkpoint's {model_dtype} is slow on this {hardware.platform}"


def _communicators(
    config: EngineConfig, picker: ProviderPicker, device: torch.device, placement: RankPlacement
) -> tuple[str, str]:
    """Return the providers of the groups within and between the pipeline stages, and the reasons."""
    names, parallel = config.backends.communicator.split(","), config.parallel
    if len(names) > 2 or not all(names):
        raise InvalidValueError("--communicator", config.backends.communicator, "one name, or two as 'within,between'")
    picks = []
    if parallel.tp > 1:
        within = CommunicatorSpec(0, parallel.tp, device, "", spans_hosts=placement.spans_hosts(parallel.tp))
        picks.append(picker.pick("communicator", names[0], within))
    if parallel.pp > 1:
        spans_hosts = placement.spans_hosts(placement.size)
        between = CommunicatorSpec(0, parallel.pp, device, "", is_p2p_only=True, spans_hosts=spans_hosts)
        picks.append(picker.pick("communicator", names[-1], between))
    names, reasons = (list(dict.fromkeys(each)) for each in zip(*picks, strict=True))
    return ",".join(names), "; ".join(reasons)


def _check_parallel(
    parallel: ParallelOptions, hardware: Hardware, model: ModelConfig, placement: RankPlacement
) -> None:
    check_tp_size(model.num_q_heads, model.num_kv_heads, parallel.tp)
    # An executor of several hosts places ranks where there are devices.
    num_devices = parallel.size if placement.nodes else hardware.num_devices
    if hardware.torch_name != "cpu" and parallel.tp > num_devices:
        raise InvalidValueError("--tp", parallel.tp, f"at most {num_devices}, the devices of this machine")
    if parallel.pp > model.num_layers:
        raise InvalidValueError("--pp", parallel.pp, f"at most {model.num_layers}, the layers of the model")
    if hardware.torch_name != "cpu" and parallel.size > num_devices:
        max_pp = num_devices // parallel.tp
        allowed = f"at most {max_pp} with --tp {parallel.tp} and {num_devices} devices"
        raise InvalidValueError("--pp", parallel.pp, allowed)


def torch_dtype(config: EngineConfig) -> torch.dtype:
    """Return the resolved dtype of the model."""
    dtype: torch.dtype = getattr(torch, config.model.dtype)
    return dtype


def attention_spec(config: EngineConfig, model: ModelConfig, device: torch.device) -> AttentionSpec:
    """Return the requirements of a rank on its attention backend, from resolved sizes and dtypes."""
    tp = config.parallel.tp
    return AttentionSpec(
        num_q_heads=model.num_q_heads // tp,
        num_kv_heads=max(1, model.num_kv_heads // tp),
        head_dim=model.head_dim,
        page_size=int(config.cache.page_size),
        dtype=torch_dtype(config),
        kv_dtype=kv_torch_dtype(config),
        device=device,
        max_seq_len=context_length(config),
        max_batch=config.scheduler.max_running_requests,
        sliding_windows=tuple(sorted({window for window in model.sliding_windows if window is not None})),
        soft_caps=() if model.soft_cap is None else (model.soft_cap,),
        has_sinks=model.has_sinks,
        value_head_dim=model.value_head_dim,
    )


def context_length(config: EngineConfig) -> int:
    """Return the resolved context length in tokens. `resolve` sets it if the user does not."""
    assert config.model.max_seq_len_override is not None, "the options have not been resolved"
    return config.model.max_seq_len_override


def kv_torch_dtype(config: EngineConfig) -> torch.dtype:
    """Return the resolved dtype of the KV pool."""
    name = config.cache.kv_dtype
    return FP8 if name in ("fp8", "fp8_e4m3") else getattr(torch, name)


def quantization_spec(model: ModelConfig, dtype: torch.dtype, device: torch.device) -> QuantizationSpec:
    """Return the requirements of a rank on its quantization provider."""
    num_experts = model.moe.num_experts if model.moe is not None else 0
    return QuantizationSpec(dtype, device, num_experts, CheckpointQuantization.of(model.raw))


def _with_checkpoint_format(model: ModelConfig, chosen: str, why: str) -> str:
    """Return the reason, and how the checkpoint's quantized weights are used."""
    if not model.quantization:
        return why
    return f"{why}; the checkpoint's weights are {model.quantization}" + (
        ", and are dequantized to --dtype" if chosen == "none" else ""
    )


def moe_spec(config: EngineConfig, model: ModelConfig, device: torch.device) -> MoeSpec:
    """Return the requirements of a rank on its MoE kernel. If the experts' width does not divide evenly, it is padded."""
    assert model.moe is not None
    return MoeSpec(
        num_experts=model.moe.num_experts,
        top_k=model.moe.top_k,
        hidden_size=model.hidden_size,
        intermediate_size=-(-model.moe.intermediate_size // config.parallel.tp),
        dtype=torch_dtype(config),
        device=device,
        activation=model.moe.activation,
        has_bias=model.moe.has_bias,
        swiglu_limit=model.moe.swiglu_limit,
    )
