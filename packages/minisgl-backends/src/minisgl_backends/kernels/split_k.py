"""Memory for split-K GEMMs in Triton."""

import torch


class SplitKWorkspace:
    """Partial sums of split-K GEMMs. All GEMMs of a model share one workspace, since they run one after the other.

    Attributes:
        partials: partial sums, float32.
        arrived: programs that have stored their partial sums, per block of outputs, int32; 0 between launches.
    """

    def __init__(self, device: torch.device) -> None:
        self.partials = torch.empty(0, dtype=torch.float32, device=device)
        self.arrived = torch.zeros(0, dtype=torch.int32, device=device)

    def reserve(self, size: int, num_blocks: int) -> None:
        """Make room for `size` values and `num_blocks` counters. Must be called before any GEMM runs."""
        if len(self.partials) < size:
            self.partials = torch.empty(size, dtype=torch.float32, device=self.partials.device)
        if len(self.arrived) < num_blocks:
            self.arrived = torch.zeros(num_blocks, dtype=torch.int32, device=self.partials.device)
