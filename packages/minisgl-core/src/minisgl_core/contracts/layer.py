"""Base class of layers: named parameters and the checkpoint tensors that fill them."""

from collections.abc import Iterator, Mapping, Sequence

from torch import nn

from minisgl_core.contracts.weights import WeightTarget

FusedProjections = Mapping[str, Sequence[str]]
"""Fused projections and the checkpoint's names for their parts: ``{"gate_up_proj": ("gate_proj", "up_proj")}``.

vLLM calls this mapping ``packed_modules_mapping``. Here, "packed weights" are quantized weights as a checkpoint stores them.
"""

Targets = Iterator[tuple[str, WeightTarget]]
"""Names of checkpoint tensors with their destinations."""


class Layer:
    """Plain object with a `forward` method.

    Its parameters (`torch.nn.Parameter`) and its sub-layers (a `Layer`, a list of them or a dict by index) are attributes,
    named as in the checkpoint. Attributes with a leading underscore are private. It is not a `torch.nn.Module`, whose
    overhead per call and per attribute slows the decode steps of small models on a CPU.
    """

    def sublayers(self) -> "Iterator[tuple[str, Layer]]":
        """Yield each direct sub-layer with its name, such as ``layers.0``."""
        for name, value in vars(self).items():
            if name.startswith("_"):
                continue
            if isinstance(value, Layer):
                yield name, value
            elif isinstance(value, (list, dict)):
                numbered = value.items() if isinstance(value, dict) else enumerate(value)
                yield from ((f"{name}.{i}", each) for i, each in numbered if isinstance(each, Layer))

    def weight_targets(self, name: str, fused_projections: FusedProjections) -> Targets:
        """Yield the name and the destination of each checkpoint tensor, for this rank.

        By default, each parameter is loaded whole, under its attribute's name. Sharded and fused layers override this.

        Args:
            name: name of this layer in the checkpoint, such as ``model.layers.0.mlp``; empty for the model.
            fused_projections: see `Model.fused_projections`.
        """
        dot = "." if name else ""
        for attribute, value in vars(self).items():
            if isinstance(value, nn.Parameter) and not attribute.startswith("_"):
                yield f"{name}{dot}{attribute}", WeightTarget(value)
        for attribute, layer in self.sublayers():
            yield from layer.weight_targets(f"{name}{dot}{attribute}", fused_projections)

    def prepare(self) -> None:
        """Compute values that depend on loaded weights.

        It is called once, before the first `forward`. A layer is prepared before its sub-layers.
        """


def prepare_all(layer: Layer) -> None:
    """Prepare a layer and all its sub-layers."""
    layer.prepare()
    for _, each in layer.sublayers():
        prepare_all(each)
