"""TensorRT-LLM's attention kernels for Blackwell (trtllm-gen), through FlashInfer."""

import torch

from minisgl_backends.attention.batch_page_table import AttentionMetadata, BatchPageTableAttention
from minisgl_backends.attention.flashinfer_build import flashinfer_broken
from minisgl_backends.attention.requirements import head_dim_unsupported
from minisgl_backends.requirements import dtype_unsupported, gpu_missing, package_missing
from minisgl_core.contracts.attention import AttentionSpec
from minisgl_core.contracts.kv_cache import KVPages

_DTYPES = (torch.bfloat16, torch.float16)
_HEAD_DIMS = (64, 128, 256)
_PAGE_SIZES = (16, 32, 64)
_WORKSPACE_BYTES = 128 * 2**20  # recommended by FlashInfer


class TrtllmAttention(BatchPageTableAttention):
    """Attention by trtllm-gen kernels, which come as cubins: FlashInfer downloads them at first use."""

    needs_cu_seqlens_k = True

    @classmethod
    def unsupported(cls, spec: AttentionSpec) -> list[str]:
        reasons = [*package_missing("flashinfer", "minisgl-backends[fi]"), *gpu_missing(spec.device, (10, 0))]
        if not reasons and torch.cuda.get_device_capability(spec.device)[0] != 10:
            reasons.append("its kernels run on compute capability 10.x only")
        if spec.page_size not in _PAGE_SIZES:
            sizes = ", ".join(map(str, _PAGE_SIZES))
            reasons.append(f"it supports pages of {sizes} tokens, not of {spec.page_size} (--page-size 64)")
        reasons += [*dtype_unsupported(spec.dtype, _DTYPES), *head_dim_unsupported(spec, _HEAD_DIMS)]
        return [*super().unsupported(spec), *reasons] or flashinfer_broken()

    def __init__(self, spec: AttentionSpec, pool: KVPages, page_table: torch.Tensor) -> None:
        super().__init__(spec, pool, page_table)
        from flashinfer.decode import trtllm_batch_decode_with_kv_cache
        from flashinfer.prefill import trtllm_batch_context_with_kv_cache

        self._decode, self._prefill = trtllm_batch_decode_with_kv_cache, trtllm_batch_context_with_kv_cache
        self._workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=spec.device)

    def attend(
        self,
        q: torch.Tensor,
        k_pages: torch.Tensor,
        v_pages: torch.Tensor,
        metadata: AttentionMetadata,
        scale: float,
        window: int | None,
        out: torch.Tensor,
    ) -> None:
        options = {
            "query": q.contiguous(),
            "kv_cache": (k_pages, v_pages),
            "workspace_buffer": self._workspace,
            "block_tables": metadata.page_table,
            "seq_lens": metadata.seq_lens,
            "bmm1_scale": scale,
            "bmm2_scale": 1.0,
            "window_left": -1 if window is None else window - 1,
            "kv_layout": "NHD",
            "backend": "trtllm-gen",
            "out": out,
        }
        if metadata.max_seqlen_q == 1:
            self._decode(**options, max_seq_len=metadata.max_seqlen_k)
        else:
            self._prefill(
                **options,
                max_q_len=metadata.max_seqlen_q,
                max_kv_len=metadata.max_seqlen_k,
                batch_size=len(metadata.seq_lens),
                cum_seq_lens_q=metadata.cu_seqlens_q,
                cum_seq_lens_kv=metadata.cu_seqlens_k,
            )
