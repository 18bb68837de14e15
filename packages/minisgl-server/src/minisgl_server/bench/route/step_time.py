"""Model of the time of one step. Must not import heavy packages."""

from dataclasses import dataclass


@dataclass(frozen=True)
class StepTime:
    """Roofline model of the step time: the longer of weight reads and GEMMs, plus the time of decodes and attention.

    The defaults are for Qwen3-14B in bfloat16 on one H200; docs/scaling.md has their origin, and the flags of ``minisgl bench
    route`` their meaning. `speed` is a factor on the speed of the replica.
    """

    weights_ms: float = 7.3
    token_us: float = 48.0
    request_us: float = 4.0
    kv_token_ns: float = 40.1
    pair_ns: float = 2.7
    speed: float = 1.0

    def seconds(self, num_decodes: int, num_kv: float, num_new: int = 0, num_pairs: float = 0.0) -> float:
        """Return the time of a step: of decodes that read `num_kv` tokens of context, and of `num_new` prompt tokens.

        `num_pairs` counts the pairs of such a token and a token of its context.
        """
        gemms = max(self.weights_ms * 1e-3, (num_decodes + num_new) * self.token_us * 1e-6)
        decodes = num_decodes * self.request_us * 1e-6 + num_kv * self.kv_token_ns * 1e-9
        return (gemms + decodes + num_pairs * self.pair_ns * 1e-9) / self.speed
