"""Tensors of a transformers model: allocation, initial values of its buffers, and names in checkpoints."""

import re
from collections.abc import Iterable, Iterator, Mapping, Set
from typing import Any

import torch
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter, WeightRenaming

from minisgl_core.contracts.layer import Targets
from minisgl_core.contracts.weights import WeightTarget
from minisgl_core.errors import ModelFormatError
from minisgl_models.transformers_backend.expert_shards import ParameterShard


def fill_buffers(model: Any, device: torch.device) -> None:
    """Allocate the buffers of a model on the meta device, and compute those that checkpoints lack, such as RoPE's frequencies.

    transformers computes them as `from_pretrained` does, by ``initialize_weights``, which leaves parameters alone.

    Raises:
        ModelFormatError: transformers does not compute one of them.
    """
    for parameter in model.parameters():
        parameter._is_hf_initialized = True
    for module in model.modules():
        module._is_hf_initialized = False
        for name, buffer in module._buffers.items():
            if buffer is not None:
                unset = float("nan") if buffer.is_floating_point() else 0
                module._buffers[name] = torch.full_like(buffer, unset, device=device)
    model.initialize_weights()
    stored = stored_tensors(model)
    for name, buffer in model.named_buffers():
        if name not in stored and buffer.isnan().any():
            raise ModelFormatError(f"transformers does not compute the values of {name}")


def allocate_parameters(model: nn.Module, device: torch.device) -> None:
    """Allocate the parameters of a model on the meta device, uninitialized. Tied ones stay tied."""
    allocated: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if parameter not in allocated:
                    allocated[parameter] = nn.Parameter(torch.empty_like(parameter, device=device), requires_grad=False)
                module._parameters[name] = allocated[parameter]


def stored_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters, and the buffers that checkpoints have; tied ones once, under the name that checkpoints have."""
    sources: Mapping[str, str] = getattr(model, "all_tied_weights_keys", {})
    return {sources.get(name, name): tensor for name, tensor in model.state_dict(keep_vars=True).items()}


class CheckpointNames:
    """Names of a model's tensors in its checkpoints, by the rules of `from_pretrained`.

    Checkpoints of a backbone alone leave its prefix out, older ones have older names, and experts are stored one by one.
    """

    def __init__(self, model: Any, prefix: str) -> None:
        """Take the rules of a whole model, and the name of its backbone."""
        self._prefix = f"{prefix}."
        # Older releases of transformers stored the buffer masked_bias for GPT-2 and others.
        ignored = (*(model._keys_to_ignore_on_load_unexpected or ()), r"\.masked_bias$")
        self._ignored = [re.compile(each) for each in ignored]
        rules = get_model_conversion_mapping(model)
        self._renamings = [each for each in rules if isinstance(each, WeightRenaming)]
        self._merges = [each for each in rules if isinstance(each, WeightConverter) and _is_merge(each)]
        self._known: Set[str] = frozenset()

    def targets(self, name: str, tensor: torch.Tensor, shard: ParameterShard | None) -> Targets:
        """Yield the checkpoint's tensors for a parameter or buffer: itself, or the matrices of each expert, [E, out, in].

        Args:
            name: name in the model.
            tensor: this rank's values.
            shard: shard of `tensor`; None if it is whole.
        """
        for merge in self._merges:
            target = merge.target_patterns[0]
            if name.endswith(target):
                num_sources = len(merge.source_patterns)
                part_shard = shard and shard.of_matrix(num_sources, name)
                for expert, matrices in enumerate(tensor):
                    for pattern, part in zip(merge.source_patterns, matrices.chunk(num_sources), strict=True):
                        stored = name.removesuffix(target) + pattern.replace("*", str(expert))
                        yield from ((stored, each) for each in _targets(part, part_shard))
                return
        yield from ((name, each) for each in _targets(tensor, shard))

    def set_known(self, names: Iterable[str]) -> None:
        """Take the names of all tensors that the model loads."""
        self._known = frozenset(names)

    def translate(self, stored: str) -> str | None:
        """Return the model's name; None for a tensor that transformers ignores. An unknown name is returned as it is."""
        renamed = stored
        for rule in self._renamings:
            renamed = rule.rename_source_key(renamed)[0]
        for each in (stored, renamed):
            for name in (each, f"{self._prefix}{each}", each.removeprefix(self._prefix)):
                if name in self._known:
                    return name
        return None if any(each.search(stored) for each in self._ignored) else stored


def _targets(tensor: torch.Tensor, shard: ParameterShard | None) -> Iterator[WeightTarget]:
    return shard.targets(tensor) if shard else iter([WeightTarget(tensor, shape=tuple(tensor.shape))])


def _is_merge(rule: WeightConverter) -> bool:
    """Return True if a rule stacks the matrices of all experts, possibly after concatenating several by rows (gate and up)."""
    kinds = [(type(each), getattr(each, "dim", None)) for each in rule.operations]
    return (
        kinds in ([(MergeModulelist, 0)], [(MergeModulelist, 0), (Concatenate, 1)])
        and len(rule.target_patterns) == 1
        and all(re.fullmatch(r"[\w.]*\*[\w.]*", each) for each in rule.source_patterns)
    )
