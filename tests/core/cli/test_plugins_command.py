from __future__ import annotations

import json

import click
import pytest
from click.testing import CliRunner

from minisgl_core.cli.main import main
from minisgl_core.plugins.registry import Registry

ATTENTION = """
import torch
from minisgl_core.contracts.attention import AttentionBackend

class Picky(AttentionBackend):
    plugin_api = ">=1,<3"

    @classmethod
    def unsupported(cls, spec):
        assert isinstance(spec.device, torch.device) and spec.num_q_heads % spec.num_kv_heads == 0
        return ["the moon is not full", f"pages of {spec.page_size} tokens are too small"]

    def plan(self, batch):
        raise NotImplementedError

    def forward(self, q, k, v, layer, plan):
        raise NotImplementedError

class Crashes(Picky):
    @classmethod
    def unsupported(cls, spec):
        raise KeyError("driver")
"""


def run(*arguments: str):
    return CliRunner().invoke(main, ["plugins", *arguments], obj=Registry.from_environment())


def test_list_prints_aligned_columns_to_a_pipe(site):
    site.install("stranger", {"attention": {"picky": "picky:Picky"}}, version="2.0.1")
    lines = run("list").stdout.splitlines()
    row = next(line for line in lines if "picky" in line)
    assert row.split() == ["attention", "picky", "stranger", "2.0.1"]
    assert row.index("stranger") == lines[0].index("distribution")


def test_list_prints_json_and_filters_by_kind(site):
    site.install("stranger", {"attention": {"picky": "picky:Picky"}, "policy": {"p": "p:P"}})
    everything = json.loads(run("list", "--json").stdout)
    own = [entry for entry in everything if entry["distribution"] == "stranger"]
    expected = {
        "kind": "attention",
        "name": "picky",
        "value": "picky:Picky",
        "distribution": "stranger",
        "version": "1.0",
    }
    assert own[0] == expected
    assert {entry["kind"] for entry in json.loads(run("list", "--json", "--kind", "policy").stdout)} == {"policy"}
    assert run("list", "--kind", "nonsense").exit_code == 2


def test_list_reports_duplicate_and_hidden_plugins_on_stderr(site, monkeypatch):
    for name in ("one", "two", "three"):
        site.install(name, {"policy": {"p": "p:P"}, "hooks": {"h": "h"}})
    monkeypatch.setenv("MINISGL_PLUGINS_BLOCK", "three,policy:q,one:policy:q")
    result = run("list")
    for item in ("policy:q", "one:policy:q"):
        assert f"MINISGL_PLUGINS_BLOCK names '{item}', which matches no" in result.stderr
    assert "names 'three'" not in result.stderr
    assert "policy provider 'p' is registered by one 1.0 and two 1.0" in result.stderr
    assert "policy 'p' of three 1.0 is blocked by MINISGL_PLUGINS_BLOCK" in result.stderr
    assert "hook module" not in result.stderr
    assert "note" not in result.stdout
    assert json.loads(run("list", "--json").stdout)


def test_check_shows_metadata_and_the_reason_for_refusal(site):
    site.install("stranger", {"attention": {"picky": "picky:Picky"}}, version="2.0.1", picky=ATTENTION)
    result = run("check", "picky")
    assert result.exit_code == 0, result.output
    for text in ("stranger 2.0.1", "picky:Picky", ">=1,<3", "this minisgl has 2.0", "applies:      no, for"):
        assert text in result.stdout
    assert "- the moon is not full\n" in result.stdout
    assert "- pages of 16 tokens are too small\n" in result.stdout


@pytest.mark.parametrize(("name", "layout"), [("torch", "HND"), ("triton", "NHD")])
def test_check_shows_the_kv_layout_of_a_backend(name, layout):
    assert f"KV layouts:   {layout}\n" in run("check", name, "--kind", "attention").stdout
    assert "KV layout" not in run("check", "torch", "--kind", "ops").stdout


def test_check_of_a_supported_provider():
    result = run("check", "torch", "--kind", "ops")
    assert result.exit_code == 0, result.output
    assert "applies:      yes, for" in result.stdout


def test_check_shows_the_roles_of_ops():
    for name, roles in (("torch", "linear, norm, rotary, sampling, step, routing"), ("hopper", "linear, norm, rotary")):
        assert f"roles:        {roles}\n" in run("check", name, "--kind", "ops").stdout


@pytest.mark.parametrize(
    ("kind", "value", "reason"),
    [
        ("attention", "picky:Missing", "AttributeError"),
        ("attention", "picky:Crashes", "its unsupported() failed: KeyError"),
        ("attention", "no_such_module:X", "no_such_module"),
        ("commands", "picky:Picky", "it is not a click command"),
    ],
)
def test_check_fails_if_a_provider_does_not_load(site, kind, value, reason):
    site.install("stranger", {kind: {"picky": value}}, picky=ATTENTION)
    result = run("check", "picky")
    assert result.exit_code == 2
    assert reason in result.stderr
    assert "Traceback" not in result.output


def test_check_covers_all_kinds_that_have_the_name(site):
    site.install("stranger", {"attention": {"same": "picky:Picky"}, "policy": {"same": "no_such:P"}}, picky=ATTENTION)
    result = run("check", "same")
    assert result.exit_code == 2
    assert "attention same\n" in result.stdout
    assert "policy same: " in result.stderr
    assert run("check", "same", "--kind", "attention").exit_code == 0


def test_check_of_an_unknown_name_fails():
    result = run("check", "radixx")
    assert result.exit_code == 2
    assert "Did you mean 'radix'?" in result.stderr
    with pytest.raises(click.ClickException):
        CliRunner().invoke(main, ["plugins", "check"], standalone_mode=False, catch_exceptions=False)
