"""Kernels launched with PDL wait before they access memory of earlier kernels. Compiles for a GPU, but needs none."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")

COMPILE = """
import json
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from minisgl_backends.kernels.activation import _activation_and_mul
from minisgl_backends.kernels.norm import _add_rms_norm, _rms_norm
from minisgl_backends.kernels.one_shot_all_reduce import _all_reduce, _all_reduce_add_norm
from minisgl_backends.kernels.rotary import _qk_norm_rope

found = {}

def compiled(label, kernel, kinds, constants, pdl=True, **options):
    constants = constants | {"PDL": pdl}
    kinds = {"eps": "fp32"} | kinds | dict.fromkeys(constants, "constexpr")
    signature = {name: kinds.get(name, "i32") for name in kernel.arg_names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(signature.values()) if kind[0] in "*i"}
    source = ASTSource(kernel, signature, constexprs=constants, attrs=aligned)
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4} | options).asm["ptx"]
    found[label] = {"ptx": ptx, "params": [name for name, kind in signature.items() if kind != "constexpr"]}

rows = dict.fromkeys(("x", "out", "weight", "residual", "gate_up"), "*bf16")
compiled("rms_norm", _rms_norm, rows, {"N": 1000, "BLOCK": 1024, "ROWS": 1})
compiled("without", _rms_norm, rows, {"N": 1000, "BLOCK": 1024, "ROWS": 1}, pdl=False)
compiled("head_norm", _rms_norm, rows, {"N": 128, "BLOCK": 128, "ROWS": 8})
compiled("add_rms_norm", _add_rms_norm, rows, {"N": 4096, "BLOCK": 4096}, num_warps=8)
for activation in ("silu", "gelu_tanh"):
    constants = {"ACTIVATION": activation, "BLOCK": 2048}
    compiled(f"{activation}_and_mul", _activation_and_mul, rows, constants, num_warps=8)

heads = dict.fromkeys(("q", "k", "v", "cos", "sin", "q_weight", "k_weight", "k_pool", "v_pool"), "*bf16")
heads |= dict.fromkeys(("k_scale", "v_scale"), "fp32") | {"slots": "*i64"}
sizes = {"D": 128, "R": 64, "D_BLOCK": 128, "R_BLOCK": 64, "H_BLOCK": 8}
for norm, store in ((True, True), (False, False)):
    compiled(f"rotary_{norm}_{store}", _qk_norm_rope, heads, sizes | {"NORM": norm, "STORE": store})

words = dict.fromkeys(("x", "residual", "weight", "all_state"), "*i32") | {"peers": "*i64"}
sizes = {"SIZE": 4, "ROW": 4096, "DTYPE": triton.language.bfloat16, "BLOCK": 512}
for two_shot in (False, True):
    compiled(f"all_reduce_{two_shot}", _all_reduce, words, sizes | {"TWO_SHOT": two_shot})
    constants = sizes | {"WIDTH": 1024, "TWO_SHOT": two_shot}
    compiled(f"all_reduce_add_norm_{two_shot}", _all_reduce_add_norm, words, constants, num_warps=8)

