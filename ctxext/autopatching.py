"""Extend the models that other programs load: in a ``with`` block, or in a program and all Pythons that it starts.

For the time being ``PreTrainedModel.from_pretrained``, which every model class of Transformers inherits, is another
function: it calls the original and puts the method on what that returns. So are the two ``load_adapter`` of PEFT and
Transformers: they refuse an adapter that was trained under another method. Nowhere else in ctxext is a class changed.

Reached are models that come out of ``from_pretrained``: of the Auto classes, concrete and remote ones, with any dtype,
device map, quantisation or GGUF file, inside PEFT's Auto classes and pipelines. Out of reach are models that were
loaded before, built from a config (``from_config``, ``LlamaForCausalLM(config)``) or unpickled (``torch.load``): use
``ctxext.patch``. Deep copies of an extended model are extended.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal

from ctxext.errors import ConfigError, CtxextError, PatchError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ctxext.methods import Method

_VARIABLE = "CTXEXT_RUN"
_LOCK = threading.Lock()


@contextlib.contextmanager
def autopatch(
    method: Method | Mapping[str, Any] | str | os.PathLike[str], *, replace_scaling: bool = False
) -> Iterator[None]:
    """Extend every supported causal language model that is loaded with ``from_pretrained`` inside the block.

    Each gets a line on stderr: the class, where it is from, the method, and the lengths. Models of other architectures,
    and models without a language-modelling head (rewards, embeddings), are named there and left alone. All causal
    language models count, also a draft for assisted generation, a teacher or a reference model; each is extended from
    its own trained length. A model that is supported and can't be extended is an error where it is loaded.

    The block is for the whole process: models that other threads or forked processes load meanwhile are extended too.
    Processes that are started anew are not reached (``ctxext run`` reaches them). At the end of the block, whatever
    happened in it, ``from_pretrained`` is what it was; the models stay extended (``ctxext.unpatch``).

    Args:
        method: what :func:`ctxext.patching.patch` takes.
        replace_scaling: handed to ``patch``.

    Raises:
        ConfigError: the method's settings are wrong.
        PatchError: another block is open, or the block ended without an exception and without an extended model.
    """
    from transformers import PreTrainedModel

    from ctxext.config import load_method

    method = load_method(method)
    with _record() as (record, file):
        extend = functools.partial(_extend, method=method, replace_scaling=replace_scaling, record=record)
        replacement = _Replacement(PreTrainedModel, extend, _AdapterGuard(method))
        try:
            yield
        finally:
            replacement.remove()
        _require_extended(file.read())


class _Record:
    """A file of what became of models, to which several processes may write."""

    def __init__(self, path: str) -> None:
        self.path = path

    def add(self, fate: Literal["extended", "left alone", "refused"], text: str) -> None:
        """Write it down, and say it on stderr; each in a single piece, so that lines of several processes don't mix."""
        print(f"ctxext: {fate}: {text}\n", end="", file=sys.stderr, flush=True)
        # When the file is gone, whoever wanted to read it has ended.
        with contextlib.suppress(OSError), open(self.path, "ab", opener=_open_existing) as file:
            file.write(json.dumps([fate, text]).encode() + b"\n")


@contextlib.contextmanager
def _record() -> Iterator[tuple[_Record, BinaryIO]]:
    """A new record, and its file opened for reading, which works even when somebody has cleaned up ``/tmp``."""
    with tempfile.TemporaryDirectory(prefix="ctxext-", ignore_cleanup_errors=True) as folder:
        path = os.path.join(folder, "models")
        with open(path, "w+b") as file:
            yield _Record(path), file


def _require_extended(record: bytes) -> None:
    found = [json.loads(line) for line in record.splitlines()]
    if not any(fate == "extended" for fate, _ in found):
        others = "; ".join(f"{fate}: {text}" for fate, text in found) or "none came out of from_pretrained"
        raise PatchError(
            f"no model was extended ({others}); models that were loaded before, built from a config or unpickled are "
            "not reached: use ctxext.patch"
        )


def _open_existing(path: str, flags: int) -> int:
    return os.open(path, flags & ~os.O_CREAT)


