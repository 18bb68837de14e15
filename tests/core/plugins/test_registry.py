from __future__ import annotations

from importlib.metadata import metadata
from pathlib import Path

import pytest

from minisgl_core.errors import DuplicateProviderError, InvalidValueError, ProviderLoadError, ProviderNotFoundError
from minisgl_core.platforms.selection import pick_platform, preferred_by
from minisgl_core.plugins import remedies
from minisgl_core.plugins.hooks import Hooks
from minisgl_core.plugins.kinds import KINDS
from minisgl_core.plugins.plugin_filter import SHIPPED
from minisgl_core.plugins.registry import Entry, Registry, reasons_of
from minisgl_core.utils.exit_status import EndRequest

NONE_PREFERRED = preferred_by(Hooks())

POLICY = """
from minisgl_core.contracts.policy import Policy

class Backwards(Policy):
    plugin_api = {api!r}
    def order(self, waiting, running, num_cached):
        return waiting[::-1]

class Unfinished(Policy):
    pass

class Stranger:
    pass

function = len
"""


def policy(api: str = ">=2,<3") -> str:
    return POLICY.format(api=api)


def test_listing_entries_imports_no_plugin(site):
    site.install("one", {"policy": {"backwards": "no_such_module:Nothing"}}, version="2.5")
    registry = Registry.from_environment()
    assert Entry("policy", "backwards", "no_such_module:Nothing", "one", "2.5") in registry.entries("policy")
    assert registry.names("policy") == ["backwards", "fcfs", "longest-output-first", "lpm"]


def test_shipped_providers_are_found_through_their_own_metadata():
    registry = Registry.from_environment()
    assert {"torch"} <= set(registry.names("attention"))
    assert {entry.distribution for entry in registry.entries("platform")} >= {"minisgl-core"}


def test_shipped_providers_name_the_package_to_install():
    wrong = []
    for entry in (each for kind in KINDS for each in Registry.from_environment().entries(kind)):
        if entry.distribution in SHIPPED - {"minisgl-core"}:
            name, _, extra = remedies.requirement(entry.kind, entry.name).rstrip("]").partition("[")
            extras = metadata(entry.distribution).get_all("Provides-Extra") or []
            if name != entry.distribution or (extra and extra not in extras):
                wrong.append(entry)
    assert wrong == []


def test_load_returns_the_class(site):
    site.install("one", {"policy": {"backwards": "one_policy:Backwards"}}, one_policy=policy())
    loaded = Registry.from_environment().load("policy", "backwards")
    assert loaded().order([1, 2, 3], [], lambda request: 0) == [3, 2, 1]


@pytest.mark.parametrize(
    ("body", "cause"),
    [("raise OSError('no such device')", "OSError: no such device"), ("return 'needs'", "'needs'"), ("pass", "None")],
)
def test_a_provider_whose_unsupported_method_fails_is_named(site, body, cause):
    source = f"""
from minisgl_core.platforms.cpu import CpuPlatform

class Odd(CpuPlatform):
    @classmethod
    def unsupported(cls):
        {body}
"""
    site.install("stranger", {"platform": {"odd": "odd:Odd"}}, odd=source)
    registry = Registry.from_environment()
    with pytest.raises(ProviderLoadError, match=f"'odd' of stranger 1.0 .*{cause}"):
        registry.unsupported("platform", "odd")
    hinted = pick_platform("auto", registry, lambda kind, hardware: "odd")
    assert hinted[0].name in ("cpu", "cuda"), "auto skips it"


THEIRS = """
from dataclasses import replace
from minisgl_core.platforms.cpu import CpuPlatform

class Theirs(CpuPlatform):
    name = "theirs"

    @classmethod
    def hardware(cls):
        return replace(super().hardware(), platform="theirs", device_type="cpu")
"""


def test_auto_selects_a_plugin_platform_only_if_preferred(site, monkeypatch):
    site.install("stranger", {"platform": {"theirs": "theirs:Theirs"}}, theirs=THEIRS)
    registry = Registry.from_environment()
    own = pick_platform("auto", registry, NONE_PREFERRED)[1]
    assert own.platform in ("cpu", "cuda")
    calls = []

    def prefer(name):
        return lambda kind, hardware: calls.append((kind, hardware)) or name

    assert pick_platform("auto", registry, prefer("theirs"))[1].platform == "theirs"
    assert calls == [("platform", own)]
    for name in (None, "nobodys", own.platform):
        assert pick_platform("auto", registry, prefer(name))[1] == own
    assert pick_platform("theirs", registry, NONE_PREFERRED)[1].platform == "theirs"
    monkeypatch.setenv("MINISGL_PLUGINS_BLOCK", "platform:cpu,platform:cuda")
    assert pick_platform("auto", Registry.from_environment(), NONE_PREFERRED)[1].platform == "theirs", (
        "the only one left"
    )


