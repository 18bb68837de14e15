"""Reasons for which the GPU backends refuse a spec, tested on any machine."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from minisgl_backends.attention import hopper_backend
from minisgl_backends.attention.flash_backend import FlashAttention
from minisgl_backends.attention.flash_versions import VERSIONS
from minisgl_backends.attention.flashinfer_backend import FlashInferAttention
from minisgl_backends.attention.hopper_backend import HopperAttention
from minisgl_backends.attention.triton_backend import TritonAttention
from minisgl_backends.attention.trtllm_backend import TrtllmAttention
from minisgl_backends.requirements import package_missing
from minisgl_core.config.provider_picker import ProviderPicker
from minisgl_core.contracts.attention import AttentionBackend, AttentionSpec
from minisgl_core.plugins.registry import Registry

SPEC = AttentionSpec(8, 2, 64, 16, torch.bfloat16, torch.bfloat16, torch.device("cuda"), 4096, 64)
BACKENDS: list[type[AttentionBackend]] = [FlashAttention, FlashInferAttention, TritonAttention, TrtllmAttention]
FAKED = ("flashinfer", "flash_attn", "flash_attn_interface", "vllm")
SOURCES = ("csrc", "include")
"""Folders of the files that FlashInfer compiles."""
FP8_POOLS: list[type[AttentionBackend]] = [FlashInferAttention, TritonAttention]


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that the machine has a Hopper GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))


@pytest.fixture(autouse=True)
def forget_imports(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Import fake modules anew in each test, and restore real ones after it."""

    def imported() -> list[str]:
        return [name for name in sys.modules if name.partition(".")[0] in FAKED]

    for name in imported():
        monkeypatch.delitem(sys.modules, name)
    yield
    for name in imported():
        del sys.modules[name]


def install(
    monkeypatch: pytest.MonkeyPatch, folder: Path, *files: str, text: str = "raise RuntimeError('broken')"
) -> None:
    """Add modules to the path, which by default fail when they are imported."""
    for file in files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(text)
    monkeypatch.syspath_prepend(folder)
    importlib.invalidate_caches()


