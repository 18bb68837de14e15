"""Selection of the executor."""

from minisgl_core.config.options import EngineConfig
from minisgl_core.contracts.executor import Executor, ExecutorSpec
from minisgl_core.plugins.registry import Registry
from minisgl_core.runtime.supervisor import Supervisor


def make_executor(config: EngineConfig, registry: Registry, supervisor: Supervisor, replicas: int = 1) -> Executor:
    """Return the executor that ``--executor`` selects."""
    parallel, platform = config.parallel, config.backends.platform
    logs = supervisor.log_level, supervisor.log_format
    spec = ExecutorSpec(parallel.tp, parallel.pp, parallel.placement, platform, replicas, *logs)
    executor: Executor = registry.load_supported("executor", parallel.executor, spec)(supervisor.start, spec)
    return executor