def test_a_platform_with_an_unknown_torch_device_is_named(site):
    source = """
from dataclasses import replace
from minisgl_core.platforms.cpu import CpuPlatform

class Odd(CpuPlatform):
    @classmethod
    def hardware(cls):
        return replace(super().hardware(), platform="odd")
"""
    site.install("stranger", {"platform": {"odd": "odd:Odd"}}, odd=source)
    with pytest.raises(ProviderLoadError, match=r"'odd' cannot be used: .*device_type"):
        pick_platform("odd", Registry.from_environment(), NONE_PREFERRED)


def test_unknown_names_list_providers_and_a_close_match():
    with pytest.raises(ProviderNotFoundError, match=r"--policy.*'fcsf'.*installed: .*fcfs.*Did you mean 'fcfs'\?"):
        Registry.from_environment().entry("policy", "fcsf")


@pytest.mark.parametrize(
    ("kind", "name", "remedy"),
    [
        ("attention", "fi", "pip install 'minisgl-backends[fi]'"),
        ("prefix_cache", "radix", "pip install minisgl-backends"),
        ("models", "LlamaForCausalLM", "pip install minisgl-models"),
        ("models", "transformers", "pip install 'minisgl-models[transformers]'"),
        ("commands", "launch", "pip install minisgl-server"),
    ],
)
def test_missing_shipped_providers_name_their_package(kind, name, remedy):
    with pytest.raises(ProviderNotFoundError) as caught:
        Registry([]).entry(kind, name)
    assert remedy in str(caught.value)


def test_close_matches_include_missing_shipped_providers():
    with pytest.raises(ProviderNotFoundError, match="Did you mean 'trtllm'"):
        Registry([]).entry("attention", "trtlm")


def test_an_unknown_kind_is_refused():
    with pytest.raises(InvalidValueError, match="Did you mean 'attention'"):
        Registry([]).names("atention")


def test_duplicate_providers_name_both_distributions(site):
    for name in ("one", "two"):
        site.install(name, {"policy": {"backwards": f"{name}_policy:Backwards"}}, **{f"{name}_policy": policy()})
    registry = Registry.from_environment()
    assert registry.names("policy").count("backwards") == 1
    with pytest.raises(DuplicateProviderError, match=r"one 1\.0.*two 1\.0.*MINISGL_PLUGINS_BLOCK"):
        registry.load("policy", "backwards")
    with pytest.raises(DuplicateProviderError):
        registry.digest({"policy": "backwards"})
    assert Registry.from_environment({"MINISGL_PLUGINS_BLOCK": "two"}).load("policy", "backwards")


@pytest.mark.parametrize("owner", ["a-plugin", "z-plugin"])
def test_the_remedy_for_duplicates_keeps_the_shipped_provider(site, owner):
    """The remedy hides no other provider."""
    points = {"policy": {"fcfs": "other_policy:Backwards", "backwards": "other_policy:Backwards"}}
    site.install(owner, points, other_policy=policy())
    with pytest.raises(DuplicateProviderError) as caught:
        Registry.from_environment().load("policy", "fcfs")
    variable, _, value = str(caught.value).split()[-1].partition("=")
    registry = Registry.from_environment({variable: value})
    assert registry.entry("policy", "fcfs").distribution == "minisgl-core"
    assert registry.names("policy") == ["backwards", "fcfs", "longest-output-first", "lpm"]


def test_a_distribution_found_twice_on_the_path_counts_once(site, tmp_path: Path, monkeypatch):
    site.install("my-plugin", {"policy": {"backwards": "one_policy:Backwards"}}, one_policy=policy())
    later = type(site)(tmp_path / "later")
    later.install("My_Plugin", {"policy": {"backwards": "other:Backwards", "stale": "other:Stale"}}, version="0.9")
    monkeypatch.syspath_prepend(later.path)
    monkeypatch.syspath_prepend(site.path)
    registry = Registry.from_environment()
    assert registry.entry("policy", "backwards").version == "1.0"
    assert "stale" not in registry.names("policy")


