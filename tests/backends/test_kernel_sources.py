"""Consistency of Python modules with the CUDA C++ and C sources that they load by name; needs neither a GPU nor a compiler."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import minisgl_backends
from minisgl_backends.cuda import decode, gated_gemm, int4_gemm, small_m_gemm
from minisgl_backends.cuda.gemm_common import LINE_BYTES, THREADS
from minisgl_backends.native import library

ROOT = Path(minisgl_backends.__file__).parent
CUDA, NATIVE = ROOT / "cuda", ROOT / "native"
SOURCES = {
    "decode": decode.Variant(8, 128, 64, rope=True, norm=True).source(),
    "gated_gemm": gated_gemm.source(),
    "int4_gemm": int4_gemm.Variant(64, 1, 1, 1, gated=False, has_bias=True).source(),
    "small_m_gemm": small_m_gemm.Variant(64, 64, 1, 1, 1, gated=False, has_bias=True).source(),
}
"""Complete source of one variant, by module."""


def kernels_defined(source: str) -> set[str]:
    bounds = r"\w+(?:\([^)]*\))?"  # registers or threads per thread block, or a macro of them
    return set(re.findall(rf'extern "C" __global__ void\s+(?:{bounds}\s+)?(\w+)\(', source))


def strings_passed(module: Path, function: str) -> set[str]:
    """Return the string literals in all calls of `function` in a module."""
    calls = [node for node in ast.walk(ast.parse(module.read_text())) if isinstance(node, ast.Call)]
    own = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == function]
    return {
        arg.value for call in own for arg in call.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)
    }


def constant(source: str, name: str) -> int:
    [value] = re.findall(rf"(?:#define |\b){name}(?: = | )(\d+)\b", source)
    return int(value)


@pytest.mark.parametrize("module", SOURCES)
def test_kernels_that_a_module_loads_are_defined(module: str) -> None:
    names = [strings_passed(CUDA / f"{module}.py", function) for function in ("Kernel", "load_kernel")]
    assert set().union(*names) == kernels_defined(SOURCES[module]) != set()


def test_every_cuda_source_belongs_to_a_module() -> None:
    programs = [strings_passed(path, "program") for path in CUDA.glob("*.py")]
    assert sorted(name for names in programs for name in names) == sorted(path.name for path in CUDA.glob("*.cu"))


@pytest.mark.parametrize("module", SOURCES)
def test_sources_are_complete(module: str) -> None:
    """All includes are expanded, and all macros of the `#if`-free sources are defined."""
    source = SOURCES[module]
    assert "#include" not in source
    code = re.sub(r'//[^\n]*|"(?:[^"\\\n]|\\.)*"', "", source)
    defined = set(re.findall(r"#define (\w+)", code)) | set(re.findall(r"\b([A-Z][A-Z_0-9]*) = ", code))
    defined |= set(re.findall(r"template <int (\w+)>", code))
    used = set(re.findall(r"(?<!asm )\b([A-Z][A-Z_0-9]{2,})\b", code))
    assert used - defined == set()


def test_constants_agree_with_the_sources() -> None:
    assert constant(SOURCES["decode"], "START_WORDS") == decode._START_WORDS
    assert constant(SOURCES["decode"], "KEYS") == decode._KEYS
    assert constant(SOURCES["decode"], "CONSUMERS") + 32 == decode._THREADS
    for module in ("gated_gemm", "int4_gemm", "small_m_gemm"):
        assert constant(SOURCES[module], "LINE_BYTES") == LINE_BYTES
        assert constant(SOURCES[module], "CONSUMERS") + 32 == THREADS
    assert constant(SOURCES["gated_gemm"], "ROWS") == gated_gemm._ROWS
    assert constant(SOURCES["gated_gemm"], "OUTPUTS") == gated_gemm._OUTPUTS


@pytest.mark.parametrize("name", library._ARGUMENTS)
def test_native_functions_have_the_declared_arguments(name: str) -> None:
    texts = [(NATIVE / file).read_text() for file in library._SOURCES]
    [arguments] = [found for text in texts for found in re.findall(rf"^void {name}\(([^)]*)\)", text, re.MULTILINE)]
    kinds = ["p" if "*" in each else "f" if each.split()[0] == "float" else "i" for each in arguments.split(",")]
    assert "".join(kinds) == library._ARGUMENTS[name]


def test_every_native_source_is_compiled() -> None:
    assert sorted(library._SOURCES) == sorted(path.name for path in NATIVE.glob("*.[ch]"))
