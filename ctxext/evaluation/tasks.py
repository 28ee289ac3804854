"""The evaluations by name: from a section of the configuration to the record of a run.

``ctxext eval`` runs one of them on one model, ``ctxext eval compare`` several on several methods.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from ctxext.aliases import ALIASES
from ctxext.data import Document, dataset_id, load_documents
from ctxext.errors import ConfigError
from ctxext.evaluation import longppl, passkey, perplexity, positions, ruler
from ctxext.evaluation.haystack import Filler, text_filler
from ctxext.evaluation.keysets import read_keys
from ctxext.evaluation.results import result_record, run_settings
from ctxext.evaluation.ruler_tasks import TASKS as RULER_TASKS
from ctxext.evaluation.runs import Run
from ctxext.inspection import inspect
from ctxext.models import model_id

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ctxext.config import (
        Config,
        LongPPLSection,
        PasskeySection,
        PerplexitySection,
        PositionsSection,
        RulerSection,
    )

Progress = Callable[[int, int], None]

FILLER_CHARACTERS_PER_TOKEN = 16
"""More text than this for each token of the longest prompt is not read from a data set of filler."""


class Prepared(NamedTuple):
    """An evaluation whose arguments have been checked and whose data has been found; only the model is missing."""

    evaluate: Callable[[Any, Any, Run, Progress | None], Any]
    dataset: str | None
    seed: int | None
    unit: str


def prepare(task: str, configuration: Config) -> Prepared:
    """Check the arguments of ``task``, and find its data.

    Raises:
        ConfigError: arguments that the evaluation would not accept.
        DataError: data that isn't there.
    """
    return _PREPARE[task](getattr(configuration, task))


def measure(
    task: str,
    prepared: Prepared,
    configuration: Config,
    model: Any,
    tokenizer: Any,
    run: Run | None = None,
    progress: Progress | None = None,
) -> tuple[dict[str, Any], Any]:
    """Run ``task`` on a loaded and patched model: the record, as results.json holds it, and the result itself.

    ``run`` is begun and finished here.
    """
    settings = configuration.model
    assert settings is not None  # who loaded the model has checked
    run = run or Run()
    resolved = shown(configuration.resolved("model", "method", task))
    patch = inspect(model).summary()
    about: dict[str, Any] = {
        "model": model,
        "model_id": model_id(settings.name),
        "revision": settings.revision,
        "tokenizer": tokenizer,
        "method": resolved["method"] or patch["method"],  # the latter where the checkpoint or adapter brings its own
        "patch": patch,
    }
    section = resolved[task]
    asked = {"bos": section["bos"], "answers": section.get("answers"), "dataset_id": prepared.dataset}
    try:
        run.begin(run_settings(task, **asked, **about))
        result = prepared.evaluate(model, tokenizer, run, progress)
        record = result_record(
            task,
            result,
            dataset_id=prepared.dataset,
            configuration=resolved,
            seed=prepared.seed,
            reused=run.reused,
            **about,
        )
        run.finish(record, result.parts)
    except Exception as error:
        run.abandon(error)
        raise
    finally:
        run.close()
    return record, result


def shown(resolved: dict[str, Any]) -> dict[str, Any]:
    """Sections of a configuration as result files show them: no folder of this machine, and short names pinned."""
    if "model" in resolved:
        resolved["model"]["name"] = model_id(resolved["model"]["name"])
    search = resolved.get("search", {})
    for section in (*(resolved[name] for name in _PREPARE if name in resolved), *map(search.get, ("text", "held_out"))):
        for key in ("dataset", "filler", "keys"):
            if section is not None and section.get(key) is not None:
                section[key] = model_id(section[key])
        if section is not None and section.get("dataset") in ALIASES:
            section["dataset_revision"] = section["dataset_revision"] or ALIASES[section["dataset"]].revision
    return resolved


def perplexity_arguments(section: PerplexitySection) -> dict[str, Any]:
    """The section as ``perplexity.check_arguments`` and ``evaluate_perplexity`` take it."""
    return {
        "protocol": section.protocol,
        "lengths": section.length,
        "windows": section.window,
        "stride": section.stride,
        "targets": section.targets,
        "max_documents": section.max_documents,
        "max_tokens": section.max_tokens,
        "min_tokens": section.min_tokens,
        "batch_size": section.batch_size,
    }


def _perplexity(section: PerplexitySection) -> Prepared:
    arguments = perplexity_arguments(section)
    perplexity.check_arguments(**arguments)
    documents = _Documents(section)

    def evaluate(model: Any, tokenizer: Any, run: Run, progress: Progress | None) -> perplexity.PerplexityResult:
        return perplexity.evaluate_perplexity(
            model,
            tokenizer,
            documents.read(),
            **arguments,
            bos=section.bos,
            mode=section.mode,
            run=run,
            progress=progress,
        )

    return Prepared(evaluate, dataset_id(section.dataset, revision=section.dataset_revision), None, "tokens")


def _positions(section: PositionsSection) -> Prepared:
    if section.length is None:
        raise ConfigError("length: none given; give the number of positions (--length)")
    length = section.length
    documents = _Documents(section)

    def evaluate(model: Any, tokenizer: Any, run: Run, progress: Progress | None) -> positions.PositionsResult:
        return positions.evaluate_positions(
            model,
            tokenizer,
            documents.read(),
            length=length,
            trained=inspect(model).original_max_position_embeddings,
            max_documents=section.max_documents,
            batch_size=section.batch_size,
            bos=section.bos,
            run=run,
            progress=progress,
        )

    return Prepared(evaluate, dataset_id(section.dataset, revision=section.dataset_revision), None, "tokens")


def _passkey(section: PasskeySection) -> Prepared:
    arguments: dict[str, Any] = {
        "lengths": section.length,
        "depths": section.depth,
        "trials": section.trials,
        "batch_size": section.batch_size,
        "distractors": section.distractors,
        "controls": section.controls,
    }
    passkey.check_arguments(**arguments)
    filler = None if section.filler is None else _filler(section.filler, max(section.length))

    def evaluate(model: Any, tokenizer: Any, run: Run, progress: Progress | None) -> passkey.PasskeyResult:
        more: dict[str, Any] = {"seed": section.seed, "bos": section.bos, "answers": section.answers, "filler": filler}
        return passkey.evaluate_passkey(model, tokenizer, **arguments, **more, run=run, progress=progress)

    return Prepared(evaluate, None, section.seed, "prompts")


def _ruler(section: RulerSection) -> Prepared:
    arguments: dict[str, Any] = {
        "lengths": section.length,
        "tasks": section.task or tuple(RULER_TASKS),
        "trials": section.trials,
        "seed": section.seed,
        "batch_size": section.batch_size,
    }
    ruler.check_arguments(**arguments)

    def evaluate(model: Any, tokenizer: Any, run: Run, progress: Progress | None) -> ruler.RulerResult:
        more: dict[str, Any] = {"bos": section.bos, "answers": section.answers}
        return ruler.evaluate_ruler(model, tokenizer, **arguments, **more, run=run, progress=progress)

    return Prepared(evaluate, None, section.seed, "prompts")


def _longppl(section: LongPPLSection) -> Prepared:
    if section.length is None:
        raise ConfigError("length: none given; give the number of positions (--length)")
    keys = None if section.keys is None else read_keys(section.keys)
    arguments: dict[str, Any] = {
        "length": section.length,
        "keys": keys,
        "short": section.short,
        "stride": section.stride,
        "alpha": section.alpha,
        "beta": section.beta,
        "overlap": section.overlap,
    }
    longppl.check_arguments(**arguments)
    documents = _Documents(section)

    def evaluate(model: Any, tokenizer: Any, run: Run, progress: Progress | None) -> longppl.LongPPLResult:
        more: dict[str, Any] = {
            "max_documents": section.max_documents,
            "min_tokens": section.min_tokens,
            "batch_size": section.batch_size,
            "bos": section.bos,
        }
        return longppl.evaluate_longppl(
            model, tokenizer, documents.read(), **arguments, **more, run=run, progress=progress
        )

    return Prepared(evaluate, dataset_id(section.dataset, revision=section.dataset_revision), None, "tokens")


_PREPARE: dict[str, Callable[[Any], Prepared]] = {
    "perplexity": _perplexity,
    "positions": _positions,
    "passkey": _passkey,
    "ruler": _ruler,
    "longppl": _longppl,
}


def section_documents(section: Any, dataset: str, *, for_training: bool = False) -> Iterator[Document]:
    """The documents of ``dataset`` as a section with text reads them; arguments and errors of ``load_documents``."""
    return load_documents(
        dataset,
        config_name=section.config_name,
        split=section.split,
        text_column=section.text_column,
        revision=section.dataset_revision,
        for_training=for_training,
    )


class _Documents:
    """The documents of a section, found at once, read as often as they are wanted."""

    def __init__(self, section: PerplexitySection | PositionsSection | LongPPLSection) -> None:
        self._section = section
        self._found: Iterator[Document] | None = self._load()

    def read(self) -> Iterator[Document]:
        found, self._found = self._found or self._load(), None
        return found

    def _load(self) -> Iterator[Document]:
        return section_documents(self._section, self._section.dataset)


def _filler(dataset: str, longest: int) -> Filler:
    """As much text of a data set as the longest prompt can hold, as filler."""
    room = FILLER_CHARACTERS_PER_TOKEN * longest
    texts: list[str] = []
    for document in load_documents(dataset):
        texts.append(document.text[:room])
        room -= len(texts[-1])
        if room <= 0:
            break
    return text_filler(dataset_id(dataset), "\n\n".join(texts))
