"""Contract of the sampling role: from logits to tokens. See the package for the shape legend."""

from dataclasses import dataclass

import torch

from minisgl_core.contracts.communicator import Communicator
from minisgl_core.contracts.ops.provider import OpsProvider
from minisgl_core.utils.deterministic_cumsum import deterministic_cumsum


@dataclass(frozen=True, slots=True)
class VocabShard:
    """This rank's part of the vocabulary.

    Rank r has C columns, for the tokens ``[r * C, (r + 1) * C)``. Columns past the vocabulary are padding.

    Attributes:
        communicator: tensor-parallel group.
        vocab_size: V.
    """

    communicator: Communicator
    vocab_size: int

    def gather(self, logits: torch.Tensor) -> torch.Tensor:
        """Return all ranks' logits, [N, V], from this rank's, [N, C]. Every rank calls it."""
        return self.communicator.all_gather(logits, dim=-1)[:, : self.vocab_size]


class SamplingOps(OpsProvider):
    """Greedy and random sampling, and the masks of constrained decoding."""

    def argmax(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the token with the largest logit of each request, the first if several are equal; [N, V] to int64 [N]."""
        return logits.argmax(-1)

    def sample(self, logits: torch.Tensor, temperature: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
        """Sample a token per request: invert the cumulative distribution, in vocabulary order, at a uniform number.

        CUDA graphs capture it with decode steps; see `Model.forward`.

        Args:
            logits: [N, V], any float dtype; a token with -inf is never sampled.
            temperature: float32 [N], 0 or at least 1e-5. At 0, the result is that of `argmax`.
            uniform: in [0, 1), float32 [N].

        Returns:
            int64 [N].
        """
        scaled = logits.float() / torch.where(temperature > 0, temperature, 1.0)[:, None]
        probs = torch.softmax(scaled, dim=-1)
        cumulative = deterministic_cumsum(probs)
        total = cumulative[:, -1:]
        # Rounding must not lift the target to the total, which no token would exceed.
        target = torch.minimum(uniform[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
        sampled = ((cumulative > target) & (probs > 0)).to(torch.uint8).argmax(-1)
        return torch.where(temperature > 0, sampled, logits.argmax(-1))

    def sample_shard(
        self, logits: torch.Tensor, temperature: torch.Tensor, uniform: torch.Tensor, shard: VocabShard
    ) -> torch.Tensor:
        """Apply `sample` to logits that are sharded over the ranks. Every rank calls it and gets the same tokens, int64 [N].

        Args:
            logits: logits of this rank's shard, [N, C].
            temperature: see `sample`.
            uniform: see `sample`.
            shard: this rank's part of the vocabulary; see `VocabShard`.
        """
        return self.sample(shard.gather(logits), temperature, uniform)

    def mask_logits(self, logits: torch.Tensor, index: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        """Set the logits of the tokens that a bit mask does not allow to -inf. May overwrite `logits`.

        Args:
            logits: [N, V], any float dtype.
            index: indices in [0, N) of the G requests that have a mask, each at most once, int64 [G].
            words: bit ``t % 32`` of word ``t // 32`` is set if token t is allowed, int32 [G, ceil(V / 32)].

        Returns:
            Masked logits, [N, V].
        """
        bits = (1 << torch.arange(8, device=words.device)).to(torch.uint8)
        is_banned = (words.view(torch.uint8)[:, :, None] & bits).view(len(index), -1)[:, : logits.shape[1]] == 0
        return logits.index_copy_(0, index, logits[index].masked_fill_(is_banned, -torch.inf))
