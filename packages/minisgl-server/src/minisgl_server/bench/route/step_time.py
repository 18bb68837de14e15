"""Model of the time of one step. Must not import heavy packages."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Roofline model of the step time: the longer of weight reads and GEMMs, plus the time of decodes and attention.

    The defaults are for Qwen3-14B in bfloat16 on one H200; docs/scaling.md has their origin.

    Attributes:
        weights_ms: time to read the weights, which is the minimum of a step.
        token_us: GEMM time per token.
        request_us: time per decoding request besides its GEMMs and its KV.
        kv_token_ns: time to read the KV of one token of context, per decoding request.
        pair_ns: prefill attention per pair of a new token and a token of its context.
        speed: factor on the speed of the replica.
    """

    weights_ms: float = 7.3
    token_us: float = 48.0
    request_us: float = 4.0
    kv_token_ns: float = 40.1
    pair_ns: float = 2.7
    speed: float = 1.0

    def seconds(self, num_decodes: int, num_kv: float, num_new: int = 0, num_pairs: float = 0.0) -> float:
        """Return the time of a step.

        Args:
            num_decodes: decoding requests.
            num_kv: tokens of context of all of these.
            num_new: prompt tokens that are computed.
            num_pairs: pairs of such a token and a token of its context.
        """
        gemms = max(self.weights_ms * 1e-3, (num_decodes + num_new) * self.token_us * 1e-6)
        decodes = num_decodes * self.request_us * 1e-6 + num_kv * self.kv_token_ns * 1e-9
        return (gemms + decodes + num_pairs * self.pair_ns * 1e-9) / self.speed
