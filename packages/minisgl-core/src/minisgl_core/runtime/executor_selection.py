"""Selection of the executor."""

from __future__ import annotations

from minisgl_core.config.options import EngineConfig
from minisgl_core.contracts.executor import Executor, StartProcess
from minisgl_core.errors import ProviderUnsupportedError
from minisgl_core.plugins.registry import Registry


def make_executor(config: EngineConfig, registry: Registry, start_process: StartProcess) -> Executor:
    """Return the executor that ``--executor`` selects.

    Raises:
        PluginError: it is not installed, or cannot run this number of ranks here.
    """
    name = config.parallel.executor
    if reasons := registry.unsupported("executor", name, config.parallel.size):
        raise ProviderUnsupportedError("executor", name, reasons)
    executor: Executor = registry.load("executor", name)(start_process)
    return executor
