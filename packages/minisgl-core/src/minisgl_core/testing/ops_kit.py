"""Conformance kit of ops providers: the kernels between attention calls."""

import torch

from minisgl_core.contracts.ops import roles_of
from minisgl_core.testing.ops_checks import TOLERANCES
from minisgl_core.testing.ops_layer_checks import LinearChecks, NormChecks, RotaryChecks, RoutingChecks
from minisgl_core.testing.ops_step_checks import SamplingChecks, StepChecks
from minisgl_core.testing.reasons import reasons_of

__all__ = ["TOLERANCES", "OpsTests"]


class OpsTests(LinearChecks, NormChecks, RotaryChecks, SamplingChecks, StepChecks, RoutingChecks):
    """Tests of an ops provider. Subclass this and set `provider`. Results are compared with float64.

    The tests of roles that the provider does not subclass are skipped.

    Attributes:
        dtypes: dtypes of the model.
        fp8_dtypes: dtypes of models with FP8 GEMMs; empty if the provider has none.
        shapes: (output features, input features) of weights. FP8 GEMMs use those with output features divisible by
            32 and input features divisible by 16.
        num_rows: numbers of tokens of a GEMM.
        sizes: sizes of the last dimension of norms and activations.
        tolerances: largest relative error (root mean square) of a result, by dtype.
    """

    def test_has_a_role(self) -> None:
        """The provider has at least one role, since it would never be called without."""
        assert roles_of(self.provider), "the provider subclasses no role of minisgl_core.contracts.ops"

    def test_unsupported_returns_reasons(self) -> None:
        for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
            for device in ("cpu", "cuda"):
                reasons_of(self.provider, torch.device(device), dtype)
