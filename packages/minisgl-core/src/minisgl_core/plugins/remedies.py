"""Remedies for providers that are missing or fail to import."""

from __future__ import annotations

from minisgl_core.plugins.kinds import KINDS

_REQUIREMENTS = {
    ("attention", "fi"): "minisgl-backends[fi]",
    ("attention", "trtllm"): "minisgl-backends[fi]",
    ("attention", "fa"): "minisgl-backends[fa]",
    ("attention", "fa4"): "minisgl-backends[fa4]",
    ("attention", "torch"): "minisgl-backends",
    **{(kind, "hopper"): "minisgl-backends[triton]" for kind in ("attention", "ops")},
    **{("prefix_cache", name): "minisgl-backends" for name in ("radix", "naive")},
    ("moe", "torch"): "minisgl-backends",
    **{("quantization", name): "minisgl-backends" for name in ("fp8", "gguf", "int4", "int8", "mxfp4")},
    ("grammar", "llguidance"): "minisgl-backends[grammar]",
    **{(kind, "triton"): "minisgl-backends[triton]" for kind in ("attention", "moe", "ops")},
    **{("communicator", name): "minisgl-backends" for name in ("torch", "pynccl")},
    ("weights", "gguf"): "minisgl-models",
    **{
        ("models", f"{name}ForCausalLM"): "minisgl-models"
        for name in ("Llama", "Mistral", "Qwen2", "Qwen3", "Qwen3Moe")
    },
    ("models", "transformers"): "minisgl-models",
    **{("commands", name): "minisgl-server" for name in ("launch", "shell", "bench")},
    **{("hooks", name): "minisgl-server" for name in ("page", "prometheus")},
}


def requirement(kind: str, name: str) -> str:
    """Return the requirement that installs a shipped provider, such as ``minisgl-backends[fi]``; empty for others."""
    return _REQUIREMENTS.get((kind, name), "")


def install(requirement: str) -> str:
    """Return the command that installs `requirement`, quoted for a shell if it has an extra."""
    return f"pip install '{requirement}'" if "[" in requirement else f"pip install {requirement}"


def shipped_names(kind: str) -> list[str]:
    """Return names of a kind in the shipped distributions, installed or not."""
    assert kind in KINDS
    return [name for of_kind, name in _REQUIREMENTS if of_kind == kind]


def for_import_failure(kind: str, name: str, distribution: str, error: BaseException) -> str:
    """Return a remedy for a provider whose import raised `error`, as a sentence."""
    if shipped := requirement(kind, name):
        return f"Try: {install(shipped)}"
    if isinstance(error, ModuleNotFoundError) and error.name:
        return (
            f"Install what {distribution} needs ({error.name.partition('.')[0]}), or another version of {distribution}."
        )
    return f"Install another version of {distribution}, or uninstall it."
