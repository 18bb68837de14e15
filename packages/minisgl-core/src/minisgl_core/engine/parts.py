"""What an engine is put together from, when its KV pool has been sized, and before, to measure what a step takes."""

from __future__ import annotations

from contextlib import suppress

from minisgl_core.config.model import ModelConfig
from minisgl_core.config.options import AUTO, EngineConfig
from minisgl_core.config.resolve import attention_spec, kv_torch_dtype
from minisgl_core.contracts.attention import AttentionBackend, AttentionSpec, GraphCapturable
from minisgl_core.contracts.communicator import Communicator
from minisgl_core.contracts.model import Model
from minisgl_core.contracts.ops import Ops
from minisgl_core.contracts.platform import Platform
from minisgl_core.engine.combined_attention import combine
from minisgl_core.engine.engine import Engine
from minisgl_core.engine.graphs import graph_sizes
from minisgl_core.engine.largest_step import largest_step
from minisgl_core.engine.pieces import piece_sizes
from minisgl_core.errors import InvalidValueError, PluginError
from minisgl_core.kv.page_table import PageTable
from minisgl_core.kv.pool import KVLayout, KVPool, KVPoolSpec
from minisgl_core.plugins.registry import Registry

_LAUNCHES_S, _FLOPS = 0.5e-3, 600e12
"""What it takes to launch a layer's kernels one by one, and what a device computes meanwhile, both measured on an H200."""
_LEAST_PIECES = 512


def launch_bound_tokens(shape: ModelConfig, tp: int) -> int:
    """Tokens up to which a layer's products take the device less time than its launches take the host."""
    moe = shape.moe
    width = shape.intermediate_size if moe is None else moe.top_k * moe.intermediate_size
    attention = 2 * (shape.num_q_heads + shape.num_kv_heads) * shape.head_dim
    per_token = 2 * shape.hidden_size * (attention + 3 * width) / tp
    return int(_LAUNCHES_S * _FLOPS / per_token)


class EngineParts:
    """What an engine is put together from, around a KV pool of any size.

    Attributes:
        attention: the backends' classes, the decodes' last.
        longest: most tokens of a sequence, as far as the options say.
        least_pool: of the fewest pages.
    """

    def __init__(
        self,
        config: EngineConfig,
        shape: ModelConfig,
        platform: Platform,
        communicator: Communicator,
        model: Model,
        ops: Ops,
        registry: Registry,
    ) -> None:
        self._config, self._shape, self._platform, self._communicator = config, shape, platform, communicator
        self._model, self._ops = model, ops
        self.attention = [registry.load("attention", name) for name in config.backends.attn.split(",")]
        self.longest = int(config.model.max_seq_len_override or 0)
        self.least_pool = KVPoolSpec(
            num_layers=len(model.attention_layers()),
            num_pages=2,
            page_size=int(config.cache.page_size),
            num_kv_heads=max(1, shape.num_kv_heads // config.parallel.tp),
            head_dim=shape.head_dim,
            dtype=kv_torch_dtype(config, ops.dtype),
            device=platform.device,
            layout=_common_layout(config.backends.attn, self.attention, registry),
        )

    def engine(self, pool: KVPoolSpec, max_seq_len: int) -> Engine:
        """Allocate the pool and put an engine around it."""
        num_rows = self._config.scheduler.max_running_requests
        table = PageTable(num_rows, max_seq_len, pool.page_size, pool.device)
        spec = attention_spec(self._config, self._shape, max_seq_len, pool.page_size, self._ops.dtype, pool.device)
        attention = _attention(self.attention, spec, KVPool(pool), table)
        return Engine(self._platform, self._communicator, self._model, attention, table, self._ops, num_rows)

    def run_largest_step(self) -> None:
        """Put an engine around the fewest pages, run what takes the most memory, and forget it."""
        limits = self._config.scheduler
        prefill, vocab = int(limits.max_prefill_length), self._shape.vocab_size
        plan = largest_step(limits.max_running_requests, prefill, self.longest, vocab)
        self.engine(self.least_pool, self.longest).launch(plan).result()

    def graph_sizes(self) -> list[int]:
        """Batch sizes of decode steps to record.

        Raises:
            InvalidValueError: graphs were asked for, and cannot be recorded.
        """
        decode, platform, limits = self.attention[-1], self._platform, self._config.scheduler
        wanted, limit = limits.cuda_graph_max_bs, limits.max_running_requests
        name = self._config.backends.attn.split(",")[-1]
        reasons = [] if platform.supports_graphs else [f"the platform {platform.name} has no graphs"]
        reasons += [] if issubclass(decode, GraphCapturable) else [f"the attention backend {name} cannot be recorded"]
        if reasons and wanted not in (AUTO, 0):
            raise InvalidValueError("--cuda-graph-max-bs", wanted, f"0 here: {' and '.join(reasons)}")
        if reasons or wanted == 0:
            return []
        return graph_sizes(min(limit, 256) if wanted == AUTO else min(limit, int(wanted)))

    def piece_sizes(self, records_graphs: bool) -> list[int]:
        """Numbers of tokens of steps to record in pieces; with auto, none where there are no graphs of decodes, and otherwise
        as long as launches would be what a step waits for.

        Raises:
            InvalidValueError: pieces were asked for, and cannot be recorded.
        """
        platform, limits = self._platform, self._config.scheduler
        wanted, largest = (
            limits.piecewise_cuda_graph_max_tokens,
            int(limits.max_prefill_length) + limits.max_running_requests,
        )
        if not platform.supports_graphs and wanted not in (AUTO, 0):
            remedy = f"0 here: the platform {platform.name} has no graphs"
            raise InvalidValueError("--piecewise-cuda-graph-max-tokens", wanted, remedy)
        if wanted == AUTO:
            most = max(_LEAST_PIECES, launch_bound_tokens(self._shape, self._config.parallel.tp))
            return piece_sizes(min(most, largest)) if records_graphs else []
        return piece_sizes(min(int(wanted), largest))


def _common_layout(names: str, backends: list[type[AttentionBackend]], registry: Registry) -> KVLayout:
    """The layout of the KV pool that all backends read.

    Raises:
        InvalidValueError: they have none in common; names the installed backends that each would go with.
    """
    layouts = {backend.kv_layout for backend in backends}
    if len(layouts) == 1:
        return backends[0].kv_layout
    named = dict(zip(names.split(","), backends, strict=True))
    have = " and ".join(f"{name} has {backend.kv_layout}" for name, backend in named.items())
    partners = [
        f"{name} goes with {', '.join(_of_layout(backend.kv_layout, name, registry)) or 'none that is installed'}."
        for name, backend in named.items()
    ]
    remedy = " ".join([*partners, "See: minisgl plugins check NAME"])
    raise InvalidValueError("--attn", names, f"two backends with one layout of the KV pool; {have}", remedy)


def _of_layout(layout: KVLayout, besides: str, registry: Registry) -> list[str]:
    """The installed backends with this layout of the KV pool, but for one; those that do not load are left out."""
    found = []
    for name in registry.names("attention"):
        with suppress(PluginError):
            if name != besides and registry.load("attention", name).kv_layout == layout:
                found.append(name)
    return found


def _attention(
    classes: list[type[AttentionBackend]], spec: AttentionSpec, pool: KVPool, table: PageTable
) -> AttentionBackend:
    backends = [backend(spec, pool, table.data) for backend in classes]
    return backends[0] if len(backends) == 1 else combine(spec, pool, table.data, *backends)
