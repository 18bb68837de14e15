"""Makes the executor that the options name."""

from __future__ import annotations

from minisgl_core.config.options import EngineConfig
from minisgl_core.contracts.executor import Executor, StartProcess
from minisgl_core.errors import ProviderUnsupportedError
from minisgl_core.plugins.registry import Registry


def make_executor(config: EngineConfig, registry: Registry, start_process: StartProcess) -> Executor:
    """Return the executor of ``--executor``.

    Raises:
        PluginError: it is not installed, or cannot run so many ranks here.
    """
    name = config.parallel.executor
    if reasons := registry.unsupported("executor", name, config.parallel.tp):
        raise ProviderUnsupportedError("executor", name, reasons)
    executor: Executor = registry.load("executor", name)(start_process)
    return executor
