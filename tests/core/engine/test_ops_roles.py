"""A package that brings one role of ops, in a real engine. Torch or the providers of ``auto`` serve the others."""

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


class NormAlone(NormOps):
    """Counts its calls, to show that the engine makes them."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        CALLS["rms_norm"] += 1
        return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, eps)


class Elsewhere(NormAlone):
    @classmethod
    def unsupported(cls, device: torch.device, dtype: torch.dtype) -> list[str]:
        return ["it is for another machine"]


class NoRole(OpsProvider):
    pass


class SubclassesOps(Ops):
    """Provider that derives from the composition of roles instead of a role."""


class TestNormAlone(OpsTests):
    provider = NormAlone


def registry() -> Registry:
    shipped = tiny.registry()
    own = [
        Entry("ops", each.__name__, f"{__name__}:{each.__name__}", "own", "1")
        for each in (NormAlone, Elsewhere, NoRole, SubclassesOps)
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


class PrefersNormAlone:
    def preferred_provider(self, kind: str, hardware: Any) -> str | None:
        return "NormAlone" if kind == "ops" else None


@pytest.mark.parametrize("ops", ["NormAlone", "NormAlone,torch"])
def test_a_norm_alone_is_used_and_torch_does_the_rest(ops: str) -> None:
    CALLS.clear()
    built = build(ops)
    assert ops_of(built) == dict.fromkeys(ops_of(built), TorchOps) | {"norm": NormAlone}
    assert tokens(built) == tiny.greedy(PROMPT, 12)
    assert CALLS["rms_norm"] > 0
    choice = next(reason for what, _, reason in built.info.choices if what == "ops")
    assert choice == "NormAlone: norm; torch: linear, rotary, sampling, step, routing"


@pytest.mark.parametrize("by_hook", [False, True])
def test_a_norm_alone_beside_what_auto_takes(by_hook: bool) -> None:
    CALLS.clear()
    hooks = Hooks()
    hooks.preferred_provider = PrefersNormAlone().preferred_provider if by_hook else None
    built = build("auto" if by_hook else "NormAlone,auto", hooks)
    cpu = torch.device("cpu")
    fastest = next(each for each in (NativeOps, OneDnnOps, TorchOps) if not each.unsupported(cpu, torch.float32))
    by_role = {"linear": fastest, "rotary": fastest, "sampling": fastest, "routing": TorchOps, "norm": NormAlone}
    assert ops_of(built) == by_role | {"step": NativeOps if fastest is NativeOps else TorchOps}
    assert tokens(built) == tiny.greedy(PROMPT, 12)
    assert CALLS["rms_norm"] > 0


def test_an_instance_serves_all_roles_that_its_provider_has() -> None:
    roles = Ops.of(torch.device("cpu"), torch.float32, NormAlone, TorchOps)
    assert roles.linear is roles.rotary is roles.sampling is roles.step is roles.routing
    assert roles.norm is not roles.linear


@pytest.mark.parametrize(
    ("ops", "error", "message"),
    [
        (
            "torch,NormAlone",
            InvalidValueError,
            r"those before NormAlone have all of its roles \(norm\).* name it first",
        ),
        ("NormAlone,,torch", InvalidValueError, "one name, or several with commas between"),
        ("Elsewhere,torch", ProviderUnsupportedError, "it is for another machine"),
        ("NormAlone,nobodys", ProviderNotFoundError, "no ops provider is called 'nobodys'"),
        ("NoRole,torch", ProviderLoadError, "it has no role: it must subclass one or more of LinearOps, NormOps, "),
        ("SubclassesOps", ProviderLoadError, r"it is not a subclass of minisgl_core\.contracts\.ops\.OpsProvider"),
    ],
)
def test_what_is_named_serves_a_role_or_is_refused(ops: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        build(ops)


def test_ranks_compare_providers_of_every_role() -> None:
    every = registry()
    digests = [every.digest({"ops": names}) for names in ("NormAlone,torch", "torch", "NormAlone,native")]
    assert len(set(digests)) == 3
