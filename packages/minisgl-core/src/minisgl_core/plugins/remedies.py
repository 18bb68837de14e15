"""Remedies for providers that are missing or fail to import."""

_SHIPPED = {
    "minisgl-backends": {
        "attention": "native torch",
        "communicator": "oneshot pynccl torch",
        "moe": "torch",
        "ops": "native onednn",
        "prefix_cache": "naive radix",
        "quantization": "fp8 gguf int4 int8 mxfp4",
    },
    "minisgl-backends[fa]": {"attention": "fa"},
    "minisgl-backends[fi]": {"attention": "fi trtllm"},
    "minisgl-backends[grammar]": {"grammar": "llguidance"},
    "minisgl-backends[ray]": {"executor": "ray"},
    "minisgl-backends[triton]": {"attention": "hopper triton", "moe": "triton", "ops": "hopper triton"},
    "minisgl-models": {
        "models": "Gemma2ForCausalLM Gemma3ForCausalLM Gemma3ForConditionalGeneration Glm4ForCausalLM Glm4MoeForCausalLM "
        "GptOssForCausalLM GraniteForCausalLM LlamaForCausalLM MistralForCausalLM MixtralForCausalLM Olmo2ForCausalLM "
        "Olmo3ForCausalLM Phi3ForCausalLM Qwen2ForCausalLM Qwen2MoeForCausalLM Qwen3ForCausalLM Qwen3MoeForCausalLM",
        "weights": "gguf",
    },
    "minisgl-models[transformers]": {"models": "transformers"},
    "minisgl-server": {
        "commands": "launch shell bench",
        "hooks": "cache_events prometheus web_ui",
        "router": "least-loaded prefix round-robin",
    },
}
"""Names by kind, by the requirement that installs them."""
_REQUIREMENTS = {
    (kind, name): needed
    for needed, kinds in _SHIPPED.items()
    for kind, names in kinds.items()
    for name in names.split()
}


def requirement(kind: str, name: str) -> str:
    """Return the requirement that installs a shipped provider, such as ``minisgl-backends[fi]``; empty for others."""
    return _REQUIREMENTS.get((kind, name), "")


def install_command(requirement: str) -> str:
    """Return the command that installs `requirement`, quoted for a shell if it has an extra."""
    return f"pip install '{requirement}'" if "[" in requirement else f"pip install {requirement}"


def shipped_names(kind: str) -> list[str]:
    """Return names of a kind in the shipped distributions, installed or not."""
    return [name for each, name in _REQUIREMENTS if each == kind]


def for_import_failure(kind: str, name: str, distribution: str, error: BaseException) -> str:
    """Return a remedy for a provider whose import raised `error`, as a sentence."""
    if shipped := requirement(kind, name):
        return f"Try: {install_command(shipped)}"
    if isinstance(error, ModuleNotFoundError) and error.name:
        module = error.name.partition(".")[0]
        return f"Install what {distribution} needs ({module}), or another version of {distribution}."
    return f"Install another version of {distribution}, or uninstall it."
