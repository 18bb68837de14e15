"""Selection of providers: the order in which ``auto`` tries them, and a check of those that the user named.

This module imports nothing heavy.
"""

from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any

from minisgl_core.config.options import AUTO, engine_options
from minisgl_core.errors import InvalidValueError, ProviderUnsupportedError
from minisgl_core.plugins.registry import Registry

Unsupported = Callable[..., list[str]]
"""Function ``unsupported(kind, name, *spec)`` that returns the reasons why a provider does not support a spec.

It raises an error if a provider that the user named does not load.
"""

PREFERENCES: dict[tuple[str, str], tuple[str, ...]] = {
    ("attention", "cuda"): ("hopper", "fa,triton", "fi,triton", "triton", "torch"),
    ("attention", "cpu"): ("native", "torch"),
    ("ops", "cuda"): ("hopper", "triton", "torch"),
    ("ops", "cpu"): ("native", "onednn", "torch"),
    ("moe", "cuda"): ("triton", "torch"),
    ("moe", "cpu"): ("torch",),
    ("quantization", "cuda"): ("gguf", "int4", "int8", "mxfp4", "fp8", "none"),
    ("quantization", "cpu"): ("gguf", "int4", "int8", "mxfp4", "none"),
    ("communicator", "cuda"): ("oneshot", "torch"),
    ("communicator", "cpu"): ("torch",),
    ("grammar", "cuda"): ("llguidance",),
    ("grammar", "cpu"): ("llguidance",),
    ("prefix_cache", "cuda"): ("radix", "naive"),
    ("prefix_cache", "cpu"): ("radix", "naive"),
}
"""Providers that ``auto`` tries, best first, by kind and platform. It first tries the one that a plugin's hook prefers. For
``ops``, each role is served by the first provider that has it. On CPUs, ``native`` are this project's kernels in C, and ``torch``
is plain PyTorch. A plugin's platform has the CPU's lists.

The order of attention backends on CUDA was measured on Hopper GPUs (docs/performance-notes.md). There, the Hopper kernels are the
fastest for prefills and decodes. What they do not support goes to FlashAttention or FlashInfer for prefills, and to Triton for
decodes, where Triton's kernel is as fast as theirs and needs no planning on the host. For the message sizes of decode steps on
four H200s, the one-shot all-reduce is two to five times as fast as NCCL's (docs/benchmarks.md).
"""


class ProviderPicker:
    """Selection of the provider of each kind, for one machine.

    Attributes:
        to_compile: attention backends that were passed over because they are not compiled; an ordered set, so values are None.
    """

    def __init__(
        self,
        platform: str,
        installed: Callable[[str], Iterable[str]],
        unsupported: Unsupported,
        preferred: Callable[[str], str | None],
        uncompiled: Callable[..., str],
    ) -> None:
        self._platform = platform
        self._installed, self._unsupported, self._preferred = installed, unsupported, preferred
        self._uncompiled = uncompiled
        self.to_compile: dict[str, None] = {}

    def pick(self, kind: str, wanted: str, *spec: Any, skipped: Container[str] = ()) -> tuple[str, str]:
        """Return the name of the selected provider, and the reason. ``auto`` does not try the providers `skipped`.

        Raises:
            ProviderUnsupportedError: the provider that the user named does not support the spec, or no provider does.
        """
        if wanted != AUTO:
            reasons = self._unsupported(kind, wanted, *spec)
            if reasons:
                raise ProviderUnsupportedError(kind, wanted, reasons)
            return wanted, "set by the user"
        installed = set(self._installed(kind))
        ordered = [name for name in self._preferences(kind) if name not in skipped]
        preferred = self._preferred(kind)
        passed_over: list[str] = []
        uncompiled_pick: tuple[str, str] | None = None
        for name in dict.fromkeys([preferred, *ordered] if preferred else ordered):
            parts = name.split(",")
            if name in skipped:
                passed_over.append(f"{name}: a plugin prefers it, but `auto` does not select it for this checkpoint")
                continue
            if not installed.issuperset(parts):
                if name == preferred:
                    passed_over.append(f"{name}: a plugin prefers it, but it is not installed")
                continue
            reasons = [reason for part in parts for reason in self._unsupported(kind, part, *spec)]
            if not reasons:
                first = f"first of {', '.join(ordered)} that works here"
                why = "a plugin prefers it here" if name == preferred else first
                pick = name, "; not ".join([why, *passed_over])
                kernels = {
                    part: text for part in parts if kind == "attention" and (text := self._uncompiled(part, *spec))
                }
                if not kernels:
                    return pick
                # A later backend that is ready is selected instead, and the launcher compiles this one for the next start.
                if uncompiled_pick is None:
                    uncompiled_pick = pick
                    self.to_compile |= dict.fromkeys(kernels)
                reasons = [f"{text} must be compiled first" for text in kernels.values()]
            passed_over.append(f"{name}: {reasons[0]}")
        if uncompiled_pick is not None:  # nothing else works here
            self.to_compile.clear()
            return uncompiled_pick
        missing = [f"none of {', '.join(ordered)} is installed", "install minisgl-backends or name a provider"]
        raise ProviderUnsupportedError(kind, AUTO, passed_over or missing)

    def automatic(self, kind: str) -> list[str]:
        """Return the providers that ``auto`` tries, best first: those that a plugin prefers, then the platform's list."""
        installed, preferred = set(self._installed(kind)), self._preferred(kind)
        return [*(preferred.split(",") if preferred else ()), *(x for x in self._preferences(kind) if x in installed)]

    def first(self, kind: str) -> str:
        """Return the most preferred provider, which may be unsupported or not installed."""
        return self._preferred(kind) or self._preferences(kind)[0]

    def _preferences(self, kind: str) -> tuple[str, ...]:
        return PREFERENCES.get((kind, self._platform)) or PREFERENCES[kind, "cpu"]


def check_providers(values: Mapping[str, Any], registry: Registry) -> None:
    """Check that each provider named by an engine option in `values` is installed, even if the model does not need its kind.

    Raises:
        PluginError: no provider, or more than one, has that name.
        InvalidValueError: ``auto`` is one of several names, which only ``--ops`` supports.
    """
    for name, item in engine_options().items():
        kind = item.metadata["option"].kind
        if kind and values.get(name, AUTO) != AUTO:
            for provider in filter(None, map(str.strip, values[name].split(","))):
                if provider != AUTO:
                    registry.entry(kind, provider)
                elif kind != "ops":
                    allowed = "auto alone, or names without auto"
                    raise InvalidValueError(f"--{name.replace('_', '-')}", values[name], allowed)
