"""``--quantization gguf``: packed weights of GGUF files.

Each layer loads the file's blocks as they are, and repacks them once for its kernels: C on CPUs (`gguf_cpu`), Triton on GPUs
(`gguf_gpu`).
"""

import logging
from collections.abc import Callable, Iterable

from minisgl_backends.kernels.device import packed_gemm_unsupported
from minisgl_backends.native import library
from minisgl_backends.quantization.gguf_cpu import CpuLinearMethod
from minisgl_backends.quantization.gguf_experts import CpuExperts, GgufExperts
from minisgl_backends.quantization.gguf_method import GgufLinearMethod
from minisgl_backends.quantization.gguf_types import TYPES, GgmlType
from minisgl_backends.quantization.requirements import wrong_weights_message
from minisgl_core.contracts.layer_methods import EmbeddingMethod, ExpertsMethod, ExpertsSpec, LinearMethod, LinearSpec
from minisgl_core.contracts.moe import MoeKernel
from minisgl_core.contracts.ops import Ops
from minisgl_core.contracts.quantization import Quantization, QuantizationSpec
from minisgl_core.contracts.shard import Shard

_LOG = logging.getLogger(__name__)


class Gguf(Quantization):
    """Linear layers, embedding, LM head and experts of a GGUF file.

    A layer is dequantized if its type has no kernel, or if a rank's columns begin or end within a block.
    """

    @classmethod
    def unsupported(cls, spec: QuantizationSpec) -> list[str]:
        if spec.checkpoint is None or spec.checkpoint.method != "gguf":
            return [wrong_weights_message(spec.checkpoint, "those of a GGUF file", "GGUF files with quantized weights")]
        if spec.device.type == "cuda":
            return packed_gemm_unsupported(spec.device, spec.dtype)
        return library.unsupported(spec.device, spec.dtype)

    def __init__(self, spec: QuantizationSpec, ops: Ops) -> None:
        super().__init__(spec, ops)
        self._linear: Callable[[LinearSpec, list[GgmlType]], GgufLinearMethod] = CpuLinearMethod
        self._experts: type[GgufExperts] = CpuExperts
        if spec.device.type == "cuda":
            self.use_gpu_kernels()

    def use_gpu_kernels(self) -> None:
        """Select the Triton kernels. Tests call it on a CPU, for Triton's interpreter."""
        from minisgl_backends.quantization.gguf_gpu import GpuExperts, gpu_method

        self._linear, self._experts = gpu_method(self.spec.device), GpuExperts

    def linear(self, spec: LinearSpec) -> LinearMethod:
        """Return the packed method if there is one, else dequantize the layer."""
        return self.embedding(spec) or super().linear(spec)

    def embedding(self, spec: LinearSpec) -> EmbeddingMethod | None:
        """Return the method of the embedding, the LM head or a linear layer, if its parts all have a kernel."""
        types = self._types([(part.name, spec.columns) for part in spec.parts])
        return None if types is None else self._linear(spec, types)

    def experts(self, spec: ExpertsSpec, kernel: type[MoeKernel]) -> ExpertsMethod:
        """Return the method of packed experts if there are kernels for the types of all projections, else dequantize them."""
        types = None
        if self._experts.supports(spec, kernel):
            columns = (*[Shard.whole(spec.moe.hidden_size)] * 2, spec.inner)
            names = [f"{spec.name}.{projection}" for projection in spec.projections]
            types = self._types(zip(names, columns, strict=True))
        return super().experts(spec, kernel) if types is None else self._experts(spec, kernel, types, self._linear)

    def _types(self, modules: Iterable[tuple[str, Shard]]) -> list[GgmlType] | None:
        """Return the types of modules with these columns; None if one of them is not quantized, or has to be dequantized."""
        assert self.spec.checkpoint is not None
        found = []
        for module, columns in modules:
            name = (self.spec.checkpoint.weights_of(module) or {}).get("type")
            if name is None:  # not quantized in the file
                return None
            kind = TYPES.get(name)
            if kind is not None and kind.in_bytes(columns) is not None:
                found.append(kind)
                continue
            why = "has no kernel" if kind is None else f"has blocks of {kind.columns} columns, which ranks would split"
            _LOG.warning("%s is dequantized to %s: its type %s %s", module, self.spec.dtype, name, why)
            return None
        return found
