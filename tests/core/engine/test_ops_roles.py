"""A package that provides one role of ops, in a real engine. Torch or the providers of ``auto`` provide the others."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import tiny
import torch

from minisgl_backends.ops.native import NativeOps
from minisgl_backends.ops.onednn import OneDnnOps
from minisgl_core.config.options import EngineConfig
from minisgl_core.contracts.ops import NormOps, Ops, OpsProvider, TorchOps
from minisgl_core.engine.build import BuiltModelRunner, build_model_runner
from minisgl_core.errors import InvalidValueError, ProviderLoadError, ProviderNotFoundError, ProviderUnsupportedError
from minisgl_core.plugins.hooks import Hooks
from minisgl_core.plugins.kinds import KINDS
from minisgl_core.plugins.registry import Entry, Registry
from minisgl_core.runtime.worker import make_loop
from minisgl_core.sampling_params import SamplingParams
from minisgl_core.testing.ops_kit import OpsTests

PROMPT = (5, 9, 3, 7, 11)
CALLS = Counter[str]()


class NormOnly(NormOps):
    """Counts its calls, to show that the engine makes them."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        CALLS["rms_norm"] += 1
        return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, eps)


class UnsupportedOps(NormOnly):
    @classmethod
    def unsupported(cls, device: torch.device, dtype: torch.dtype) -> list[str]:
        return ["it is for another machine"]


class WithoutRole(OpsProvider):
    pass


class SubclassesOps(Ops):
    """Provider that derives from the composition of roles instead of a role."""


class TestNormOnly(OpsTests):
    provider = NormOnly


def registry() -> Registry:
    shipped = tiny.registry()
    own = [
        Entry("ops", each.__name__, f"{__name__}:{each.__name__}", "own", "1")
        for each in (NormOnly, UnsupportedOps, WithoutRole, SubclassesOps)
    ]
    return Registry([*(entry for kind in KINDS for entry in shipped.entries(kind)), *own])


def build(ops: str, hooks: Hooks | None = None) -> BuiltModelRunner:
    config = EngineConfig.from_flat(
        model=str(tiny.checkpoint()), platform="cpu", dtype="float32", ops=ops, num_pages=50, max_seq_len_override=48
    )
    return build_model_runner(config, registry(), hooks or Hooks(), progress=False)


def ops_of(built: BuiltModelRunner) -> dict[str, type]:
    roles: Any = built.model_runner._ops
    return {name: type(getattr(roles, name)) for name in ("linear", "norm", "rotary", "sampling", "step", "routing")}


def tokens(built: BuiltModelRunner) -> tuple[int, ...]:
    loop = make_loop(built, registry(), Hooks(), [])
    tiny.submit(loop, "r", PROMPT, SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True))
    return tuple(tiny.run(loop)["r"].tokens)


class PrefersNormOnly:
    def preferred_provider(self, kind: str, hardware: Any) -> str | None:
        return "NormOnly" if kind == "ops" else None


@pytest.mark.parametrize("ops", ["NormOnly", "NormOnly,torch"])
def test_a_norm_provider_is_used_and_torch_has_other_roles(ops: str) -> None:
    CALLS.clear()
    built = build(ops)
    assert ops_of(built) == dict.fromkeys(ops_of(built), TorchOps) | {"norm": NormOnly}
    assert tokens(built) == tiny.greedy(PROMPT, 12)
    assert CALLS["rms_norm"] > 0
    choice = next(reason for what, _, reason in built.info.choices if what == "ops")
    assert choice == "NormOnly: norm; torch: linear, rotary, sampling, step, routing"


@pytest.mark.parametrize("by_hook", [False, True])
def test_a_norm_provider_is_used_beside_auto(by_hook: bool) -> None:
    CALLS.clear()
    hooks = Hooks()
    hooks.preferred_provider = PrefersNormOnly().preferred_provider if by_hook else None
    built = build("auto" if by_hook else "NormOnly,auto", hooks)
    cpu = torch.device("cpu")
    fastest = next(each for each in (NativeOps, OneDnnOps, TorchOps) if not each.unsupported(cpu, torch.float32))
    by_role = {"linear": fastest, "rotary": fastest, "sampling": fastest, "routing": TorchOps, "norm": NormOnly}
    assert ops_of(built) == by_role | {"step": NativeOps if fastest is NativeOps else TorchOps}
    assert tokens(built) == tiny.greedy(PROMPT, 12)
    assert CALLS["rms_norm"] > 0


def test_one_instance_serves_all_roles_of_its_provider() -> None:
    roles = Ops.of(torch.device("cpu"), torch.float32, NormOnly, TorchOps)
    assert roles.linear is roles.rotary is roles.sampling is roles.step is roles.routing
    assert roles.norm is not roles.linear


@pytest.mark.parametrize(
    ("ops", "error", "message"),
    [
        (
            "torch,NormOnly",
            InvalidValueError,
            r"those before NormOnly have all of its roles \(norm\).* name it first",
        ),
        ("NormOnly,,torch", InvalidValueError, "one name, or several with commas between"),
        ("UnsupportedOps,torch", ProviderUnsupportedError, "it is for another machine"),
        ("NormOnly,nobodys", ProviderNotFoundError, "no ops provider is called 'nobodys'"),
        (
            "WithoutRole,torch",
            ProviderLoadError,
            "it has no role: it must subclass one or more of LinearOps, NormOps, ",
        ),
        ("SubclassesOps", ProviderLoadError, r"it is not a subclass of minisgl_core\.contracts\.ops\.OpsProvider"),
    ],
)
def test_invalid_ops_lists_are_refused(ops: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        build(ops)


def test_the_digest_covers_providers_of_all_roles() -> None:
    every = registry()
    digests = [every.digest({"ops": names}) for names in ("NormOnly,torch", "torch", "NormOnly,native")]
    assert len(set(digests)) == 3
