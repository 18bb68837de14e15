from __future__ import annotations

import inspect
import logging

import pluggy
import pytest

from minisgl_core import hookimpl
from minisgl_core.contracts.platform import Hardware
from minisgl_core.errors import PluginError
from minisgl_core.platforms.selection import preferred_by
from minisgl_core.plugins import hookspecs
from minisgl_core.plugins.hooks import Hooks
from minisgl_core.plugins.registry import Registry
from minisgl_core.utils.exit_status import EndRequest

GOOD = """
from minisgl_core import hookimpl
seen = []

@hookimpl
def engine_started(info):
    seen.append(info)

@hookimpl
def preferred_provider(kind):
    if kind == "attention":
        return "mine"
"""


def hook_names() -> set[str]:
    return {name for name, value in vars(hookspecs).items() if hasattr(value, f"{hookspecs.PROJECT}_spec")}


def test_hooks_without_implementations_are_none():
    hooks = Hooks()
    assert len(hook_names()) == 10
    assert all(getattr(hooks, name) is None for name in hook_names())


def test_hooks_are_called_with_the_arguments_they_name(site):
    site.install("good", {"hooks": {"good": "good_hooks"}}, good_hooks=GOOD)
    hooks = Hooks(Registry.from_environment())
    assert hooks.engine_started is not None
    hooks.engine_started(info="started")
    import good_hooks

    assert good_hooks.seen == ["started"]
    assert hooks.preferred_provider is not None
    assert hooks.preferred_provider(kind="attention", hardware=None) == "mine"
    assert hooks.preferred_provider(kind="moe", hardware=None) is None
    assert hooks.batch_scheduled is None


@pytest.mark.parametrize(
    ("source", "cause"),
    [
        ("import surely_not_installed", "surely_not_installed"),
        ("plugin_api = '>=7'", "plugin API"),
        ("from minisgl_core import hookimpl\n@hookimpl\ndef engine_startd(info): pass", "engine_startd"),
        ("from minisgl_core import hookimpl\n@hookimpl\ndef engine_started(inf): pass", "inf"),
        ("def engine_started(info): pass", "minisgl_core.hookimpl"),
        ("from minisgl_core import hookimpl\n@hookimpl\nasync def api_routes(app): pass", "without async"),
    ],
)
def test_an_invalid_hook_module_is_skipped_with_one_warning(site, caplog, source, cause):
    site.install("bad", {"hooks": {"bad": "bad_hooks"}}, bad_hooks=source)
    site.install("good", {"hooks": {"good": "good_hooks"}}, good_hooks=GOOD)
    with caplog.at_level(logging.WARNING):
        hooks = Hooks(Registry.from_environment())
    assert hooks.engine_started is not None
    hooks.engine_started(info="started")
    assert len(caplog.records) == 1
    assert "bad 1.0" in caplog.text
    assert cause in caplog.text


END = "from minisgl_core.utils.exit_status import EndRequest"


def test_an_end_request_in_a_factory_of_hooks_is_raised(site):
    site.install("end", {"hooks": {"end": "end_hooks:make"}}, end_hooks=f"{END}\ndef make(): raise EndRequest(0)")
    with pytest.raises(EndRequest):
        Hooks(Registry.from_environment())


def test_an_end_request_in_a_hook_is_raised(site):
    site.install("end", {"hooks": {"end": "end_hooks"}}, end_hooks=f"{GOOD}\n    {END}; raise EndRequest(0)")
    hooks = Hooks(Registry.from_environment())
    assert hooks.preferred_provider is not None
    with pytest.raises(EndRequest):
        hooks.preferred_provider(kind="moe", hardware=None)


def test_a_hook_class_is_instantiated_once_per_engine(site, caplog):
    source = """
from minisgl_core import hookimpl

class Counting:
    def __init__(self):
        self.seen = []

    @hookimpl
    def engine_started(self, info):
        self.seen.append(info)
        made.append(self)

made = []

def broken():
    raise OSError("no directory")
"""
    entries = {"counting": "class_hooks:Counting", "broken": "class_hooks:broken"}
    site.install("good", {"hooks": entries}, class_hooks=source)
    for info in ("first", "second"):
        hooks = Hooks(Registry.from_environment())
        assert hooks.engine_started is not None
        hooks.engine_started(info=info)
    import class_hooks

    assert [each.seen for each in class_hooks.made] == [["first"], ["second"]]
    assert "class_hooks:broken cannot be called: OSError: no directory" in caplog.text