def test_failed_imports_report_cause_and_remedy(site):
    site.install("one", {"policy": {"p": "one_broken:P"}}, one_broken="import surely_not_installed.part")
    site.install("two", {"policy": {"q": "two_broken:Q"}}, two_broken="raise RuntimeError('no\\n driver')")
    site.install("three", {"policy": {"r": "three_broken:R"}}, three_broken="import sys; sys.exit(3)")
    registry = Registry.from_environment()
    with pytest.raises(ProviderLoadError, match=r"'p' of one 1\.0.*surely_not_installed.*Install what one needs"):
        registry.load("policy", "p")
    with pytest.raises(ProviderLoadError, match=r"'q' of two 1\.0.*RuntimeError: no driver\. ") as caught:
        registry.load("policy", "q")
    assert isinstance(caught.value.__cause__, RuntimeError)
    with pytest.raises(ProviderLoadError, match=r"'r' of three 1\.0.*SystemExit"):
        registry.load("policy", "r")


def test_an_end_request_in_unsupported_is_raised(site):
    source = """
from minisgl_core.utils.exit_status import EndRequest

class Ends:
    @classmethod
    def unsupported(cls, *spec):
        raise EndRequest(0)
"""
    site.install("one", {"policy": {"ends": "one_ends:Ends"}}, one_ends=source)
    import one_ends

    with pytest.raises(EndRequest):
        reasons_of(Registry.from_environment().entry("policy", "ends"), one_ends.Ends)


def test_failed_imports_of_shipped_providers_name_the_extra():
    entry = Entry("attention", "fi", "surely_not_installed:Fi", "minisgl-backends", "0.1.0")
    with pytest.raises(ProviderLoadError, match=r"pip install 'minisgl-backends\[fi\]'"):
        Registry([entry]).load("attention", "fi")


@pytest.mark.parametrize(
    ("attribute", "reason"),
    [
        ("Stranger", "not a subclass of minisgl_core.contracts.policy.Policy"),
        ("function", "not a subclass"),
        ("Unfinished", "lacks order of minisgl_core.contracts.policy.Policy"),
        ("Missing", "AttributeError"),
    ],
)
def test_a_provider_that_breaks_the_contract_is_refused(site, attribute, reason):
    site.install("one", {"policy": {"p": f"one_policy:{attribute}"}}, one_policy=policy())
    with pytest.raises(ProviderLoadError, match=reason):
        Registry.from_environment().load("policy", "p")


@pytest.mark.parametrize(
    ("api", "reason"),
    [
        (">=3", r"versions >=3 of the plugin API, and this minisgl has 2\.0\. Install"),
        (">=1,<2", r"versions >=1,<2 .*\. Install a version"),
        ("new", "not a version range"),
    ],
)
def test_a_provider_for_another_plugin_api_is_refused(site, api, reason):
    site.install("one", {"policy": {"p": "one_policy:Backwards"}}, one_policy=policy(api))
    with pytest.raises(ProviderLoadError, match=reason):
        Registry.from_environment().load("policy", "p")