print(json.dumps(found))
"""

READ_AHEAD = {
    "rms_norm": {"weight"},
    "head_norm": {"weight"},
    "add_rms_norm": {"weight"},
    "silu_and_mul": set(),
    "gelu_tanh_and_mul": set(),
    "rotary_True_True": set(),
    "rotary_False_False": set(),
    "all_reduce_False": set(),
    "all_reduce_True": set(),
    "all_reduce_add_norm_False": set(),
    "all_reduce_add_norm_True": set(),
}
"""Parameters whose memory each kernel reads before it waits."""
WAIT, TRIGGER = "griddepcontrol.wait;", "griddepcontrol.launch_dependents;"


@pytest.fixture(scope="module")
def kernels() -> dict[str, Any]:
    """Compile in another process, since Triton compiles nothing where it interprets kernels."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", COMPILE], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def read_before_wait(ptx: str, params: list[str]) -> set[str]:
    """Return the parameters whose memory is read before the wait. Fail if a write or an exit can come before it.

    Execution starts at the first line. No branch before the wait jumps past it, so the order of the text is that of
    execution.
    """
    body = ptx[ptx.index("{", ptx.index(".entry")) :]
    assert body.count(WAIT) == body.count(TRIGGER) == 1, "a program waits once and lets the next start once"
    ahead = body[: body.index(WAIT)]
    assert TRIGGER in ahead
    labels = set(re.findall(r"^(\$\w+):", ahead, re.MULTILINE))
    origins: dict[str, set[str]] = {}  # parameters that each register was computed from

    def of_registers(text: str) -> set[str]:
        return set().union(*(origins.get(register, set()) for register in re.findall(r"%\w+", text)))

    read: set[str] = set()
    for instruction in re.split(r"[;\n]", ahead):
        match = re.match(r"\s*(?:@!?%\w+\s+)?([a-z][\w.:]*)(.*)", instruction)
        if not match:
            continue
        op, operands = match[1], match[2].strip()
        assert not re.match(r"(ret|exit|trap|call|brx)\b", op), f"leaves before the wait: {instruction}"
        if op.startswith("bra"):
            assert operands in labels, f"jumps past the wait: {instruction}"
            continue
        target, _, rest = operands.partition("}" if operands.startswith("{") else ",")
        sources = of_registers(rest)
        if op.startswith("ld.param"):
            sources = {params[int(number)] for number in re.findall(r"_param_(\d+)", rest) if int(number) < len(params)}
        elif op.startswith("ld") and ".shared" not in op:
            address = of_registers(rest[rest.index("[") :])
            assert address, f"reads from an unknown place: {instruction}"
            read |= address
        elif ".shared" not in op or op.startswith("cp"):
            writes = op.startswith(("st", "atom", "red.", "cp.", "multimem"))
            assert not writes, f"writes before the wait: {instruction}"
        for register in re.findall(r"%\w+", target):
            origins[register] = origins.get(register, set()) | sources
    return read


@pytest.mark.parametrize("label", READ_AHEAD)
def test_kernels_wait_before_they_access_earlier_outputs(kernels: dict[str, Any], label: str) -> None:
    assert read_before_wait(**kernels[label]) == READ_AHEAD[label]


def test_without_overlap_nothing_waits(kernels: dict[str, Any]) -> None:
    assert "griddepcontrol" not in kernels["without"]["ptx"]


def test_every_compiled_kernel_has_an_expectation(kernels: dict[str, Any]) -> None:
    assert kernels.keys() == READ_AHEAD.keys() | {"without"}


@pytest.mark.parametrize("label", READ_AHEAD)
def test_the_check_finds_a_missing_or_late_wait(kernels: dict[str, Any], label: str) -> None:
    ptx, params = kernels[label].values()
    dropped = ptx.replace(WAIT, "")
    with pytest.raises(AssertionError, match="waits once"):
        read_before_wait(dropped, params)
    end = dropped.rindex("ret;")
    with pytest.raises(AssertionError, match=r"before the wait|past the wait"):
        read_before_wait(f"{dropped[:end]}{WAIT}\n{dropped[end:]}", params)


@pytest.mark.parametrize("pdl", [False, True])
def test_the_launch_attribute_matches_the_kernels_wait(monkeypatch: pytest.MonkeyPatch, pdl: bool) -> None:
    """The attribute without the wait would be a race; the wait without the attribute gains nothing."""
    from minisgl_backends.kernels import activation, norm, one_shot_all_reduce, rotary
    from minisgl_core.contracts.ops import Rope

    launched = {}
    for module, names in {
        norm: ("_rms_norm", "_add_rms_norm"),
        activation: ("_activation_and_mul",),
        rotary: ("_qk_norm_rope",),
        one_shot_all_reduce: ("_all_reduce", "_all_reduce_add_norm"),
    }.items():
        for name in names:
            launched[name] = MagicMock()
            monkeypatch.setattr(module, name, launched[name])

    x, weight = torch.zeros(4, 64), torch.zeros(64)
    norm.rms_norm(x, weight, 1e-6, pdl=pdl)
    norm.add_rms_norm(x, x, weight, 1e-6, pdl=pdl)
    activation.silu_and_mul(x, pdl=pdl)
    heads = x.view(4, 2, 32)
    rotary.qk_norm_rope(heads, heads, Rope(x[:, :16], x[:, :16]), pdl=pdl)
    group = torch.zeros(3, dtype=torch.int64), torch.zeros(1, 4, dtype=torch.int32), 0, 4096
    one_shot_all_reduce.all_reduce(x, *group, two_shot=True, pdl=pdl)
    x = x.bfloat16()
    one_shot_all_reduce.all_reduce_add_norm(x, x, x[0], 1e-6, *group, two_shot=False, pdl=pdl)

    for name, kernel in launched.items():
        launch = kernel.__getitem__.return_value
        launch.assert_called_once()
        options = launch.call_args.kwargs
        assert (options["PDL"], options.get("launch_pdl", False)) == (pdl, pdl), name