def test_a_function_that_returns_none_registers_nothing(site, caplog):
    site.install("good", {"hooks": {"nothing": "builtins:print"}})
    hooks = Hooks(Registry.from_environment())
    assert hooks.engine_started is None
    assert caplog.text == ""


@pytest.mark.parametrize("failure", ["RuntimeError('no licence')", "SystemExit('no licence')"])
def test_hooks_that_fail_to_start_are_skipped_with_a_warning(site, caplog, failure):
    site.install("bad", {"hooks": {"metrics": "bad_hooks:Hooks"}}, bad_hooks=f"def Hooks():\n    raise {failure}\n")
    assert Hooks(Registry.from_environment()).engine_started is None
    assert "no licence" in caplog.text


def test_hooks_of_two_distributions_may_have_one_name(site):
    for name in ("one", "two"):
        site.install(name, {"hooks": {"metrics": f"{name}_hooks"}}, **{f"{name}_hooks": GOOD})
    hooks = Hooks(Registry.from_environment())
    assert hooks.engine_started is not None
    hooks.engine_started(info="started")
    import one_hooks
    import two_hooks

    assert one_hooks.seen == two_hooks.seen == ["started"]


@pytest.mark.parametrize("failure", ["RuntimeError('out of ideas')", "SystemExit('out of ideas')"])
def test_errors_of_hooks_are_logged_once_and_not_raised(site, caplog, monkeypatch, failure):
    # these hooks need an app
    monkeypatch.setenv("MINISGL_PLUGINS_BLOCK", "minisgl-example,minisgl-server:hooks:web_ui")
    source = f"""
from minisgl_core import hookimpl

@hookimpl
def engine_stopped():
    raise {failure}

@hookimpl
def api_routes(app):
    raise RuntimeError("no such app")
"""
    site.install("bad", {"hooks": {"bad": "bad_hooks"}}, bad_hooks=source)
    for name in ("a_good", "c_good"):  # one is called before it, the other after it
        good = "from minisgl_core import hookimpl\n@hookimpl\ndef engine_stopped():\n    return 1\n"
        site.install(name, {"hooks": {name: name}}, **{name: good})
    hooks = Hooks(Registry.from_environment())
    assert hooks.engine_stopped is not None
    assert hooks.engine_stopped() == [1, 1]
    assert hooks.engine_stopped() == [1, 1]
    assert len(caplog.records) == 1
    assert "engine_stopped of bad:bad" in caplog.text
    assert "out of ideas" in caplog.text
    assert hooks.api_routes is not None
    with pytest.raises(RuntimeError, match="no such app"):
        hooks.api_routes(app=None)


def test_errors_of_wrappers_are_logged_once_and_not_raised(site, caplog):
    source = """
from minisgl_core import hookimpl

@hookimpl(wrapper=True)
def engine_stopped():
    yield
    raise RuntimeError("out of ideas")
"""
    site.install("bad", {"hooks": {"bad": "bad_hooks"}}, bad_hooks=source)
    hooks = Hooks(Registry.from_environment())
    assert hooks.engine_stopped is not None
    for _ in range(2):
        assert hooks.engine_stopped() is None
    assert len(caplog.records) == 1
    assert "bad_hooks.py" in caplog.text


def test_a_preference_that_is_not_a_name_names_the_module(site):
    source = "from minisgl_core import hookimpl\n@hookimpl\ndef preferred_provider(kind):\n    return 7\n"
    site.install("bad", {"hooks": {"bad": "bad_hooks"}}, bad_hooks=source)
    preferred = preferred_by(Hooks(Registry.from_environment()))
    with pytest.raises(PluginError, match="preferred_provider of bad:bad must return a name or None, not 7"):
        preferred("ops", Hardware("cpu", "x86_64", (), 2**30, 1))


def test_hook_specs_are_documented_and_have_the_marker():
    assert all(inspect.getdoc(getattr(hookspecs, name)) for name in hook_names())
    assert isinstance(hookimpl, pluggy.HookimplMarker)
    assert hookimpl.project_name == "minisgl"
