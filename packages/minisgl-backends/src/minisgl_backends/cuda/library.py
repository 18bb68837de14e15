"""Loading of CUDA libraries that torch depends on."""

import ctypes
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def load_library(name: str) -> ctypes.CDLL:
    """Load a library, such as ``libnccl.so.2``, from the system or from NVIDIA's Python packages.

    Raises:
        OSError: it is not installed.
    """
    try:
        return ctypes.CDLL(name)
    except OSError:
        packages = importlib.util.find_spec("nvidia")
        folders = [] if packages is None else packages.submodule_search_locations or []
        paths = [path for folder in folders for path in Path(folder).glob(f"*/lib/{name}")]
        if not paths:
            raise
        for builtins in sorted(paths[0].parent.glob("libnvrtc-builtins.so.*")):
            ctypes.CDLL(str(builtins))  # NVRTC loads it by file name alone
        return ctypes.CDLL(str(paths[0]))


def set_prototypes(library: ctypes.CDLL, prototypes: Mapping[str, tuple[Any, ...]]) -> None:
    """Set the argument types of a library's functions, which return a status as C's ``int``.

    Raises:
        OSError: the library lacks a function.
    """
    for name, arguments in prototypes.items():
        try:
            function = getattr(library, name)
        except AttributeError as error:
            raise OSError(
                f"{library._name} has no function {name}; update the NVIDIA driver, or torch with its CUDA packages"
            ) from error
        function.argtypes, function.restype = arguments, ctypes.c_int