class _AdapterGuard:
    """Refuses adapters that were trained under another method than the one that their base model is loaded with.

    For the time being the two ``load_adapter`` through which PEFT and Transformers read them are other functions too.
    """

    def __init__(self, method: Method | Mapping[str, Any]) -> None:
        self._method = method
        self._watched: list[tuple[Any, Any, Any]] = []
        self._lock, self._over = threading.Lock(), False

    def install(self) -> None:
        """Watch, from the first model on: PEFT can't be imported while it imports Transformers itself."""
        if self._watched or importlib.util.find_spec("peft") is None:
            return
        from peft import PeftModel
        from transformers.integrations.peft import PeftAdapterMixin

        owners: tuple[Any, ...] = (PeftModel, PeftAdapterMixin)
        with self._lock:  # other threads load models too, or have left the block while PEFT was imported
            if self._watched or self._over:
                return
            for owner in owners:
                original = vars(owner)["load_adapter"]
                replacement = self._checked(original)
                owner.load_adapter = replacement
                self._watched.append((owner, original, replacement))

    def remove(self) -> None:
        """Put the originals back, where nothing else has taken their place."""
        with self._lock:
            self._over = True
            for owner, original, replacement in self._watched:
                if vars(owner)["load_adapter"] is replacement:
                    owner.load_adapter = original
            self._watched.clear()

    def _checked(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def load_adapter(model: Any, *args: Any, **options: Any) -> Any:
            source = args[0] if args else options.get("model_id", options.get("peft_model_id"))
            if source is not None and self._watched:
                self._check(Path(os.path.expanduser(str(source))))
            return original(model, *args, **options)

        return load_adapter

    def _check(self, folder: Path) -> None:
        """Raise ModelLoadError unless the adapter was trained under the method, or says nothing of any."""
        from ctxext.adapters import RECORD
        from ctxext.config import load_method
        from ctxext.errors import ModelLoadError
        from ctxext.models import load_skeleton

        if (folder / RECORD).is_file():
            method = load_method(self._method)
            load_skeleton(str(folder), method)
            if method.learns:
                raise ModelLoadError(
                    f"the adapter in {folder} was trained with what {method.name} had learned, which the base model "
                    "was loaded without: load both with ctxext.load_model"
                )


class _Replacement(classmethod):  # type: ignore[type-arg]
    """A class's ``from_pretrained`` for a while: calls the original, then ``extend`` with the model and the options."""

    def __init__(
        self, model_class: Any, extend: Callable[[Any, Mapping[str, Any]], None], guard: _AdapterGuard
    ) -> None:
        with _LOCK:
            original = vars(model_class)["from_pretrained"]
            if isinstance(original, _Replacement):
                raise PatchError("models are extended as they are loaded already: autopatch and run can't be nested")

            @functools.wraps(original.__func__)
            def from_pretrained(cls: Any, *args: Any, **options: Any) -> Any:
                wanted = not self._removed
                if wanted:
                    guard.install()
                result = original.__get__(None, cls)(*args, **options)
                if wanted:
                    extend(result[0] if isinstance(result, tuple) else result, options)
                return result

            super().__init__(from_pretrained)
            self._model_class, self._original, self._removed = model_class, original, False
            self._guard = guard
            model_class.from_pretrained = self

    def remove(self) -> None:
        """Put the original back; where another program has wrapped this one since, only pass on to the original."""
        with _LOCK:
            self._removed = True
            self._guard.remove()
            if vars(self._model_class)["from_pretrained"] is self:
                self._model_class.from_pretrained = self._original


def _extend(
    model: Any,
    options: Mapping[str, Any],
    *,
    method: Method | Mapping[str, Any],
    replace_scaling: bool,
    record: _Record,
) -> None:
    """Put the method on a model that was loaded with ``options``, if it is a supported causal language model."""
    from ctxext.config import load_method
    from ctxext.families import FAMILIES
    from ctxext.patching import patch

    name = f"{type(model).__name__} from {_source(model, options)}"
    if model.config.model_type not in FAMILIES:
        record.add("left alone", f"{name}: model_type {model.config.model_type!r} is not supported")
        return
    if not model.can_generate():
        record.add("left alone", f"{name}: not a causal language model")
        return
    try:
        method = load_method(method)
        _check_as_stored(model, method, options)
        previous = _scaling(model.config)
        handle = patch(model, method, replace_scaling=replace_scaling)
    except CtxextError as error:
        record.add("refused", f"{name}: {error}")
        raise
    lengths, kept = handle.method.lengths(handle.spec), handle.config.max_position_embeddings
    text = f"{name} with {handle.method.name}, from {lengths.original} to {lengths.target} tokens"
    # A checkpoint's record has what its config said when it was saved filled in, or it says now.
    if previous not in (None, handle.config.ctxext["method"], method.model_dump(exclude_none=True, mode="json")):
        text += f", in place of {previous['name']}"
    if kept < lengths.target:
        text += f"; its config keeps {kept}: programs that go by it have to be told the length"
    record.add("extended", text)


def _source(model: Any, options: Mapping[str, Any]) -> str:
    """Folder, file or hub id that a model was loaded from."""
    if model.name_or_path in (None, "", "None"):  # Transformers writes the last
        return "a state dict"
    return "/".join(part for part in (model.name_or_path, options.get("subfolder"), options.get("gguf_file")) if part)


def _scaling(config: Any) -> dict[str, Any] | None:
    """The settings of the method that a checkpoint was saved with, or its rope type as a name; None for a plain one."""
    from ctxext.families import extension_record, rope_parameters

    record = extension_record(config)
    if record is not None:
        return dict(record["method"])
    rope_type = rope_parameters(config).get("rope_type", "default")
    return None if rope_type == "default" else {"name": rope_type}


def _check_as_stored(model: Any, method: Method, options: Mapping[str, Any]) -> None:
    """Refuse a model that isn't as its checkpoint says, because a wrong base or trained length would be inferred.

    Raises:
        PatchError: the program has changed the length or the rotary embedding by itself.
        ModelLoadError: the scaling of a GGUF file got lost.
    """
    storage = {key: options[key] for key in ("subfolder", "revision", "cache_dir") if options.get(key) is not None}
    storage["local_files_only"] = True  # it has just been loaded
    file = options.get("gguf_file")
    if file:
        from transformers.utils.hub import cached_file

        from ctxext.models import check_scaling_survived

        path = cached_file(model.name_or_path, file, **storage)
        check_scaling_survived(Path(str(path)), model.config)
        storage["gguf_file"] = file
    try:
        settings, _ = type(model.config).get_config_dict(model.name_or_path, **storage)
    except OSError:  # weights without a config: the program's own is all there is
        return
    if settings.get("model_type") != model.config.model_type:  # a part of a larger model
        return
    stored = type(model.config).from_dict(settings)
    keys = ["rope_parameters"]
    if method.original_max_position_embeddings is None:
        keys.append("max_position_embeddings")
    for key in keys:
        given, original = getattr(model.config, key, None), getattr(stored, key, None)
        if given != original:
            raise PatchError(f"the program sets {key} to {given} (checkpoint: {original}); leave that to ctxext")


def run_program(command: Sequence[str], method: Method, *, replace_scaling: bool = False) -> int:
    """Run a program as from a shell; models that it or a Python under it loads are extended as by :func:`autopatch`.

    Pythons find a ``sitecustomize`` on PYTHONPATH; their own is run too. Not reached are other machines, and Pythons
    that ignore PYTHONPATH (``python -I``, ``-E``), don't run ``site`` (``-S``) or don't inherit the environment.

    Args:
        command: a script (``.py``, or a folder or zip file that Python runs) or Python's own options (``-m module``)
            with arguments; or another program, first looked for beside this Python.
        method: a method of ctxext's own.
        replace_scaling: handed to ``patch``.

    Returns:
        The program's exit status; 128 and the signal's number if a signal ended it.

    Raises:
        ConfigError: the program can't be found or started.
        PatchError: the program succeeded, and no model was extended.
    """
    if _VARIABLE in os.environ:
        raise ConfigError("ctxext run can't be nested: the program is run by one already")
    arguments = _arguments(command)
    paths = [str(Path(__file__).resolve().parent / "startup"), os.environ.get("PYTHONPATH")]
    with _record() as (record, file):
        settings = {
            "method": method.model_dump(mode="json", exclude_none=True),
            "replace_scaling": replace_scaling,
            "record": record.path,
        }
        environment = {
            **os.environ,
            _VARIABLE: json.dumps(settings),
            "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        }
        status = _call(arguments, environment)
        if status == 0:
            _require_extended(file.read())
    return status


def start(model_class: type[PreTrainedModel], settings: str) -> None:
    """Extend all models that this process loads, as :func:`run_program` asks in the environment."""
    given = json.loads(settings)
    given["record"] = _Record(given["record"])
    _Replacement(model_class, functools.partial(_extend, **given), _AdapterGuard(given["method"]))


def _arguments(command: Sequence[str]) -> list[str]:
    program, *rest = command
    if program.startswith("-") or program.endswith((".py", ".pyz")) or os.path.isdir(program):
        return [sys.executable, program, *rest]
    places = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])
    found = shutil.which(program, path=places)
    if found is None:
        raise ConfigError(
            f"{program}: no such program, or not executable; give a script (script.py), a module (-m module) or a "
            "command, with its arguments, after '--'"
        )
    return [found, *rest]


def _call(arguments: list[str], environment: Mapping[str, str]) -> int:
    """Run a process to its end, passing on the signals that only this one gets."""
    process: subprocess.Popen[bytes] | None = None

    def forward(number: int, frame: Any) -> None:
        # An interrupt from the keyboard reaches all processes of the terminal by itself.
        if process is not None and number != signal.SIGINT:
            process.send_signal(number)

    names = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")
    numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]
    # One that is ignored (nohup) stays so, for the program too.
    heeded = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    previous = {number: signal.signal(number, forward) for number in heeded}
    try:
        process = subprocess.Popen(arguments, env=environment)
        status = process.wait()
    except OSError as error:
        raise ConfigError(f"{arguments[0]}: can't be started: {error.strerror}") from None
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    return status if status >= 0 else 128 - status
