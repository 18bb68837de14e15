"""Resolution of `auto` from a description of the hardware, without that hardware."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch

from minisgl_core.config.hf import model_config
from minisgl_core.config.options import AUTO, EngineConfig
from minisgl_core.config.resolve import Resolved, moe_spec, resolve
from minisgl_core.contracts.attention import AttentionCapabilities
from minisgl_core.contracts.executor import RankPlacement
from minisgl_core.contracts.model_config import ModelConfig, MoeConfig
from minisgl_core.contracts.moe import MoeCapabilities
from minisgl_core.contracts.platform import Hardware
from minisgl_core.errors import InvalidValueError, ProviderUnsupportedError
from minisgl_models.gpt_oss import GptOssForCausalLM

H200 = Hardware("cuda", "NVIDIA H200", (9, 0), 141 * 2**30, 4)
LAPTOP = Hardware("cpu", "x86_64", (), 16 * 2**30, 1, ("float32",))
MODEL = model_config(
    {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 100,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "torch_dtype": "bfloat16",
        "eos_token_id": 2,
    }
)
INSTALLED = {
    "attention": {"torch", "native", "triton", "hopper", "fi", "fa", "theirs"},
    "prefix_cache": {"radix", "naive"},
    "ops": {"torch", "native", "onednn", "triton", "hopper", "mynorm"},
    "communicator": {"torch"},
    "moe": {"torch"},
    "quantization": {"fp8", "gguf", "int4", "none"},
    "platform": {"cpu", "cuda"},
}

ROLES = {
    "hopper": ("linear", "norm", "rotary"),
    "native": ("linear", "norm", "rotary", "sampling"),
    "onednn": ("linear", "norm", "rotary", "sampling"),
    "mynorm": ("norm",),
    "torch": ("linear", "norm", "rotary", "sampling", "step", "routing"),
    "triton": ("linear", "norm", "rotary", "sampling", "step", "routing"),
}


def choose(
    hardware: Hardware,
    refused: Iterable[str] = (),
    preferred: dict[str, str] | None = None,
    model: ModelConfig = MODEL,
    uncompiled: Iterable[str] = (),
    **options: Any,
) -> Resolved:
    def unsupported(kind: str, name: str, *spec: object) -> list[str]:
        return [f"{name} is not for this"] if name in refused else []

    config = EngineConfig.from_flat(**options)
    return resolve(
        config,
        hardware,
        model,
        INSTALLED.__getitem__,
        unsupported,
        (preferred or {}).get,
        ROLES.__getitem__,
        lambda name, spec: f"{name}'s kernels" if name in uncompiled else "",
    )


def test_auto_is_resolved_in_all_options() -> None:
    for hardware in (H200, LAPTOP):
        flat = choose(hardware).config.flat()
        left = [name for name, value in flat.items() if value == AUTO]
        assert left == ["model_impl", "cuda_graph_max_bs", "piecewise_cuda_graph_max_tokens", "moe", "communicator"], (
            "these are resolved later, or need experts or several ranks"
        )


def test_a_laptop_gets_cpu_providers_and_float32() -> None:
    resolved = choose(LAPTOP)
    flat = resolved.config.flat()
    assert (flat["attn"], flat["ops"], flat["cache"]) == ("native", "native,torch", "radix")
    assert (flat["dtype"], flat["disable_overlap"]) == ("float32", True)
    reasons = {choice.name: choice.reason for choice in resolved.choices}
    assert "bfloat16 is slow" in reasons["dtype"]


def test_a_laptop_without_a_compiler_gets_torch_and_onednn() -> None:
    flat = choose(LAPTOP, refused=["native"]).config.flat()
    assert (flat["attn"], flat["ops"]) == ("torch", "onednn,torch")


def test_a_gpu_gets_the_first_supported_provider_and_reasons() -> None:
    assert choose(H200).config.backends.attn == "hopper"
    assert choose(H200).config.backends.ops == "hopper,triton"
    resolved = choose(H200, refused=["fa", "hopper"])
    assert (resolved.config.backends.attn, resolved.config.backends.ops) == ("fi,triton", "triton")
    reason = next(choice.reason for choice in resolved.choices if choice.name == "attn")
    assert "fa is not for this" in reason
    assert choose(H200, refused=["hopper"]).config.backends.attn == "fa,triton"
    assert choose(H200, refused=["fa", "fi", "hopper"]).config.backends.attn == "triton"
    assert choose(H200).config.scheduler.disable_overlap is False


def test_platform_and_device_names_may_differ() -> None:
    theirs = replace(LAPTOP, platform="theirs", device_type="cpu")
    assert choose(theirs).config.backends.attn == choose(LAPTOP).config.backends.attn


def test_a_plugin_may_prefer_its_own_provider() -> None:
    assert choose(H200, preferred={"attention": "theirs"}).config.backends.attn == "theirs"
    assert choose(H200, refused=["theirs"], preferred={"attention": "theirs"}).config.backends.attn == "hopper"
    absent = choose(H200, preferred={"attention": "nobodys"})
    assert absent.config.backends.attn == "hopper"
    assert any("nobodys: a plugin prefers it, but it is not installed" in choice.reason for choice in absent.choices)


def resolve_ops(hardware: Hardware, **more: Any) -> tuple[str, str]:
    resolved = choose(hardware, **more)
    return resolved.config.backends.ops, next(choice.reason for choice in resolved.choices if choice.name == "ops")


def test_each_ops_role_goes_to_the_first_provider_with_it() -> None:
    on_gpu = "hopper: linear, norm, rotary; triton: sampling, step, routing"
    assert resolve_ops(H200) == ("hopper,triton", on_gpu)
    assert resolve_ops(H200, refused=["hopper"]) == ("triton", "triton: every role; not hopper: hopper is not for this")
    assert resolve_ops(H200, refused=["hopper", "triton"])[0] == "torch"
    assert resolve_ops(LAPTOP, ops="native") == (
        "native",
        "native: linear, norm, rotary, sampling; torch: step, routing",
    )
    assert resolve_ops(H200, ops="mynorm,auto")[0] == "mynorm,hopper,triton"
    assert resolve_ops(H200, preferred={"ops": "mynorm"})[0] == "mynorm,hopper,triton"


def test_named_providers_are_used_or_refused_with_the_reason() -> None:
    assert choose(H200, attn="torch,theirs", page_size=64, dtype="float16").config.flat()["attn"] == "torch,theirs"
    with pytest.raises(ProviderUnsupportedError, match="fi is not for this"):
        choose(H200, refused=["fi"], attn="fi")
    with pytest.raises(ProviderUnsupportedError, match=r"torch is not for this$"):  # nothing is missing
        choose(LAPTOP, refused=["native", "torch"])


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"attn": "fa,fi,torch"}, "--attn"),
        ({"attn": "fa,"}, "--attn"),
        ({"ops": "triton,"}, "--ops"),
        ({"ops": "hopper,mynorm"}, "--ops"),
        ({"ops": "triton,torch"}, "--ops"),
        ({"tp": 3}, "--tp"),
        ({"tp": 8}, "--tp"),
        ({"pp": 3}, "--pp"),
        ({"tp": 4, "pp": 2}, "--pp"),
        ({"pp": 2, "communicator": "torch,torch,torch"}, "--communicator"),
        ({"pp": 2, "communicator": "torch,"}, "--communicator"),
        ({"max_seq_len_override": 513}, "--max-seq-len-override"),
    ],
)
def test_incompatible_options_are_named(options: dict[str, Any], name: str) -> None:
    with pytest.raises(InvalidValueError) as caught:
        choose(H200, **options)
    assert caught.value.name == name


def test_a_context_beyond_the_limit_of_dynamic_ntk_is_refused() -> None:
    dynamic = model_config({**MODEL.raw, "rope_scaling": {"rope_type": "dynamic", "factor": 4.0}})
    with pytest.raises(
        InvalidValueError, match="at most 512, the model's context; the engine does not scale dynamic NTK"
    ):
        choose(H200, model=dynamic, max_seq_len_override=513)


def test_pp_and_tp_may_use_different_communicators() -> None:
    def unsupported(kind: str, name: str, *spec: Any) -> list[str]:
        if kind != "communicator":
            return []
        return ["not for messages alone"] if name == "oneshot" and spec[0].is_p2p_only else []

    def chosen(**options: Any) -> tuple[str, str]:
        config = EngineConfig.from_flat(**options)
        installed = {**INSTALLED, "communicator": {"oneshot", "torch"}}
        resolved = resolve(config, H200, MODEL, installed.__getitem__, unsupported, {}.get, ROLES.__getitem__)
        again = resolve(resolved.config, H200, MODEL, installed.__getitem__, unsupported, {}.get, ROLES.__getitem__)
        assert again.config == resolved.config
        reasons = {choice.name: choice.reason for choice in resolved.choices}
        return resolved.config.backends.communicator, reasons.get("pp", "")

    assert chosen(tp=2) == ("oneshot", "")
    assert chosen(pp=2) == ("torch", "layers 0 on rank 0, 1 on rank 1")
    assert chosen(tp=2, pp=2) == ("oneshot,torch", "layers 0 on ranks 0-1, 1 on ranks 2-3")
    assert chosen(tp=2, pp=2, communicator="torch")[0] == "torch"
    with pytest.raises(ProviderUnsupportedError, match="not for messages alone"):
        chosen(tp=2, pp=2, communicator="oneshot")


@pytest.mark.parametrize("max_step_ms", [AUTO, 30.0])
def test_pipelines_have_no_step_time_limit(max_step_ms: float | str) -> None:
    for options, limit in ({"pp": 2}, 0.0), ({"tp": 2}, 50.0 if max_step_ms == AUTO else max_step_ms):
        resolved = choose(H200, max_step_ms=max_step_ms, **options)
        assert resolved.config.scheduler.max_step_ms == limit
        reported = [choice.value for choice in resolved.choices if choice.name == "max_step_ms"]
        assert reported == ([f"{limit:g}"] if limit != max_step_ms else [])


def test_one_host_communicators_are_not_chosen_across_hosts() -> None:
    def unsupported(kind: str, name: str, *spec: Any) -> list[str]:
        return ["not over hosts"] if name == "oneshot" and spec[0].spans_hosts else []

    def chosen(nodes: str, **options: Any) -> tuple[str, str]:
        config = EngineConfig.from_flat(**options)
        placement = RankPlacement(0, config.parallel.size, nodes=tuple(nodes))
        installed = {**INSTALLED, "communicator": {"oneshot", "torch"}}
        two_gpus = replace(H200, num_devices=2)
        functions = installed.__getitem__, unsupported, {}.get, ROLES.__getitem__
        resolved = resolve(config, two_gpus, MODEL, *functions, placement=placement)
        reasons = {choice.name: choice.reason for choice in resolved.choices}
        return resolved.config.backends.communicator, reasons["placement"]

    assert chosen("aa", tp=2) == ("oneshot", "ranks 0-1 on a")
    assert chosen("ab", tp=2) == ("torch", "rank 0 on a, rank 1 on b")
    assert chosen("aabb", tp=2, pp=2) == ("oneshot,torch", "ranks 0-1 on a, ranks 2-3 on b")


def test_attention_backends_get_the_models_features_in_the_spec() -> None:
    gemma = replace(MODEL, soft_cap=50.0, sliding_windows=(64, None), has_sinks=True, value_head_dim=4)
    specs = []

    def unsupported(kind: str, name: str, *spec: Any) -> list[str]:
        specs.extend(spec if kind == "attention" else [])
        lacking = kind == "attention" and name == "native"
        return AttentionCapabilities(sliding_windows=True).missing(*spec) if lacking else []

    config = EngineConfig.from_flat(attn="auto")
    resolved = resolve(config, LAPTOP, gemma, INSTALLED.__getitem__, unsupported, {}.get, ROLES.__getitem__)
    spec = specs[0]
    assert (spec.soft_caps, spec.sliding_windows, spec.has_sinks, spec.value_head_dim) == ((50.0,), (64,), True, 4)
    assert resolved.config.backends.attn == "torch"
    reason = next(choice.reason for choice in resolved.choices if choice.name == "attn")
    assert "native: it does not support soft caps" in reason


def test_moe_kernels_get_the_models_features_in_the_spec() -> None:
    raw = {**MODEL.raw, "num_local_experts": 4, "num_experts_per_tok": 2, "swiglu_limit": 7.0}
    gpt_oss = model_config(GptOssForCausalLM.standard_config({**raw, "architectures": ["GptOssForCausalLM"]}))
    lacking = {"activation": MoeCapabilities(biases=True, swiglu_limit=True)}
    lacking["bias"] = MoeCapabilities(activations=("swigluoai",), swiglu_limit=True)
    lacking["swiglu_limit"] = MoeCapabilities(activations=("swigluoai",), biases=True)
    for reason, capabilities in lacking.items():

        def unsupported(
            kind: str, name: str, *spec: Any, kernel: MoeCapabilities = capabilities, reason: str = reason
        ) -> list[str]:
            missing = kernel.missing(*spec) if (kind, name) == ("moe", "triton") else []
            assert all(reason in each for each in missing)
            return missing

        installed = {**INSTALLED, "moe": {"torch", "triton"}}
        resolved = resolve(EngineConfig(), H200, gpt_oss, installed.__getitem__, unsupported, {}.get, ROLES.__getitem__)
        assert resolved.config.backends.moe == "torch"
    config, experts = EngineConfig.from_flat(tp=8, dtype="float32"), replace(MODEL, moe=MoeConfig(8, 2, 100, True))
    spec = moe_spec(config, experts, torch.device("cpu"))
    assert spec.intermediate_size == 13, "the layers pad the experts' width to a multiple of the ranks"


def test_auto_quantizes_if_checkpoint_and_hardware_allow() -> None:
    assert choose(H200).config.backends.quantization == "none"
    assert choose(H200, quantization="fp8").config.backends.quantization == "fp8"
    fp8 = replace(MODEL, quantization="fp8", raw={"quantization_config": {"quant_method": "fp8"}})
    resolved = choose(H200, ["gguf", "int4"], model=fp8)
    assert resolved.config.backends.quantization == "fp8"
    for hardware in (LAPTOP, H200):
        awq = replace(MODEL, quantization="awq")
        assert choose(hardware, ["gguf"], model=awq).config.backends.quantization == "int4"
    for hardware, refused in ((LAPTOP, ["gguf", "int4"]), (H200, ["gguf", "int4", "fp8"])):
        resolved = choose(hardware, refused, model=fp8)
        assert resolved.config.backends.quantization == "none"
        reason = next(choice.reason for choice in resolved.choices if choice.name == "quantization")
        assert "the checkpoint's weights are fp8, and are dequantized to --dtype" in reason
    with pytest.raises(ProviderUnsupportedError, match="fp8 is not for this"):
        choose(H200, refused=["fp8"], quantization="fp8")
    packed = replace(MODEL, quantization="gguf", raw={"quantization_config": {"quant_method": "gguf", "types": {}}})
    for hardware in (LAPTOP, H200):
        assert choose(hardware, model=packed).config.backends.quantization == "gguf"
        assert choose(hardware, model=packed, quantization="none").config.backends.quantization == "none"
        assert choose(hardware, ["gguf"], model=packed).config.backends.quantization == "none"  # not int4 of these
        resolved = choose(hardware, preferred={"quantization": "int4"}, model=packed)
        assert resolved.config.backends.quantization == "gguf", "no plugin may have it quantized again"
        assert any("int4: a plugin prefers it, but" in choice.reason for choice in resolved.choices)
    experts = replace(fp8, moe=MoeConfig(8, 2, 64, True))
    assert choose(H200, model=experts, moe="torch").config.backends.quantization == "none"
    assert choose(H200, model=experts, moe="torch", quantization="fp8").config.backends.quantization == "fp8"


def test_the_default_kv_dtype_is_the_models() -> None:
    assert choose(H200).config.cache.kv_dtype == "bfloat16"
    assert choose(H200, kv_dtype="fp8").config.cache.kv_dtype == "fp8"
    with pytest.raises(InvalidValueError, match="one of auto, bfloat16, float16, float32, fp8, fp8_e4m3"):
        choose(H200, kv_dtype="int8")


def attention(*uncompiled: str, refused: Iterable[str] = (), **options: Any) -> tuple[str, tuple[str, ...], str]:
    resolved = choose(H200, refused, uncompiled=uncompiled, **options)
    reason = next(choice.reason for choice in resolved.choices if choice.name == "attn")
    return resolved.config.backends.attn, resolved.uncompiled, reason


def test_auto_uses_compiled_kernels_and_names_missing_ones() -> None:
    others = {"refused": ["fa", "hopper"]}
    assert attention("fi")[:2] == ("hopper", ()), "the best one is there already"
    assert attention(**others)[:2] == ("fi,triton", ())
    chosen, uncompiled, reason = attention("fi", **others)
    assert (chosen, uncompiled) == ("triton", ("fi",))
    assert "fi,triton: fi's kernels must be compiled first" in reason
    assert attention("fi", attn="fi", **others)[:2] == ("fi", ()), "a named backend is waited for"
    assert attention("fi", attn="auto,torch", **others)[:2] == ("triton,torch", ("fi",))


def test_auto_compiles_if_no_other_provider_works() -> None:
    refused = ["fa", "hopper", "triton", "torch"]
    assert attention("fi", refused=refused, preferred={"attention": "fi"})[:2] == ("fi", ())
