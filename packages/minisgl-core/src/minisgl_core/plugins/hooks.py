"""Calls to the hooks of installed plugins.

The registry loads the hook modules, not pluggy's own loader, so that a module that fails to import only causes a warning.
"""

import functools
import inspect
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pluggy

from minisgl_core.errors import PluginError, ProviderLoadError
from minisgl_core.plugins import hookspecs
from minisgl_core.plugins.registry import Entry, Registry
from minisgl_core.utils.exceptions import one_line, one_line_with_type
from minisgl_core.utils.exit_status import EndRequest

logger = logging.getLogger(__name__)

Hook = Callable[..., Any]
"""Function that calls all implementations of one hook, with the keyword arguments of its spec in `hookspecs`."""


class Hooks:
    """Hooks of one process. An attribute is None if no plugin implements the hook, which then costs one comparison::

        if hooks.batch_finished is not None:
            hooks.batch_finished(plan=plan, result=result, state=scheduler)

    The first exception of an implementation is logged with its traceback, and the implementation counts as returning None.
    Exceptions in `api_routes` are raised, since routes that the user has enabled must not be missing silently.
    """

    engine_started: Hook | None = None
    engine_stopped: Hook | None = None
    batch_scheduled: Hook | None = None
    batch_finished: Hook | None = None
    request_finished: Hook | None = None
    pages_cached: Hook | None = None
    pages_evicted: Hook | None = None
    cli_options: Hook | None = None
    api_routes: Hook | None = None
    preferred_provider: Hook | None = None

    def __init__(self, registry: Registry | None = None) -> None:
        """Load the hook modules in `registry`. A module that fails is skipped with a warning. None means no hooks."""
        self.modules: dict[str, str] = {}
        """By hook: names of the modules that implement it, for messages."""
        if registry is None:
            return
        manager = _new_manager()
        for entry in registry.entries("hooks"):
            try:
                _add(manager, registry, entry)
            except PluginError as error:
                logger.warning("skipped the hook module %r of %s: %s", entry.name, entry, one_line(error))
        for name, caller in vars(manager.hook).items():
            if isinstance(caller, pluggy.HookCaller) and caller.get_hookimpls():
                assert hasattr(Hooks, name), f"Hooks has no attribute for the hook {name}"
                self.modules[name] = " or ".join(each.plugin_name for each in caller.get_hookimpls())
                # The exception of a wrapper ends the whole call.
                setattr(self, name, caller if name == "api_routes" else _log_errors(caller, name))


def check_hooks(registry: Registry, entry: Entry) -> None:
    """Raise PluginError if a hook module cannot be used; the message has the reason."""
    _add(_new_manager(), registry, entry)


def _new_manager() -> pluggy.PluginManager:
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    return manager


def _add(manager: pluggy.PluginManager, registry: Registry, entry: Entry) -> None:
    """Load a hook module, or the object that a function or class in its place returns, and register its hooks."""
    module = registry.load_entry(entry)
    if callable(module):
        try:
            module = module()
        except EndRequest:
            raise
        except (Exception, SystemExit) as error:
            raise ProviderLoadError(f"{entry.value} cannot be called: {one_line_with_type(error)}") from error
    if module is None:
        return
    name = f"{entry.distribution}:{entry.name}"
    hooks = SimpleNamespace()
    try:
        for attribute in dir(module):
            if options := manager.parse_hookimpl_opts(module, attribute):
                function = getattr(module, attribute)
                if inspect.iscoroutinefunction(function):
                    raise PluginError(
                        f"{attribute} is a coroutine function, which is not awaited; define it without async"
                    )
                # A wrapper is a generator: calling it raises nothing yet.
                is_plain = not options["hookwrapper"] and not options["wrapper"] and attribute != "api_routes"
                setattr(hooks, attribute, _log_errors(function, f"{attribute} of {name}") if is_plain else function)
        if not vars(hooks):
            raise PluginError("it implements no hook; mark its functions with minisgl_core.hookimpl")
        manager.register(hooks, name)
        manager.check_pending()
    except (ValueError, pluggy.PluginValidationError) as error:
        # A ValueError means that another module is registered under this name, and that one stays.
        if isinstance(error, pluggy.PluginValidationError) and manager.has_plugin(name):
            manager.unregister(name=name)
        raise PluginError(one_line(error)) from error


def _log_errors(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return a function that logs the first exception of `function`, and returns None instead of raising any."""
    failed = False

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        nonlocal failed
        try:
            return function(*arguments, **named)
        except EndRequest:
            raise
        except (Exception, SystemExit):
            if not failed:
                failed = True
                logger.exception("the hook %s failed; later failures of it are not logged", name)
            return None

    return call
