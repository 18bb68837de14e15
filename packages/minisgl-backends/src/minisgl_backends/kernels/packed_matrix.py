"""Packed matrices that `minisgl_backends.kernels.packed_gemm` multiplies by: integer codes in tiles, and their scales.

Shape legend: N outputs, K inputs, T tiles of 64 outputs, C chunks of ``parts * sub`` inputs.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

TILE = 64
"""Outputs whose codes are stored together."""
SUPERBLOCK = 256
"""Inputs per element of `PackedMatrix.superblocks`."""


@dataclass(frozen=True, slots=True)
class Packing:
    """Format of codes and scales, which the kernels are compiled for.

    The `low` lowest bits of the codes are in one plane, the `high` others in a second one. An int16 element of a plane packs
    ``16 / low`` or ``16 / high`` codes, from the lowest bits up. Their inputs are `sub` apart: k, k + sub, k + 2 * sub, and so
    on. With low=4, high=1 and sub=16, an element of the first plane has codes 0, 16, 32 and 48, and one of the second plane the
    fifth bits of codes 0, 16, ..., 240. So a chunk of 256 inputs has 4 * 16 elements of the first plane and 16 of the second.

    Part p of a chunk is its inputs ``p * sub`` to ``(p + 1) * sub - 1``, whose codes the kernels dequantize together. They are
    code p of each element of the plane with the fewest bits per code.

    A weight is ``(code - zero) * scale``, or ``code * scale + offset``. ``int4`` computes it in the model's dtype, the other
    kinds in float32.

    Attributes:
        kind: contents of a word of scales, whose fields are for `block` inputs each:
            ``int4``: a scale and ``-(M + zero)`` in the model's dtype, see `minisgl_backends.kernels.int4_gemm.scale_words`;
            ``scale``: two float16 scales;
            ``pair``: a float16 scale and a float16 offset;
            ``bytes``: four int8, times the superblock's scale;
            ``byte_pairs``: two pairs of uint8, times the superblock's scale and offset;
            ``nibbles``: four bytes, the low 4 bits times the superblock's scale, the high 4 bits times its offset.
        low: bits per code in the first plane.
        high: bits per code in the second plane; 0 without one.
        sub: stride in inputs between consecutive codes of an element.
        block: inputs per scale, a multiple of `sub`; see `is_aligned`.
        zero: zero point of kinds without offsets; ``int4`` has it in its words.
    """

    kind: str
    low: int
    high: int
    sub: int
    block: int
    zero: int = 0

    @property
    def parts(self) -> int:
        """Parts of a chunk, as many as an element has codes in the plane with the fewest bits per code."""
        return 16 // (self.high or self.low)

    @property
    def chunk(self) -> int:
        """Inputs of a chunk, for which each plane has whole elements."""
        return self.parts * self.sub

    @property
    def word(self) -> int:
        """Inputs per word of scales."""
        return self.block * {"int4": 1, "pair": 1, "scale": 2, "byte_pairs": 2}.get(self.kind, 4)

    @property
    def is_aligned(self) -> bool:
        """Return True if a chunk consists of whole words, or a word of whole chunks."""
        return self.chunk % self.word == 0 or self.word % self.chunk == 0

    @property
    def has_superblocks(self) -> bool:
        """Return True if scales are multiplied by their superblock's."""
        return self.kind in ("bytes", "byte_pairs", "nibbles")


