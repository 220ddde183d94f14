"""Where the files of a model, a tokenizer or an adapter are, by the name that the user gives: shipped with the engine,
in a folder, or on the Hugging Face hub or in an object store, from which they are downloaded.

`source_of` decides from the name and the file system alone; `resolve_model` and its siblings return the folder, or a
GGUF file, which is read as one. Raises ValueError with a sentence for the user, for adapters LoraNotFound. Does not
import torch, which takes seconds.
"""

import difflib
import os
import re
from dataclasses import dataclass
from glob import escape
from pathlib import Path

from proa_engine.builtin import builtin_adapter_folder, builtin_drafter_folder, builtin_model_folder
from proa_engine.config import EngineConfig, LoadFormat
from proa_engine.core.lora_store import LoraNotFound
from proa_engine.json_configs import SpeculativeConfig
from proa_engine.option_groups import Downloads
from proa_engine.sources.folders import INDEX_FILE
from proa_engine.sources.gguf.choice import choose_file, patterns_of, split_type
from proa_engine.sources.gguf.header import SUFFIX, parts_of
from proa_engine.sources.object_urls import store_of

CONFIG_FILE_PATTERNS = ["*.json", "*.jinja", "*.model", "*.txt"]
WEIGHT_FILE_PATTERNS = ["*.safetensors", "sparse_linear.pt"]  # the second: BGE-M3's, see `models/pooling_config.py`
LORA_CONFIG_FILE = "adapter_config.json"
LORA_WEIGHTS_FILE = "adapter_model.safetensors"
BUILTIN_LORA = "builtin:"
_SCHEME = re.compile(r"([a-z][a-z0-9+.-]*)://", re.IGNORECASE)
_DEFAULTS = Downloads()
_HUB_PAGE = re.compile(r"https?://(?:www\.)?(?:huggingface\.co|hf\.co)/([^/]+/[^/?#]+)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class LocalFolder:
    """`path`: a folder, or a GGUF file."""

    path: Path


@dataclass(frozen=True, slots=True)
class HubModel:
    """`gguf_type`: of its GGUF files, which is taken; empty: its *.safetensors files are."""

    id: str
    gguf_type: str = ""


@dataclass(frozen=True, slots=True)
class ObjectPrefix:
    """`url`: of the prefix, or of a GGUF file."""

    url: str


Source = LocalFolder | HubModel | ObjectPrefix


def source_of(model: str) -> Source:
    """Return where `model` is. Raises ValueError for a name that can be neither a folder nor an id of the hub."""
    if model == "builtin":
        return LocalFolder(builtin_model_folder())
    if store_of(model):
        return ObjectPrefix(model)
    if scheme := _SCHEME.match(model):
        raise ValueError(_refuse_url(model, scheme[1].lower()))
    if not model.strip():
        raise ValueError("model must not be empty: give a folder or a hub id")
    try:
        folder = Path(model).expanduser()
        if folder.is_dir():
            return LocalFolder(_model_in(folder))
        is_file = folder.exists()
        if is_file and folder.suffix == SUFFIX:
            return LocalFolder(parts_of(folder)[0])
    except OSError as error:  # such as a name that is too long, or a folder above it that may not be read
        raise ValueError(f"model folder {model} cannot be read: {error.strerror}") from error
    except RuntimeError as error:  # of `expanduser`
        raise ValueError(f"model folder {model} cannot be read: there is no such user") from error
    if is_file:
        raise ValueError(f"model {model} is a file; give the folder with config.json and *.safetensors")
    if typed := split_type(model):
        return HubModel(*typed)
    if model.lower().endswith("-gguf"):
        raise ValueError(f"model {model} has GGUF files of several types: name one, as in {model}:Q4_K_M")
    if model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise ValueError(_absent(model, folder))
    return HubModel(model)


def resolve_model(
    model: str,
    revision: str | None = None,
    load_format: LoadFormat = "auto",
    downloads: Downloads = _DEFAULTS,
) -> Path:
    """Return the folder of `model`: "builtin", a folder's path, or a Hugging Face hub id or a URL of an object store,
    which is downloaded. A GGUF file, or the hub's `ID:TYPE`, is returned as a file.

    If `load_format` is "dummy", weights are not downloaded, except for GGUF, which has all in one file.
    """
    source = source_of(model)
    if isinstance(source, LocalFolder):
        return source.path
    with_weights = load_format != "dummy"
    if isinstance(source, ObjectPrefix):
        if revision is not None:
            raise ValueError(f"revision {revision}: {model} has no revisions; give each version a prefix of its own")
        if source.url.endswith(SUFFIX):
            return _fetch_gguf(source.url, downloads)
        return _fetch(source.url, "config.json", with_weights=with_weights, downloads=downloads)
    if source.gguf_type:
        return _download_gguf(source, revision, downloads)
    weights = WEIGHT_FILE_PATTERNS if with_weights else []
    return _download(source.id, revision, CONFIG_FILE_PATTERNS + weights, downloads)


def resolve_model_of(config: EngineConfig) -> Path:
    """Return the folder of the engine's model."""
    return resolve_model(config.model, config.revision, config.load_format, config.downloads)


def resolve_drafter(drafter: SpeculativeConfig, config: EngineConfig) -> Path:
    """Return the folder of `drafter.model`: "builtin" is the built-in model's, others are found as models are; unset,
    it is the model's own."""
    if not drafter.model:
        return resolve_model_of(config)
    if drafter.model == "builtin":
        return builtin_drafter_folder()
    return resolve_model(drafter.model, drafter.revision, config.load_format, config.downloads)


def resolve_tokenizer(config: EngineConfig) -> Path:
    """Return the folder of the tokenizer. A tokenizer of its own is downloaded without weights."""
    if config.tokenizer is None:
        return resolve_model_of(config)
    if isinstance(source := source_of(config.tokenizer), ObjectPrefix) and not source.url.endswith(SUFFIX):
        return _fetch(source.url, "tokenizer.json", with_weights=False, downloads=config.downloads)
    return resolve_model(config.tokenizer, config.revision, "dummy", config.downloads)


def resolve_lora(path: str, downloads: Downloads = _DEFAULTS) -> Path:
    """Return the folder of an adapter: "builtin:NAME" for one of the built-in model, a folder's path, or a Hugging Face
    hub id or an object store's URL, which is downloaded. Raises LoraNotFound."""
    try:
        if store_of(path):
            return _fetch(path, LORA_CONFIG_FILE, with_weights=True, downloads=downloads)
        folder = Path(path).expanduser()
        if path.startswith(BUILTIN_LORA):
            folder = builtin_adapter_folder(path.removeprefix(BUILTIN_LORA))
        if folder.is_dir():
            return folder
        if path.count("/") == 1 and not path.startswith((BUILTIN_LORA, ".", "/", "~")):
            return _download(path, None, [LORA_CONFIG_FILE, LORA_WEIGHTS_FILE], downloads)
    except (ValueError, RuntimeError, OSError) as error:  # also of a path that is too long, or in no user's home
        raise LoraNotFound(str(error)) from error
    raise LoraNotFound(f"there is no adapter at {path}")


def resolve_module(path: str, downloads: Downloads = _DEFAULTS) -> Path:
    """As `resolve_lora`, for an adapter of the configuration: raises ValueError."""
    try:
        return resolve_lora(path, downloads)
    except LoraNotFound as error:
        raise ValueError(f"lora_modules: {error}") from error


def download_model(config: EngineConfig) -> None:
    """Download the model, tokenizer, drafter and adapters of `config` that are on the hub or in an object store. Checks
    no more than that they are there."""
    resolve_model_of(config)
    if config.drafter:
        resolve_drafter(config.drafter, config)
    if not config.skip_tokenizer_init:
        resolve_tokenizer(config)
    for module in config.lora.lora_modules:
        resolve_module(module.path, config.downloads)


def _refuse_url(model: str, scheme: str) -> str:
    if page := _HUB_PAGE.match(model):
        return f"model {model} is a page of the hub: give the id {page[1]}"
    if scheme == "hf":
        return f"model {model} is written as an id of the hub, without {scheme}://"
    if scheme == "file":
        return f"model {model} is written as a folder's path, without {scheme}://"
    return f"model {model} is a URL, which is not supported: download the model and give the folder"


def _model_in(folder: Path) -> Path:
    """The folder itself, or the GGUF file in it if it has no model in another format."""
    if (folder / "config.json").exists() and any(folder.glob("*.safetensors")):
        return folder
    has_gguf = any(folder.glob(f"*{SUFFIX}"))  # not below, which takes long in large folders
    return (choose_file(folder) or folder) if has_gguf else folder


def _absent(model: str, folder: Path) -> str:
    """Name the part of the path that is missing, which shows whether a volume is not mounted or a name misspelt."""
    missing = folder
    while not missing.parent.exists():
        missing = missing.parent
    if missing == folder or not folder.is_absolute():
        return f"model folder {model} does not exist"
    return f"model folder {model} does not exist: {missing.parent} has no {missing.name}"


def _fetch(url: str, needed: str, *, with_weights: bool, downloads: Downloads) -> Path:
    """Return the folder of an object store's files. Imports its library here, because most models need none."""
    from huggingface_hub.constants import HF_HUB_CACHE

    from proa_engine.sources.cached_versions import Selection
    from proa_engine.sources.download_cache import DownloadCache
    from proa_engine.sources.object_store import ObjectFolder

    is_adapter = needed == LORA_CONFIG_FILE  # which is read at once; a model is read again after sleeping
    if is_adapter:
        selection = Selection(needed, [LORA_CONFIG_FILE], [LORA_WEIGHTS_FILE])
    elif needed.endswith(SUFFIX):
        selection = Selection(needed, [], [escape(each.name) for each in parts_of(Path(needed))])
    else:
        selection = Selection(needed, CONFIG_FILE_PATTERNS, WEIGHT_FILE_PATTERNS, INDEX_FILE, with_weights)
    folder = Path(os.path.expanduser(downloads.download_dir or HF_HUB_CACHE))  # that of `Path` raises without a home
    try:
        return DownloadCache(folder, downloads.download_cache_size).fetch(
            ObjectFolder.open(url), selection, until_exit=not is_adapter
        )
    except OSError as error:
        reason = error.strerror or error
        where = f"{error.filename}: " if error.filename else ""  # none of a full disk
        raise ValueError(f"{url} could not be kept in {folder} (download_dir): {where}{reason}") from error


def _fetch_gguf(url: str, downloads: Downloads) -> Path:
    """Return the first file of a model in an object store; `url`: of any of its files."""
    prefix, _, name = url.rpartition("/")
    first = parts_of(Path(name))[0].name
    return _fetch(prefix, first, with_weights=True, downloads=downloads) / first


def _download_gguf(source: HubModel, revision: str | None, downloads: Downloads) -> Path:
    names = patterns_of(source.gguf_type)
    path = choose_file(_download(source.id, revision, names, downloads), names)
    if not path:
        raise ValueError(f"{source.id} has no GGUF file of the type {source.gguf_type} on the hub")
    return path


def _download(model: str, revision: str | None, patterns: list[str], downloads: Downloads) -> Path:
    from proa_engine.sources.hub_download import download

    try:
        return download(model, revision, patterns, downloads.download_dir)
    except Exception as error:  # the library raises those of its HTTP client too, which versions of it change
        raise ValueError(_explain_download(model, revision, error)) from error


def _explain_download(model: str, revision: str | None, error: BaseException) -> str:
    """Return the sentence for an error of `snapshot_download`."""
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    if isinstance(error, LocalEntryNotFoundError) and error.__cause__ is not None:
        error = error.__cause__  # why there is no newer snapshot
    match error:
        case HFValidationError():
            return f"{model} is neither a folder nor a hub id: {error}"
        case GatedRepoError():
            return f"{model} is gated: accept its terms on the hub, and set HF_TOKEN"
        case RepositoryNotFoundError():
            return f"{model} is neither a folder here{_similar(model)} nor on the hub; a private one needs HF_TOKEN"
        case RevisionNotFoundError():
            return f"{model} has no revision {revision} on the hub"
        case HfHubHTTPError() if error.response is not None and error.response.status_code in (401, 403):
            return f"{model} could not be downloaded: the hub refuses the token in HF_TOKEN ({_reason(error)})"
    return (
        f"{model} is not a folder here{_similar(model)} and could not be downloaded from the hub; give a folder, or "
        f"check the network and HF_HUB_OFFLINE: {_reason(error)}"
    )


def _similar(model: str) -> str:
    """A hint at a folder with a similar name."""
    folder = Path(model)
    if not folder.parent.is_dir():
        return ""
    names = [each.name for each in folder.parent.iterdir() if each.is_dir()]
    close = difflib.get_close_matches(folder.name, names, n=1)
    return f" (did you mean the folder {folder.parent / close[0]}?)" if close else ""


def _reason(error: BaseException) -> str:
    """The error's text in one line, without links to pages about HTTP."""
    text = " ".join(str(error).partition("For more information check")[0].split())
    return text.rstrip(".") or type(error).__name__