def install_flashinfer(monkeypatch: pytest.MonkeyPatch, folder: Path, *, has_sources: bool = True) -> None:
    """Add a FlashInfer that can be imported to the path."""
    install(monkeypatch, folder, "flashinfer/__init__.py", "flashinfer/jit/__init__.py", text="")
    env = "from pathlib import Path\n" + "".join(
        f"FLASHINFER_{name.upper()}_DIR = Path(__file__).parents[1] / 'data' / '{name}'\n" for name in SOURCES
    )
    install(monkeypatch, folder, "flashinfer/jit/env.py", text=env)
    if has_sources:
        install(monkeypatch, folder, *(f"flashinfer/data/{name}/a.cu" for name in SOURCES), text="")


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_cpu_is_refused(backend: type[AttentionBackend], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    reasons = backend.unsupported(replace(SPEC, device=torch.device("cpu")))
    assert any("needs an NVIDIA GPU, not cpu" in reason for reason in reasons)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.usefixtures("hopper")
def test_unsupported_dtypes_and_head_dims_are_named(backend: type[AttentionBackend]) -> None:
    base = set(backend.unsupported(SPEC))
    no_fp8 = [] if backend in FP8_POOLS else ["KV pool must hold bfloat16, not float8_e4m3fn"]
    for change, said in (
        ({"kv_dtype": torch.float8_e4m3fn}, no_fp8),
        ({"dtype": torch.float64, "kv_dtype": torch.float64}, ["float64"]),
        ({"kv_dtype": torch.float16}, ["KV pool must hold bfloat16"]),
        ({"head_dim": 84}, ["84"]),
        ({"dtype": torch.float64, "head_dim": 84}, ["KV pool must hold", "float64", "84"]),
    ):
        new = [reason for reason in backend.unsupported(replace(SPEC, **change)) if reason not in base]
        assert len(new) == len(said), new
        assert all(word in reason for word, reason in zip(said, new, strict=True)), new


FIELDS: dict[str, tuple[dict[str, Any], str, list[type[AttentionBackend]]]] = {
    "window": ({"sliding_windows": (8,)}, "sliding windows", [*BACKENDS, HopperAttention]),
    "soft cap": ({"soft_caps": (30.0,)}, "soft caps", [FlashInferAttention, TritonAttention, HopperAttention]),
    "sinks": ({"has_sinks": True}, "attention sinks", [TritonAttention, HopperAttention]),
    "value head": ({"value_head_dim": 32}, "values of head dimension 32", []),
}
"""Change of a spec, the reason against it, and the backends that support it."""


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("backend", [*BACKENDS, HopperAttention])
@pytest.mark.usefixtures("hopper")
def test_fields_of_layers_are_supported_or_refused(backend: type[AttentionBackend], field: str) -> None:
    change, said, supporting = FIELDS[field]
    reasons = backend.capabilities.missing(replace(SPEC, **change))
    assert [said in reason for reason in reasons] == ([] if backend in supporting else [True])


@pytest.mark.parametrize("backend", BACKENDS)
def test_gpus_below_the_needed_capability_are_named(
    backend: type[AttentionBackend], monkeypatch: pytest.MonkeyPatch, hopper: None
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    oldest = "10.0" if backend is TrtllmAttention else "8.0"
    assert any(f"{oldest} or later" in reason and "7.5" in reason for reason in backend.unsupported(SPEC))


@pytest.mark.parametrize("backend", FP8_POOLS)
def test_fp8_pools_need_compute_capability_8_9(
    backend: type[AttentionBackend], monkeypatch: pytest.MonkeyPatch, hopper: None
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 6))
    reasons = backend.unsupported(replace(SPEC, kv_dtype=torch.float8_e4m3fn))
    assert any("an fp8 KV pool" in reason and "8.9 or later" in reason and "8.6" in reason for reason in reasons)
    assert not any("fp8" in reason for reason in backend.unsupported(SPEC))


@pytest.mark.parametrize(
    ("backend", "command"),
    [
        (FlashAttention, "'minisgl-backends[fa4]'"),
        (FlashInferAttention, "'minisgl-backends[fi]'"),
        (TrtllmAttention, "'minisgl-backends[fi]'"),
        (TritonAttention, "'minisgl-backends[triton]'"),
    ],
)
@pytest.mark.usefixtures("hopper")
def test_a_missing_package_is_named_with_its_remedy(
    backend: type[AttentionBackend], command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert any("pip install" in reason and command in reason for reason in backend.unsupported(SPEC))


@pytest.mark.parametrize(("major", "extra"), [(8, "fa"), (9, "fa4"), (10, "fa4"), (12, "fa")])
def test_the_remedy_names_a_flash_attention_for_the_gpu(
    major: int, extra: str, monkeypatch: pytest.MonkeyPatch, hopper: None
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (major, 0))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    [reason] = FlashAttention.unsupported(SPEC)
    assert f"(pip install 'minisgl-backends[{extra}]'" in reason


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
@pytest.mark.parametrize("head_dim", [80, 96, 112, 120, 160, 192])
@pytest.mark.usefixtures("hopper")
def test_auto_selects_triton_with_cuda_graphs_for_other_head_dims(head_dim: int) -> None:
    registry = Registry.from_environment({})
    picker = ProviderPicker("cuda", registry.names, registry.unsupported, lambda kind: None, lambda *_: "")
    name, _ = picker.pick("attention", "auto", replace(SPEC, head_dim=head_dim))
    assert name == "triton"
    assert registry.load("attention", name).capabilities.cuda_graphs


@pytest.mark.usefixtures("hopper")
def test_hopper_names_a_head_dim_only_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper_backend, "hopper_missing", lambda device, dtype: [])
    base = HopperAttention.unsupported(SPEC)
    for head_dim in (32, 96):
        [reason] = [each for each in HopperAttention.unsupported(replace(SPEC, head_dim=head_dim)) if each not in base]
        assert reason == f"it has kernels for head dimensions 64, 128, not {head_dim}"


def test_refused_backends_import_no_package() -> None:
    """None has kernels for heads of 84. Other specs are refused if an installed package cannot be imported."""
    code = """
import sys, torch
from minisgl_backends.attention import flash_backend, flashinfer_backend, triton_backend, trtllm_backend
from minisgl_core.contracts.attention import AttentionSpec
spec = AttentionSpec(8, 2, 84, 16, torch.bfloat16, torch.bfloat16, torch.device("cuda"), 4096, 64)
for backend in (flash_backend.FlashAttention, flashinfer_backend.FlashInferAttention, triton_backend.TritonAttention,
                trtllm_backend.TrtllmAttention):
    assert backend.unsupported(spec)
assert not {"triton", "flashinfer", "flash_attn", "vllm"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (["flash_attn/__init__.py", "flash_attn/flash_attn_interface.py"], {2}),
        (["flash_attn/cute/interface.py", "flash_attn/cute/paged_kv.py"], {4}),
        (["flash_attn/__init__.py", "flash_attn/flash_attn_interface.py", "flash_attn/cute/paged_kv.py"], {2, 4}),
        # flash-attn 2.8.3 itself contains a draft of version 4.
        (["flash_attn/__init__.py", "flash_attn/flash_attn_interface.py", "flash_attn/cute/interface.py"], {2}),
        (["flash_attn_interface.py"], {3}),
        (["vllm/__init__.py", "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so"], {3}),
        (["vllm/__init__.py", "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so"], set()),
    ],
)
@pytest.mark.skipif(any(version.is_installed() for version in VERSIONS), reason="FlashAttention is installed")
def test_installed_versions_are_detected_by_their_files(
    files: list[str], expected: set[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install(monkeypatch, tmp_path, *files)
    assert {version.number for version in VERSIONS if version.is_installed()} == expected


@pytest.mark.parametrize(
    ("capability", "page_size", "picked"),
    [((9, 0), 16, 3), ((9, 0), 256, 3), ((10, 0), 16, 4), ((8, 0), 256, 2), ((12, 0), 512, 2)],
)
def test_the_version_is_selected_by_gpu_and_page_size(
    capability: tuple[int, int],
    page_size: int,
    picked: int,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    hopper: None,
) -> None:
    install(monkeypatch, tmp_path, "flash_attn_interface.py", "flash_attn/cute/paged_kv.py", text="")
    install(monkeypatch, tmp_path, "flash_attn/__init__.py", "flash_attn/flash_attn_interface.py", text="")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    selected, reasons = FlashAttention._select(replace(SPEC, page_size=page_size))
    assert reasons == []
    assert selected is not None
    assert selected.number == picked


@pytest.mark.usefixtures("hopper")
def test_an_unsupported_page_size_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))  # version 3 is for 9.0
    install(monkeypatch, tmp_path, "flash_attn/__init__.py", "flash_attn/flash_attn_interface.py", text="")
    [reason] = [each for each in FlashAttention.unsupported(SPEC) if "version 3" not in each]  # which may be here
    assert "version 2 (flash_attn) supports page sizes that are multiples of 256" in reason
    assert FlashAttention.unsupported(replace(SPEC, page_size=512)) == []


@pytest.mark.parametrize(
    ("capability", "page_size", "said"),
    [
        ((10, 0), 16, []),
        ((10, 3), 64, []),
        ((9, 0), 16, ["10.0 or later, and this GPU has 9.0"]),
        ((12, 0), 16, ["10.x only"]),
        ((10, 0), 128, ["pages of 16, 32, 64 tokens, not of 128 (--page-size 64)"]),
        ((9, 0), 1, ["10.0 or later", "not of 1 (--page-size 64)"]),
    ],
)
def test_trtllm_needs_blackwell_and_one_of_its_page_sizes(
    capability: tuple[int, int],
    page_size: int,
    said: list[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    hopper: None,
) -> None:
    install_flashinfer(monkeypatch, tmp_path)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    reasons = TrtllmAttention.unsupported(replace(SPEC, page_size=page_size))
    assert len(reasons) == len(said), reasons
    assert all(word in reason for word, reason in zip(said, reasons, strict=True)), reasons


def pick_attention(spec: AttentionSpec) -> tuple[str, str]:
    """Return what ``auto`` selects, with the reasons, if all kernels are compiled."""
    registry = Registry.from_environment({})
    picker = ProviderPicker("cuda", registry.names, registry.unsupported, lambda kind: None, lambda *_: "")
    return picker.pick("attention", "auto", spec)


def test_the_folder_of_a_removed_package_is_no_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "removed_package" / "data").mkdir(parents=True)
    monkeypatch.syspath_prepend(tmp_path)
    assert package_missing("removed_package", "removed-package") == [
        "removed_package is not installed (pip install removed-package)"
    ]


def no_sources(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    install_flashinfer(monkeypatch, folder, has_sources=False)


def no_jit(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    install(monkeypatch, folder, "flashinfer/__init__.py", text="")


def raises(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    install(monkeypatch, folder, "flashinfer/__init__.py")


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
@pytest.mark.parametrize(
    ("break_it", "said"),
    [
        (raises, "importing flashinfer.jit.env fails (RuntimeError: broken); reinstall the package"),
        (no_jit, "fails (ModuleNotFoundError: No module named 'flashinfer.jit')"),
        (no_sources, "flashinfer/data/csrc is missing or empty; reinstall flashinfer-python"),
    ],
)
@pytest.mark.usefixtures("hopper")
def test_auto_passes_over_a_broken_flashinfer(
    break_it: Callable[[pytest.MonkeyPatch, Path], None], said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(hopper_backend, "hopper_missing", lambda device, dtype: ["no NVRTC"])
    monkeypatch.setattr(FlashAttention, "versions", ())
    break_it(monkeypatch, tmp_path)
    name, why = pick_attention(SPEC)
    assert name == "triton"
    assert said in why


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
@pytest.mark.usefixtures("hopper")
def test_auto_selects_flashinfer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(hopper_backend, "hopper_missing", lambda device, dtype: ["no NVRTC"])
    monkeypatch.setattr(FlashAttention, "versions", ())
    install_flashinfer(monkeypatch, tmp_path)
    assert pick_attention(SPEC)[0] == "fi,triton"


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
@pytest.mark.usefixtures("hopper")
def test_auto_passes_over_a_flash_attention_that_cannot_be_imported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(hopper_backend, "hopper_missing", lambda device, dtype: ["no NVRTC"])
    monkeypatch.setattr(FlashAttention, "versions", tuple(each for each in VERSIONS if "vllm" not in each.module))
    install(monkeypatch, tmp_path, "flash_attn_interface.py")
    name, why = pick_attention(SPEC)
    assert "fa" not in name
    assert "fa,triton: importing flash_attn_interface fails (RuntimeError: broken); reinstall the package" in why
    files = "flash_attn/__init__.py", "flash_attn/cute/__init__.py", "flash_attn/cute/paged_kv.py"
    install(monkeypatch, tmp_path, *files, text="")
    assert pick_attention(SPEC)[0] == "fa,triton", "another version works"
