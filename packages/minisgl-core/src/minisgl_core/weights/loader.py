"""Loading of a checkpoint's weights into a model, one slice at a time."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

import torch

from minisgl_core.contracts.layer import Targets, prepare_all
from minisgl_core.contracts.model import Model
from minisgl_core.contracts.model_config import ModelConfig
from minisgl_core.contracts.weights import LazyTensor, WeightGenerator, WeightSource, WeightTarget
from minisgl_core.errors import ModelFormatError
from minisgl_core.utils.dtypes import dtype_name
from minisgl_core.utils.progress import progress_bar

TargetsByName = Mapping[str, Sequence[WeightTarget]]

_NUM_NAMES_SHOWN = 5
"""Names of tensors that an error lists."""
_COMPARED_ROWS = 8192
"""Rows of an LM head that are read and compared at once."""
_LM_HEAD, _EMBEDDING = "lm_head.weight", "embed_tokens.weight"


class _AllNames:
    """Container of all names, for `stored_tensors` to yield all tensors as the checkpoint stores them."""

    def __contains__(self, name: object) -> bool:
        return True


def has_other_lm_head(source: WeightSource, config: ModelConfig) -> bool:
    """Return True if the checkpoint stores an LM head whose values are not those of its embedding.

    transformers uses such an LM head even if the config ties the embeddings. The two tensors are read until they differ.
    """
    if isinstance(source, WeightGenerator):
        return False
    heads, embeddings = {}, {}
    for name, tensor in source.stored_tensors(config, _AllNames()):
        if f".{name}".endswith(f".{_LM_HEAD}"):
            heads[name] = tensor
        elif name.endswith(_EMBEDDING):
            embeddings[name] = tensor
    if not (heads and embeddings):
        return False
    # Layers for multi-token prediction have a longer name for their embedding.
    lm_head, embedding = heads[min(heads, key=len)], embeddings[min(embeddings, key=len)]
    if len(lm_head.shape) != 2 or tuple(lm_head.shape) != tuple(embedding.shape):
        return True
    num_rows = lm_head.shape[0]
    parts = ((slice(start, start + _COMPARED_ROWS),) for start in range(0, num_rows, _COMPARED_ROWS))
    return not all(torch.equal(lm_head[part], embedding[part]) for part in parts)


def load_weights(model: Model, source: WeightSource, progress: bool = True) -> None:
    """Fill `model` from `source` and prepare its layers.

    Only this rank's slices are read, and only one slice is in memory besides the model. Before that, the layers' methods
    allocate the weights: quantized ones as the checkpoint stores them, others in the model's dtype. With `progress`, a bar is
    shown on stderr if that is a terminal.

    Raises:
        ModelFormatError: tensors are missing or unknown, or their shapes or dtypes do not fit the config.
    """
    targets = targets_by_name(model.weight_targets("", model.fused_projections))
    with torch.no_grad(), progress_bar(progress) as bar:
        task = bar.add_task("Loading weights", total=len(targets))
        if isinstance(source, WeightGenerator):
            for name, destinations in targets.items():
                for target in destinations:
                    if not target.optional:
                        source.generate(name, target)
                bar.advance(task)
        else:
            _copy(model, source, targets, lambda: bar.advance(task))
    del targets  # the last references to matrices that the kernels may repack
    prepare_all(model)


def targets_by_name(targets: Targets) -> TargetsByName:
    """Return the targets of each tensor of the checkpoint, by its name."""
    found = defaultdict[str, list[WeightTarget]](list)
    for name, target in targets:
        found[name].append(target)
    return dict(found)


def _copy(model: Model, source: WeightSource, targets: TargetsByName, advance: Callable[[], None]) -> None:
    missing, unexpected = {name for name in targets if not targets[name][0].optional}, []
    ignored = *model.ignored_weights(), *model.weights_of_other_stages()
    for stored, tensor in source.stored_tensors(model.config, targets):
        name = model.tensor_name(stored)
        if name is None:
            continue
        if name in targets:
            for target in targets[name]:
                fill_target(name, tensor, target)
            missing.discard(name)
            advance()
        elif not any(fnmatchcase(name, pattern) for pattern in ignored):
            unexpected.append(name)
    problems = []
    if missing:
        problems.append(f"{_list_names(missing)} missing")
    if unexpected:
        problems.append(f"{_list_names(unexpected)} in the checkpoint but not in {model.config.architecture}")
    if problems:
        raise ModelFormatError(f"the checkpoint does not fit its config: {'; '.join(problems)}")


def fill_target(name: str, tensor: LazyTensor, target: WeightTarget) -> None:
    """Copy this rank's slice of a checkpoint's tensor to its destination. Raise ModelFormatError if it does not fit."""
    shape = tuple(tensor.shape) or (1,)  # a scalar is equivalent to one element
    destination = target.destination if target.destination.ndim else target.destination.view(1)
    held = tuple(destination.shape)
    if target.broadcast and math.prod(shape) == 1:
        destination.copy_(_checked_dtype(name, tensor[()], destination.dtype).reshape(()).expand(held))
        return
    if target.shape is not None and shape != (target.shape or (1,)):
        raise _shape_error(name, tensor, f"; the model expects {list(target.shape)}")
    if _sliced_shape(shape, target.index) != held:
        taken = f", of which this rank takes {_format_index(target.index)}; the model expects {list(held)} there"
        raise _shape_error(name, tensor, taken)
    if destination.numel() > 0:
        destination.copy_(_checked_dtype(name, tensor[target.index], destination.dtype))


def _checked_dtype(name: str, values: torch.Tensor, wanted: torch.dtype) -> torch.Tensor:
    """Return `values`, after a check that no packed weight is cast: only floats of 16 bits or more may change their dtype."""
    if values.dtype != wanted and (_is_packed(values.dtype) or _is_packed(wanted)):
        raise ModelFormatError(
            f"the checkpoint does not fit its config: {name} is {dtype_name(values.dtype)}, and its layer takes "
            f"{dtype_name(wanted)}; --quantization none loads it in --dtype, if its format can be dequantized"
        )
    return values


def _is_packed(dtype: torch.dtype) -> bool:
    return not dtype.is_floating_point or dtype.itemsize == 1


def _sliced_shape(shape: Sequence[int], index: Sequence[slice]) -> tuple[int, ...]:
    whole = (slice(None),) * (len(shape) - len(index))
    return tuple(len(range(*part.indices(size))) for part, size in zip((*index, *whole), shape, strict=False))


def _shape_error(name: str, tensor: LazyTensor, why: str) -> ModelFormatError:
    return ModelFormatError(f"the checkpoint does not fit its config: {name} has shape {list(tensor.shape)}{why}")


def _format_index(index: tuple[slice, ...]) -> str:
    if all(part == slice(None) for part in index):
        return "all"
    return "[" + ", ".join(":" if part == slice(None) else f"{part.start}:{part.stop}" for part in index) + "]"


def _list_names(names: Iterable[str]) -> str:
    ordered = sorted(names)
    shown = ", ".join(ordered[:_NUM_NAMES_SHOWN])
    more = len(ordered) - _NUM_NAMES_SHOWN
    verb = "is" if len(ordered) == 1 else "are"
    return f"{shown}{f' and {more} more' if more > 0 else ''} {verb}"