def test_allow_and_block_lists_hide_providers_with_a_note(site):
    site.install("My_Plugin", {"policy": {"a": "x:A", "b": "x:B"}})
    site.install("other", {"policy": {"c": "x:C"}})

    def names(**environ: str) -> list[str]:
        return Registry.from_environment(environ).names("policy")

    assert names() == ["a", "b", "c", "fcfs", "longest-output-first", "lpm"]
    assert names(MINISGL_PLUGINS_BLOCK="my-plugin") == ["c", "fcfs", "longest-output-first", "lpm"]
    assert names(MINISGL_PLUGINS_BLOCK="My.Plugin") == ["c", "fcfs", "longest-output-first", "lpm"]
    assert names(MINISGL_PLUGINS_BLOCK="policy:a, other") == ["b", "fcfs", "longest-output-first", "lpm"]
    assert names(MINISGL_PLUGINS_ALLOW="other") == ["c", "fcfs", "longest-output-first", "lpm"]
    assert names(MINISGL_PLUGINS_ALLOW="policy:b") == ["b", "fcfs", "longest-output-first", "lpm"]
    assert names(MINISGL_PLUGINS_ALLOW="other", MINISGL_PLUGINS_BLOCK="policy:c,policy:lpm") == [
        "fcfs",
        "longest-output-first",
    ]
    assert names(MINISGL_PLUGINS_BLOCK="My.Plugin:policy:a,my-plugin:policy:c") == [
        "b",
        "c",
        "fcfs",
        "longest-output-first",
        "lpm",
    ]
    assert names(MINISGL_PLUGINS_ALLOW="my-plugin:policy:a") == ["a", "fcfs", "longest-output-first", "lpm"]
    assert names(MINISGL_PLUGINS_BLOCK="minisgl-core") == ["a", "b", "c"]
    with pytest.raises(ProviderNotFoundError, match=r"'a'.*my-plugin 1\.0 is blocked by MINISGL_PLUGINS_BLOCK"):
        Registry.from_environment({"MINISGL_PLUGINS_BLOCK": "my-plugin"}).entry("policy", "a")
    notes = Registry.from_environment({"MINISGL_PLUGINS_ALLOW": "other"}).notes
    assert any("policy 'a' of my-plugin 1.0 is not in MINISGL_PLUGINS_ALLOW" in note for note in notes)


@pytest.mark.parametrize("item", ["atention:fi", "mine:atention:fi"])
def test_a_list_with_an_unknown_kind_is_refused(item):
    with pytest.raises(InvalidValueError, match=rf"MINISGL_PLUGINS_BLOCK='{item}'.*Did you mean 'attention'"):
        Registry.from_environment({"MINISGL_PLUGINS_BLOCK": item})


@pytest.mark.parametrize("item", ["policy:", ":policy:a", "mine:policy:", ":"])
def test_a_list_with_an_incomplete_item_is_refused(item):
    with pytest.raises(InvalidValueError, match=f"MINISGL_PLUGINS_BLOCK='{item}'"):
        Registry.from_environment({"MINISGL_PLUGINS_BLOCK": item})


def test_invalid_metadata_and_unknown_groups_become_notes(site):
    site.install("one", {"polcy": {"p": "one:P"}})
    site.install("two", {"policy": {"fine": "two:P"}})
    broken = site.path / "three-1.0.dist-info"
    broken.mkdir()
    (broken / "entry_points.txt").write_bytes(b"[minisgl.policy]\n\xff\xfe = x\n")
    registry = Registry.from_environment()
    assert "fine" in registry.names("policy")
    assert any("one registers 'p' in minisgl.polcy" in note and "'policy'" in note for note in registry.notes)
    assert any("three" in note and "cannot be read" in note for note in registry.notes)


@pytest.mark.parametrize("name", ["a,b", "a:b", "a b"])
def test_names_that_no_list_can_hold_become_notes(site, name):
    site.install("one", {"attention": {name: "one:P", "fine": "one:Q"}})
    registry = Registry.from_environment()
    assert "fine" in registry.names("attention")
    assert name not in registry.names("attention")
    assert any(f"one registers {name!r} in minisgl.attention" in note for note in registry.notes)


def test_the_digest_covers_all_fields_of_an_entry():
    entry = Entry("policy", "p", "one:P", "one", "1.0")
    same = Registry([entry]).digest({"policy": "p"})
    others = [
        Entry("policy", "p", "one:Q", "one", "1.0"),
        Entry("policy", "p", "one:P", "two", "1.0"),
        Entry("policy", "p", "one:P", "one", "1.1"),
    ]
    assert same == Registry([entry, Entry("policy", "unused", "x:X", "x", "1")]).digest({"policy": "p"})
    assert len({same, *(Registry([other]).digest({"policy": "p"}) for other in others)}) == 4


def test_the_digest_covers_both_backends_of_a_pair_in_order():
    registry = Registry(Entry("attention", name, f"one:{name}", "one", "1.0") for name in "ab")
    digests = {registry.digest({"attention": names}) for names in ("a", "b", "a,b", "b,a")}
    assert len(digests) == 4
    with pytest.raises(ProviderNotFoundError):
        registry.digest({"attention": "a,c"})


def test_every_contract_named_by_a_kind_exists():
    from pkgutil import resolve_name

    assert all(isinstance(resolve_name(kind.contract), type) for kind in KINDS.values() if kind.contract)
