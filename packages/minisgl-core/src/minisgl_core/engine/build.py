"""Construction of a rank's model runner from options.

options --locate, open--> checkpoint --normalise--> ModelConfig --resolve--> options without auto
    --> groups of ranks --> model --> weights --> KV pool in the remaining memory --> attention backend --> ModelRunner --> graphs
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from minisgl_core.config.options import AUTO, EngineConfig, engine_options
from minisgl_core.config.provider_picker import check_providers
from minisgl_core.config.resolve import (
    Choice,
    Resolved,
    context_length,
    kv_torch_dtype,
    quantization_spec,
    resolve,
    torch_dtype,
)
from minisgl_core.contracts.communicator import Communicator
from minisgl_core.contracts.executor import RankPlacement
from minisgl_core.contracts.model import BuildContext
from minisgl_core.contracts.ops import Ops, roles_of
from minisgl_core.contracts.platform import Hardware, Platform
from minisgl_core.engine.checkpoint import TRANSFORMERS, Checkpoint, default_sampling, open_checkpoint
from minisgl_core.engine.memory import size_pool, weights_must_fit
from minisgl_core.engine.model_runner import ModelRunner
from minisgl_core.engine.model_runner_factory import ModelRunnerFactory
from minisgl_core.engine.rank_groups import RankGroups, join_groups
from minisgl_core.engine.startup_timer import StartupTimer
from minisgl_core.errors import MinisglError, PluginError
from minisgl_core.platforms.selection import pick_platform, preferred_by
from minisgl_core.plugins.hooks import Hooks
from minisgl_core.plugins.registry import Registry
from minisgl_core.protocol.messages import EngineInfo
from minisgl_core.weights.loader import load_weights

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BuiltModelRunner:
    """Model runner of this rank that is ready to run, with the resolved options in `config`."""

    model_runner: ModelRunner
    config: EngineConfig
    checkpoint: Checkpoint
    info: EngineInfo


def build_model_runner(
    config: EngineConfig,
    registry: Registry,
    hooks: Hooks,
    placement: RankPlacement = RankPlacement(),  # noqa: B008  # frozen
    progress: bool = True,
    on_joined: Callable[[Communicator], None] = lambda communicator: None,
) -> BuiltModelRunner:
    """Build one rank's model runner. Every rank calls this with the same options.

    The function is long because it lists all steps of a start, in order.

    With `progress`, rank 0 shows progress bars. `on_joined` is called with each communicator as soon as it exists, so that it can
    be aborted if another rank fails.

    Raises:
        MinisglError: an option, the model or a provider is not supported.
    """
    timer = StartupTimer()
    checkpoint, platform_class, hardware, resolved = resolve_options(config, registry, hooks, placement)
    config, sampling = resolved.config, default_sampling(checkpoint.source.generation_config)
    rank, platform = placement.rank, platform_class(placement.local_rank)
    # The policy is used later, but an error should be raised before the weights load.
    registry.load("policy", config.scheduler.policy)
    timer.done("opened the checkpoint")
    with platform.stream():
        groups = join_groups(config, registry, placement, platform.device, on_joined)
        model_runner: ModelRunner | None = None
        try:
            if config.parallel.size > 1:
                config = config.with_flat(attn=_attention_of_rank0(config.backends.attn, registry, groups))
            _check_same_providers(config, registry, groups, rank, checkpoint.provider)
            timer.done("joined the ranks")
            providers = [registry.load("ops", name) for name in config.backends.ops.split(",")]
            ops = Ops.of(platform.device, torch_dtype(config), *providers)
            moe = registry.load("moe", config.backends.moe) if checkpoint.config.moe is not None else None
            kv_dtype = kv_torch_dtype(config)
            provider = registry.load("quantization", config.backends.quantization)
            quantization = provider(quantization_spec(checkpoint.config, ops.dtype, platform.device), ops)
            layers = groups.layers(checkpoint.config.num_layers)
            build = BuildContext(groups.tensor, ops, platform.device, ops.dtype, moe, kv_dtype, quantization, layers)
            # A shorter context needs fewer RoPE positions, and may select other factors of LongRoPE.
            served = replace(checkpoint.config, max_position=context_length(config))
            with weights_must_fit():
                model = checkpoint.model_class(served, build)
                load_weights(model, checkpoint.source, progress and rank == 0)
            platform.synchronize()
            timer.done("loaded the weights")
            factory = ModelRunnerFactory(config, platform, groups, model, ops, registry)
            graphs = factory.decode_graph_sizes()
            piecewise = factory.piecewise_graph_sizes(bool(graphs))
            # On a CPU, a decode batch is captured when its size first occurs, and graphs take no memory of a device.
            num_captures = 0 if platform.has_host_graphs else len(graphs) + len(piecewise)
            pool = size_pool(factory.smallest_pool, config, platform, groups, factory.run_profile_batch, num_captures)
            max_seq_len = min(factory.max_seq_len, (pool.num_pages - 1) * pool.page_size)
            timer.done("sized the memory")
            model_runner = factory.model_runner(pool, max_seq_len)
            limits = config.scheduler
            is_default = limits.cuda_graph_max_bs == limits.piecewise_cuda_graph_max_tokens == AUTO
            may_fail = is_default and checkpoint.provider == TRANSFORMERS
            if not capture_graphs(model_runner, graphs, piecewise, progress and rank == 0, may_fail=may_fail):
                graphs, piecewise = [], []
            platform.synchronize()
            num_decode_captures = 0 if platform.has_host_graphs else len(graphs)
            timer.done(f"captured {num_decode_captures} decode graphs and {len(piecewise)} sizes of piecewise graphs")
        except BaseException:
            if model_runner is not None:
                model_runner.free_graphs()
            groups.abandon()  # otherwise, kernels that wait for other ranks would occupy the device forever
            raise
    info = _info(checkpoint, resolved, sampling, pool.num_pages, max_seq_len, hardware, timer)
    return BuiltModelRunner(model_runner, config, checkpoint, info)


def capture_graphs(
    model_runner: ModelRunner, decode_sizes: list[int], piecewise_sizes: list[int], progress: bool, *, may_fail: bool
) -> bool:
    """Capture CUDA graphs of these sizes. If that fails and `may_fail`, return False; steps then run without graphs."""
    try:
        if decode_sizes:
            model_runner.capture_decode_graphs(decode_sizes, progress)
        if piecewise_sizes:
            model_runner.capture_piecewise_graphs(piecewise_sizes, progress)
    except MinisglError as error:
        if not may_fail:
            raise
        logger.warning("steps run without CUDA graphs, which takes longer: %s", error)
        model_runner.free_graphs()
        return False
    return True


def resolve_options(
    config: EngineConfig,
    registry: Registry,
    hooks: Hooks,
    placement: RankPlacement = RankPlacement(),  # noqa: B008  # frozen
) -> tuple[Checkpoint, type[Platform], Hardware, Resolved]:
    """Open the checkpoint and resolve all options for this machine.

    Raises:
        MinisglError: an option, the model or a provider is not supported.
    """
    check_providers(config.flat(), registry)
    preferred = preferred_by(hooks)
    platform_class, hardware = pick_platform(config.backends.platform, registry, preferred)
    checkpoint = open_checkpoint(config, registry)
    is_transformers = checkpoint.provider == TRANSFORMERS
    config = config.with_flat(model_impl=TRANSFORMERS if is_transformers else "minisgl")
    if is_transformers and platform_class.has_host_graphs and config.scheduler.cuda_graph_max_bs == AUTO:
        # Graphs on the host must not have experts, and it is not known if the model has any.
        config = config.with_flat(cuda_graph_max_bs=0)
    if is_transformers and checkpoint.config.quantization:
        config = config.with_flat(quantization="none")
    resolved = resolve(
        config,
        hardware,
        checkpoint.config,
        registry.names,
        _unsupported_reasons(config, registry),
        lambda kind: preferred(kind, hardware),
        lambda name: roles_of(registry.load("ops", name)),
        lambda name, spec: str(registry.load("attention", name).uncompiled(spec)),
        placement,
    )
    return checkpoint, platform_class, hardware, resolved


def _unsupported_reasons(config: EngineConfig, registry: Registry) -> Callable[..., list[str]]:
    """Return a function that asks providers for the reasons why they do not support a spec.

    If a provider does not load, that is an error if the user named it, and otherwise a reason and a warning.
    """
    values, kinds = config.flat(), {name: item.metadata["option"].kind for name, item in engine_options().items()}
    named = {(kind, provider) for name, kind in kinds.items() if kind for provider in values[name].split(",")}

    def unsupported(kind: str, name: str, *spec: Any) -> list[str]:
        try:
            if spec:
                return registry.unsupported(kind, name, *spec)
            registry.load(kind, name)
            return []
        except PluginError as error:
            if (kind, name) in named:
                raise
            logger.warning("skipped: %s", str(error))
            return [str(error)]

    return unsupported


def _attention_of_rank0(own: str, registry: Registry, groups: RankGroups) -> str:
    """Return rank 0's attention backends, or this rank's `own` if they are not installed here.

    ``auto`` prefers backends whose kernels are compiled, so it may select other ones on another host.
    """
    attn = own
    for group in groups.all:
        attn = str(group.broadcast_object(attn))
    return attn if set(attn.split(",")) <= set(registry.names("attention")) else own


def _check_same_providers(
    config: EngineConfig, registry: Registry, groups: RankGroups, rank: int, model_provider: str
) -> None:
    """Raise PluginError if this rank resolved other providers than rank 0, since the ranks could deadlock."""
    if config.parallel.size == 1:
        return
    chosen = {
        "attention": config.backends.attn,
        "communicator": config.backends.communicator,
        "models": model_provider,
        "ops": config.backends.ops,
        "quantization": config.backends.quantization,
    }
    digest = registry.digest(chosen)
    if any(group.broadcast_object(digest) != digest for group in groups.all):
        raise PluginError(f"rank {rank} resolved other providers than rank 0; install the same versions for every rank")


def _info(
    checkpoint: Checkpoint,
    resolved: Resolved,
    sampling: dict[str, Any],
    num_pages: int,
    max_seq_len: int,
    hardware: Hardware,
    timer: StartupTimer,
) -> EngineInfo:
    config, model = resolved.config, checkpoint.config
    tokens = (num_pages - 1) * int(config.cache.page_size)
    pool = Choice("num_pages", str(num_pages), f"room for {tokens:,} tokens of KV")
    is_transformers = checkpoint.provider == TRANSFORMERS
    impl = [Choice("model_impl", TRANSFORMERS, checkpoint.provider_reason)] if is_transformers else []
    return EngineInfo(
        model=checkpoint.name,
        architecture=model.architecture,
        dtype=config.model.dtype,
        device=hardware.device_name,
        max_seq_len=max_seq_len,
        vocab_size=model.vocab_size,
        num_pages=num_pages,
        page_size=int(config.cache.page_size),
        eos_token_ids=list(model.eos_token_ids),
        max_requests=config.scheduler.max_running_requests + config.scheduler.max_queued_requests,
        grammar=config.backends.grammar,
        bos_token_id=model.bos_token_id,
        default_sampling=sampling,
        choices=[*impl, *resolved.choices, pool],
        start_s=timer.seconds,
        uncompiled=list(resolved.uncompiled),
    )
