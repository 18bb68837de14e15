"""Core of minisgl: plugin contracts and discovery, engine, scheduler, KV cache, `LLM` and the ``minisgl`` command.

The names below are imported when they are first used, so that ``import minisgl_core`` needs no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minisgl_core.config.options import EngineConfig
    from minisgl_core.errors import MinisglError
    from minisgl_core.llm import LLM
    from minisgl_core.plugins.hookspecs import hookimpl
    from minisgl_core.sampling_params import SamplingParams

    __version__: str

__all__ = ["LLM", "EngineConfig", "MinisglError", "SamplingParams", "__version__", "hookimpl"]

_MODULES = {
    "LLM": "minisgl_core.llm",
    "EngineConfig": "minisgl_core.config.options",
    "MinisglError": "minisgl_core.errors",
    "SamplingParams": "minisgl_core.sampling_params",
    "hookimpl": "minisgl_core.plugins.hookspecs",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        value: Any = version("minisgl-core")
    elif name in _MODULES:
        value = getattr(import_module(_MODULES[name]), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
