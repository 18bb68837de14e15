"""Every key of every registered architecture's config, against transformers: followed, refused by name, or without effect."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import transformers
from config_cases import ALIASES, CASES, WITHOUT_EFFECT, WRAPPERS, Case, Patch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoConfig

from minisgl_core.config.options import EngineConfig
from minisgl_core.config.resolve import attention_spec
from minisgl_core.contracts.attention import check_layers
from minisgl_core.contracts.communicator import SingleRank
from minisgl_core.contracts.model import BuildContext
from minisgl_core.contracts.ops import Ops
from minisgl_core.engine.checkpoint import open_checkpoint
from minisgl_core.errors import MinisglError
from minisgl_core.plugins.registry import Registry
from minisgl_core.testing.references import DenseAttention, NaiveMoe, random_reference
from minisgl_core.weights.loader import load_weights

transformers.utils.logging.disable_progress_bar()
transformers.utils.logging.set_verbosity_error()
torch.set_num_threads(1)
NUM_TOKENS = 24
CPU = torch.device("cpu")
NUM_DRAWS = int(os.environ.get("MINISGL_CONFIG_DRAWS", "10"))
OTHER = {bool: lambda value: not value, int: lambda value: value + 1, float: lambda value: value + 0.5}


@lru_cache
def registry() -> Registry:
    return Registry.from_environment()


def shipped() -> list[str]:
    return sorted(each.name for each in registry().entries("models") if each.distribution == "minisgl-models")


@dataclass
class Outcome:
    """Logits of a config by transformers and by the engine; None and the reason where one of them refuses it."""

    reference: torch.Tensor | None
    logits: torch.Tensor | None
    reason: str = ""

    def fault(self, keys: Iterable[str]) -> str:
        """Say what is wrong; nothing if the logits are equal, or the refusal names one of the keys."""
        if self.reference is None:
            return ""  # transformers refuses the config
        if self.logits is None:
            return "" if any(key in self.reason for key in keys) else f"refused without the key's name: {self.reason}"
        if self.logits.shape != self.reference.shape:
            return f"logits have the shape {tuple(self.logits.shape)}, in transformers {tuple(self.reference.shape)}"
        difference = float((self.logits - self.reference).abs().max())
        return (
            ""
            if difference <= 1e-4 * max(1.0, float(self.reference.abs().max()))
            else f"logits differ by {difference:g}"
        )


@torch.inference_mode()
def outcome(architecture: str, raw: Patch) -> Outcome:
    """Run a ``config.json`` with random weights that fit it, by transformers and by the engine's own path."""
    ids = torch.arange(NUM_TOKENS) * 7 % 53
    with TemporaryDirectory() as name:
        folder = Path(name)
        text = json.dumps({"architectures": [architecture], **raw})
        (folder / "config.json").write_text(text)
        try:
            reference = random_reference(AutoConfig.from_pretrained(folder))
            expected = reference(ids[None]).logits[0]
        except Exception as error:
            return Outcome(None, None, str(error))
        reference.save_pretrained(folder)
        (folder / "config.json").write_text(text)
        try:
            return Outcome(expected, engine_logits(folder, ids))
        except MinisglError as error:
            return Outcome(expected, None, str(error))


def engine_logits(folder: Path, ids: torch.Tensor) -> torch.Tensor:
    options = EngineConfig.from_flat(model=str(folder), platform="cpu", ops="torch", dtype="float32")
    checkpoint = open_checkpoint(options, registry())
    config, source = checkpoint.config, checkpoint.source
    build = BuildContext(SingleRank(), Ops.of(CPU, torch.float32), CPU, torch.float32, NaiveMoe)
    model = checkpoint.model_class(config, build)
    spec = attention_spec(options.with_flat(kv_dtype="float32"), config, config.max_position, 16, torch.float32, CPU)
    if reasons := check_layers(spec, model.attention_layers()):
        raise MinisglError("; ".join(reasons))
    load_weights(model, source, progress=False)
    return model.compute_logits(model.forward(ids, torch.arange(len(ids)), DenseAttention()))


def named(patch: Patch) -> set[str]:
    """Keys of a patch, those of objects in it, and names that messages have for them."""
    inner = (key for value in patch.values() if isinstance(value, Mapping) for key in value)
    return {*patch, *inner, *(ALIASES[key] for key in patch if key in ALIASES)}


def own_keys(case: Case) -> set[str]:
    return set(AutoConfig.for_model(case.model_type, **case.base).to_dict())


def raw_config(case: Case, patch: Patch) -> dict[str, Any]:
    return {"model_type": case.model_type, **case.base, **patch}


def test_every_registered_architecture_has_a_case() -> None:
    assert sorted({*CASES, *WRAPPERS, "transformers"}) == shipped()


@pytest.mark.parametrize("architecture", CASES)
def test_every_key_is_followed_or_refused_by_name(architecture: str) -> None:
    case, faults = CASES[architecture], {}
    own = own_keys(case)
    patches = case.patches(own)
    if unknown := own - patches.keys() - WITHOUT_EFFECT - case.without_effect:
        faults["keys without other values"] = str(sorted(unknown))
    base = outcome(architecture, raw_config(case, {}))
    assert base.logits is not None, base.reason
    for key, changes in patches.items():
        is_effective = False
        for patch in changes:
            found = outcome(architecture, raw_config(case, patch))
            if fault := found.fault(named(patch)):
                faults[str(patch)] = fault
            is_effective |= found.reference is None or not same(found.reference, base.reference)
        if key in own and not is_effective:
            faults[key] = "no value changes what transformers computes: add one, or review the key as without effect"
    assert not faults, json.dumps(faults, indent=1)


@pytest.mark.parametrize("architecture", CASES)
def test_keys_without_effect_have_none(architecture: str) -> None:
    case = CASES[architecture]
    config = AutoConfig.for_model(case.model_type, **case.base).to_dict()
    keys = (WITHOUT_EFFECT | case.without_effect) - {"use_cache", "return_dict", "is_encoder_decoder"}
    patch = {key: OTHER[type(config[key])](config[key]) for key in keys if type(config.get(key)) in OTHER}
    assert len(patch) > 3
    base, found = (outcome(architecture, raw_config(case, each)) for each in ({}, patch))
    assert found.fault(()) == ""
    assert same(base.reference, found.reference)


def same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is not None and other is not None and one.shape == other.shape and torch.equal(one, other)


@pytest.mark.parametrize("architecture", CASES)
def test_random_configs_equal_transformers(architecture: str) -> None:
    """Several changes at once; `nox -s nightly` draws more of them."""
    case = CASES[architecture]
    patches = [patch for changes in case.patches(own_keys(case)).values() for patch in changes]

    @settings(
        max_examples=NUM_DRAWS,
        deadline=None,
        derandomize=NUM_DRAWS == 10,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.lists(st.sampled_from(patches), min_size=2, max_size=5))
    def check(chosen: list[Patch]) -> None:
        merged = {key: value for patch in chosen for key, value in patch.items()}
        assert outcome(architecture, raw_config(case, merged)).fault(named(merged)) == "", merged

    check()
