"""Limit on the time to build and trace a transformers model, whose config may have any number of layers or iterations."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.overrides import TorchFunctionMode

from minisgl_core.errors import ModelFormatError

_MAX_OPERATIONS = 2**18
"""Maximum number of torch functions, which take up to half a minute. Models call about a hundred per layer."""


class OperationLimit(TorchFunctionMode):
    """Context manager that limits the number of torch functions which are called in it."""

    def __init__(self) -> None:
        """Start to count."""
        super().__init__()
        self._num_operations = 0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call a torch function.

        Raises:
            ModelFormatError: there were too many.
        """
        self._num_operations += 1
        if self._num_operations > _MAX_OPERATIONS:
            raise ModelFormatError(
                f"it takes over {_MAX_OPERATIONS} operations; check the numbers of layers and iterations in the config"
            )
        return func(*args, **(kwargs or {}))
