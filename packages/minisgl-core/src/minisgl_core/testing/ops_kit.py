"""The conformance kit of the kernels between attention calls. Letters are those of `minisgl_core.contracts.ops`."""

from __future__ import annotations

import torch

from minisgl_core.contracts.ops import roles_of
from minisgl_core.testing.ops_checks import TOLERANCES
from minisgl_core.testing.ops_layer_checks import LinearChecks, NormChecks, RotaryChecks, RoutingChecks
from minisgl_core.testing.ops_step_checks import SamplingChecks, StepChecks

__all__ = ["TOLERANCES", "OpsTests"]


class OpsTests(LinearChecks, NormChecks, RotaryChecks, SamplingChecks, StepChecks, RoutingChecks):
    """Subclass and set `provider`. Results are compared with float64.

    Only the roles that the provider subclasses are tested; tests of the others are skipped.

    Attributes:
        provider: the class.
        device: where to run.
        dtypes: of the model.
        fp8_dtypes: of models with FP8 GEMMs; empty where the provider is for none.
        shapes: outputs and inputs of weights. FP8 GEMMs use those that are multiples of 32 and 16.
        num_rows: numbers of tokens of a GEMM.
        sizes: of the last dimension of norms and activations.
        tolerances: largest error of a result, as a share of it in root mean squares, by dtype.
    """

    def test_has_a_role(self) -> None:
        """A provider without a role would never be called."""
        assert roles_of(self.provider), "it subclasses no role of minisgl_core.contracts.ops"

    def test_says_why_it_cannot(self) -> None:
        """Asking gives sentences, whatever it is asked for."""
        for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
            for device in ("cpu", "cuda"):
                reasons = self.provider.unsupported(torch.device(device), dtype)
                assert isinstance(reasons, list), f"{reasons!r} is no list"
                assert all(isinstance(reason, str) and reason.strip() for reason in reasons), reasons