@dataclass(slots=True, kw_only=True)
class TiledWeight:
    """Sizes of a weight in tiles. The up rows of a gated MLP begin at a tile of their own.

    Attributes:
        codes: int16 [T, ..., 64, sub].
        num_inputs: K, the inputs that the codes are for.
        num_outputs: N, without the padding of tiles.
        order: input of each of the K columns, int64; None if they are the first K inputs.
        gated: half of the outputs are gate rows, the others up rows.
    """

    codes: torch.Tensor
    num_inputs: int
    num_outputs: int
    order: torch.Tensor | None = None
    gated: bool = False

    def rows_of(self, start: int, count: int) -> torch.Tensor:
        """Return the stored rows of some outputs: their indices over all tiles, with padding, int64 [count].

        The range has gate rows or up rows, not both.
        """
        half = self.num_outputs // 2
        if self.gated and start >= half:
            start += len(self.codes) // 2 * TILE - half
        return torch.arange(start, start + count, device=self.codes.device)

    def outputs(self, stored: torch.Tensor) -> torch.Tensor:
        """Return the outputs without the padding of tiles, [..., N], from those of all rows, [..., T * 64]."""
        half = self.num_outputs // 2
        if not self.gated or half % TILE == 0:
            return stored[..., : self.num_outputs]
        return torch.cat([each[..., :half] for each in stored.chunk(2, -1)], -1)


@dataclass(slots=True, kw_only=True)
class PackedMatrix(TiledWeight):
    """A weight as the kernels read it; all padding is 0.

    Attributes:
        codes: first plane, int16 [T, C * parts * low / 16, 64, sub].
        high: second plane, int16 [T, C, 64, sub], or None.
        words: fields of scales, int32 [C * chunk / word, T * 64].
        superblocks: scale and offset of superblocks, float16 pairs in int32 [C * chunk / 256, T * 64], or None.
        packing: format of all of them.
    """

    high: torch.Tensor | None = None
    words: torch.Tensor
    superblocks: torch.Tensor | None = None
    packing: Packing

    @classmethod
    def empty(
        cls, packing: Packing, num_outputs: int, num_inputs: int, device: torch.device, *, gated: bool = False
    ) -> "PackedMatrix":
        """Allocate a matrix of zeros."""
        tiles = -(-num_outputs // (1 + gated) // TILE) * (1 + gated)
        chunks = max(1, -(-num_inputs // packing.chunk))
        inputs, lines = chunks * packing.chunk, tiles * TILE

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            codes=zeros(tiles, inputs * packing.low // 16 // packing.sub, TILE, packing.sub, dtype=torch.int16),
            high=zeros(tiles, chunks, TILE, packing.sub, dtype=torch.int16) if packing.high else None,
            words=zeros(-(-inputs // packing.word), lines),
            superblocks=zeros(-(-inputs // SUPERBLOCK), lines) if packing.has_superblocks else None,
            packing=packing,
            num_inputs=num_inputs,
            num_outputs=num_outputs,
            gated=gated,
        )

    @property
    def chunks(self) -> int:
        """Chunks of inputs."""
        return self.codes.shape[1] * 16 // self.packing.low // self.packing.parts

    def store(
        self, rows: torch.Tensor, codes: torch.Tensor, words: torch.Tensor, superblocks: torch.Tensor | None = None
    ) -> None:
        """Store some rows, whose indices `rows_of` returns.

        Args:
            rows: stored rows, int64 [rows].
            codes: uint8 [rows, K].
            words: int32 [rows, ...].
            superblocks: int32 [rows, K / 256].
        """
        packing, at = self.packing, (rows // TILE, slice(None), rows % TILE)
        self.codes[at] = _plane(codes, 0, packing.low, packing.sub, self.codes.shape[1])
        if self.high is not None:
            self.high[at] = _plane(codes, packing.low, packing.high, packing.sub, self.chunks)
        self.words[: words.shape[1], rows] = words.t()
        if self.superblocks is not None and superblocks is not None:
            self.superblocks[: superblocks.shape[1], rows] = superblocks.t()


def _plane(codes: torch.Tensor, first: int, bits: int, sub: int, length: int) -> torch.Tensor:
    """Return bits `first` and on of codes, uint8 [rows, K], in the elements of a plane: int16 [rows, length, sub]."""
    count = 16 // bits
    padded = F.pad(codes, (0, length * count * sub - codes.shape[1])).view(len(codes), length, count, sub)
    plane = torch.zeros(len(codes), length, sub, dtype=torch.int16, device=codes.device)
    for index in range(count):
        plane |= (padded[:, :, index] >> first & (1 << bits) - 1).to(torch.int16) << bits * index
    return plane
