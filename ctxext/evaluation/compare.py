"""Several methods on one checkpoint: the same questions to each, differences to the plain model, and how sure they are.

What is asked is decided by the tasks (tasks.py); pictures and tables are made elsewhere.
"""

from __future__ import annotations

import gc
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ctxext.errors import ConfigError, CtxextError, PatchError
from ctxext.evaluation.longppl import LongPPLResult, paired
from ctxext.evaluation.passkey import is_control
from ctxext.evaluation.positions import curve, default_edges
from ctxext.evaluation.records import TokenLosses, within
from ctxext.evaluation.runs import Run
from ctxext.evaluation.statistics import Estimate, clustered_mean, exponential, holm, paired_proportions
from ctxext.evaluation.tasks import Prepared, Progress, measure
from ctxext.folder import FolderError
from ctxext.inspection import inspect
from ctxext.patching import active_patch, patch, unwrap

if TYPE_CHECKING:
    from ctxext.config import Config
    from ctxext.methods import Method

PLAIN = "plain"
"""The label of the model without a method, which every comparison has."""
PROBE_TOKENS = 64
CHANGES = ("short", "long", "longppl_change", "passkey_change", "ruler_change")
"""What is compared with the plain model: the names of differences in a summary."""
SCHEMA_VERSION = 2
NOISE = {"float32": 1e-4}
"""Mean losses that differ by less, in nats, are the same: kernels round differently. By dtype; 1e-3 for 16-bit ones."""


@dataclass
class Entry:
    """One method: the records of its tasks by name, or why there are none.

    ``losses`` are those of its perplexity by length or window, or of its positions where perplexity isn't asked for;
    ``key_losses`` is LongPPL's result.
    """

    label: str
    method: Method | None
    records: dict[str, dict[str, Any]] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    losses: dict[int, list[TokenLosses]] = field(default_factory=dict, repr=False)
    key_losses: LongPPLResult | None = field(default=None, repr=False)


class NothingChangedError(PatchError):
    """A method whose rotations are the plain model's, so that it can't be what was meant."""


class Bench:
    """A loaded model that methods are put on in turn; between them it must be what it was, to the bit."""

    def __init__(self, model: Any, *, replace_scaling: bool = False) -> None:
        """A method that is on is taken off, and not put back. Raises ConfigError for a model with an adapter."""
        if any(hasattr(module, "peft_config") for module in (model, unwrap(model))):
            raise ConfigError(
                "an adapter is made for the method that it was trained under, so methods can't be compared on it: "
                "evaluate it by itself"
            )
        if (own := active_patch(unwrap(model))) is not None:
            own.remove()
        self.model, self._replace_scaling = model, replace_scaling
        self._baseline, self._fingerprint = _probe(model), inspect(model).fingerprint

    @contextmanager
    def extended(self, label: str, method: Method | None) -> Iterator[None]:
        """The model with ``method`` on it (None: plain), checked to act, and taken off at the end.

        Raises:
            CtxextError: the method doesn't fit the model.
            NothingChangedError: it changes nothing.
            PatchError: at the end, the model isn't what it was.
        """
        handle = None if method is None else patch(self.model, method, replace_scaling=self._replace_scaling)
        with handle or nullcontext():
            if handle is not None and inspect(self.model).fingerprint == self._fingerprint:
                raise NothingChangedError(f"{label}: the method changes nothing: its rotations are the plain model's")
            yield
        if not torch.equal(_probe(self.model), self._baseline):
            raise PatchError(f"after {label} the plain model's logits are not what they were: results would be wrong")


def compare(
    model: Any,
    tokenizer: Any,
    methods: Mapping[str, Method | None],
    tasks: Mapping[str, Prepared],
    configuration: Config,
    *,
    folder: Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    with_plain: bool = True,
    progress: Callable[[str, str, Prepared], Any] | None = None,
) -> list[Entry]:
    """Run ``tasks`` on the plain model and on each of ``methods``, one after the other, on weights loaded once.

    Each method is put on, checked to act, and taken off; after it, and before the next, the plain model's logits must
    be what they were, to the bit. A method that doesn't fit the model, or a task that runs out of memory, is an entry
    with the reason, and the rest goes on.

    Args:
        model: a loaded model; a method that is on is taken off, and not put back.
        tokenizer: the model's.
        methods: by label; None is the plain model, which comes first.
        tasks: evaluations by name.
        configuration: what the tasks were prepared from.
        folder: for the runs, one each in ``<label>/<task>``.
        resume: go on with runs that are there.
        overwrite: start again.
        with_plain: measure the plain model even if it isn't among ``methods``.
        progress: called with label, task and evaluation before each; a context manager that gives a callback.

    Raises:
        ConfigError: labels that can't be told apart, or another method under the label of the plain model; or the
            model has an adapter.
        PatchError: a method that changes nothing, or a plain model that isn't what it was.
    """
    _check_labels(methods)
    bench = Bench(model, replace_scaling=_replaces(configuration))
    first: dict[str, Method | None] = {PLAIN: None} if with_plain or PLAIN in methods else {}
    entries = []
    for label, method in {**first, **{label: m for label, m in methods.items() if m is not None}}.items():
        entry = Entry(label, method)
        entries.append(entry)
        with ExitStack() as stack:
            try:
                stack.enter_context(bench.extended(label, method))
            except NothingChangedError:
                raise
            except CtxextError as error:
                entry.reasons = dict.fromkeys(tasks, str(error))
                continue
            for task in tasks:
                place = None if folder is None else folder / _slug(label) / task
                run = Run(place, resume=resume and place is not None, overwrite=overwrite and place is not None)
                with progress(label, task, tasks[task]) if progress is not None else nullcontext() as bar:
                    _measure(entry, task, tasks, replace(configuration, method=method), model, tokenizer, run, bar)
    return entries


def summary(entries: Sequence[Entry], trained: int) -> dict[str, Any]:
    """The comparison as JSON-ready values: a row for each entry, with paired differences to the plain model.

    ``short`` is the difference in mean loss (nats a token) on the tokens within the trained length, ``long`` on all
    those that were scored, ``longppl_change`` on LongPPL's key tokens, each with its 95 % interval over documents (None
    for one) and a p value. ``passkey_change`` and ``ruler_change`` are the differences in the share of right answers,
    one for each length; with several passkeys at one depth, depths are what is counted. Each p value is also given by
    Holm's method over the methods and lengths of its kind, except for losses that differ by no more than kernels round.
    ``failures`` says how many prompts failed and how the first did; where one failed in either of two, their answers
    aren't tested. ``tasks`` holds what was asked: protocol and text.
    """
    plain = entries[0]
    for task in {task for entry in entries for task in entry.records}:
        check_comparable([entry.records[task] for entry in entries if task in entry.records])
    rows = []
    for entry in entries:
        row: dict[str, Any] = {
            "label": entry.label,
            "method": None if entry.method is None else entry.method.model_dump(mode="json", exclude_none=True),
            "reasons": entry.reasons,
        }
        for task, record in entry.records.items():
            row[task] = {key: record[key] for key in ("rows", "by_length", "summary") if key in record}
            row[task]["wall_seconds"] = record["provenance"]["wall_seconds"]
            row[task]["peak_memory_bytes"] = record["provenance"]["peak_memory_bytes"]
            row[task]["errors"] = record["counts"].get("errors", 0)
        row["failures"] = {task: failed for task, record in entry.records.items() if (failed := _failures(record))}
        if entry.losses:
            row["curve"] = _curve(_longest(entry), trained)
        if entry is not plain:
            row |= _differences(entry, plain, trained)
        rows.append(row)
    dtypes = {record["provenance"]["dtype"] for entry in entries for record in entry.records.values()}
    noise = max((NOISE.get(dtype, 1e-3) for dtype in dtypes), default=1e-3)
    for name in CHANGES:
        changes = list(itertools.chain(*(_as_list(row.get(name)) for row in rows)))
        # However regular the rounding of kernels is, it is no finding.
        rounding = noise if name in ("short", "long", "longppl_change") else 0
        tested = [change for change in changes if change["p"] is not None and abs(change["difference"]) >= rounding]
        for difference, p in zip(tested, holm([difference["p"] for difference in tested]), strict=True):
            difference["p_holm"] = p
    return {
        "schema_version": SCHEMA_VERSION,
        "trained": trained,
        "noise_floor_nll": noise,
        "tasks": _asked(entries),
        "entries": rows,
    }


def check_comparable(records: Sequence[Mapping[str, Any]]) -> None:
    """Raise ConfigError unless results of one task were made with the same protocol on the same text and tokens."""
    for key in ("protocol", "dataset", "tokenizer"):
        first, *rest = (record.get(key) or record["provenance"].get(key) for record in records)
        for other in rest:
            if other != first:
                raise ConfigError(f"results of {records[0]['task']} can't be compared: their {key} differs")


def _measure(
    entry: Entry,
    task: str,
    tasks: Mapping[str, Prepared],
    configuration: Config,
    model: Any,
    tokenizer: Any,
    run: Run,
    bar: Progress | None,
) -> None:
    """The record of one task, or the reason why there is none."""
    try:
        record, result = measure(task, tasks[task], configuration, model, tokenizer, run, bar)
    except (CtxextError, RuntimeError, MemoryError) as error:  # torch's out-of-memory errors are RuntimeErrors
        if isinstance(error, FolderError):  # which concerns all methods alike
            raise
        entry.reasons[task] = " ".join(str(error).split()) or type(error).__name__
        run.close()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return
    entry.records[task] = record
    if task == "perplexity":
        entry.losses = result.losses
    elif task == "positions" and "perplexity" not in tasks:
        entry.losses = {record["protocol"]["length"]: result.losses}
    elif task == "longppl":
        entry.key_losses = result


@torch.no_grad()
def _probe(model: nn.Module) -> Tensor:
    """Logits of a short input."""
    base = unwrap(model)
    vocabulary = int(base.get_output_embeddings().weight.shape[0])
    ids = torch.arange(1, PROBE_TOKENS + 1) * 7919 % vocabulary
    logits: Tensor = base(input_ids=ids[None].to(base.device), use_cache=False).logits.clone()
    return logits


def _replaces(configuration: Config) -> bool:
    return configuration.model is not None and configuration.model.replace_scaling


def _slug(label: str) -> str:
    return re.sub(r"[^\w.]+", "-", label).strip("-.").lower() or "method"


def _check_labels(methods: Mapping[str, Method | None]) -> None:
    if methods.get(PLAIN) is not None:
        raise ConfigError(f"the label {PLAIN!r} is the plain model's: give method {methods[PLAIN]!r} another")
    slugs: dict[str, str] = {}
    for label in methods:
        other = slugs.setdefault(_slug(label), label)
        if other != label:
            raise ConfigError(f"labels {other!r} and {label!r} would have one folder: tell them apart by letters")


def _longest(entry: Entry) -> list[TokenLosses]:
    return entry.losses[max(entry.losses)]


def _curve(records: Sequence[TokenLosses], trained: int) -> list[dict[str, Any]]:
    """Loss by position."""
    longest = 1 + max(int(record.context.max()) for record in records if len(record))
    edges = sorted({*default_edges(longest), *([trained] if trained < longest else [])})
    return curve(records, edges)


def _differences(entry: Entry, plain: Entry, trained: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if entry.losses and plain.losses:
        ours, theirs = _longest(entry), _longest(plain)
        found["short"] = _difference(within(ours, 0, trained), within(theirs, 0, trained))
        found["long"] = _difference(ours, theirs)
    if entry.key_losses is not None and plain.key_losses is not None and plain.key_losses.rows[0]["tokens"]:
        found["longppl_change"] = _as_difference(paired(entry.key_losses, plain.key_losses))
    for task in ("passkey", "ruler"):
        if task in entry.records and task in plain.records:
            found[f"{task}_change"] = _answered(entry.records[task], plain.records[task])
    return found


def _difference(ours: Sequence[TokenLosses], theirs: Sequence[TokenLosses]) -> dict[str, Any] | None:
    """Mean difference in loss on the same tokens of the same documents."""
    sums, tokens = [], []
    for one, other in zip(ours, theirs, strict=True):
        if one.document != other.document or not (one.token == other.token).all():
            raise ConfigError("losses of different tokens can't be compared: the methods read other documents")
        if len(one):
            sums.append(float((one.loss.astype(float) - other.loss.astype(float)).sum()))
            tokens.append(len(one))
    if not sums:
        return None
    return {**_as_difference(clustered_mean(sums, tokens)), "documents_better": sum(total < 0 for total in sums)}


def _as_difference(estimate: Estimate) -> dict[str, Any]:
    return {
        "difference": estimate.value,
        "ratio": exponential(estimate.value),
        "ci95": estimate.ci95,
        "p": estimate.p,
        "documents": estimate.clusters,
    }


def _answered(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The difference in right answers to the same prompts, by length; not for lengths at which a prompt failed."""
    others = {sample["id"]: sample for sample in theirs["samples"]}
    asked: dict[int, list[tuple[Mapping[str, Any], Mapping[str, Any]]]] = {}
    for sample in ours["samples"]:
        if not is_control(sample):
            asked.setdefault(sample["length"], []).append((sample, others[sample["id"]]))
    changes = []
    for length, pairs in sorted(asked.items()):
        if any(sample["error"] is not None for pair in pairs for sample in pair):
            continue
        here, there = ([bool(sample["correct"]) for sample in side] for side in zip(*pairs, strict=True))
        # Keys at one depth are found or lost together; other tasks have a text of their own for each prompt.
        groups = [sample["depth"] for sample, _ in pairs] if ours["task"] == "passkey" else None
        compared = paired_proportions(here, there, groups)
        change = {"length": length, "difference": compared.difference, "ci95": list(compared.ci95), "p": compared.p}
        change |= {"only_here": compared.first_only, "only_plain": compared.second_only}
        changes.append(change | {"trials": compared.trials, "groups": compared.groups})
    return changes


def _failures(record: Mapping[str, Any]) -> str | None:
    errors = [sample["error"] for sample in record.get("samples", []) if sample["error"] is not None]
    if not errors:
        return None
    return f"{len(errors)} of {len(record['samples'])} prompts failed, and count as wrong; the first: {errors[0]}"


def _asked(entries: Sequence[Entry]) -> dict[str, Any]:
    """Protocol, text and number of documents of each task, which are the same for all methods."""
    tasks: dict[str, Any] = {}
    for entry in entries:
        for task, record in entry.records.items():
            tasks.setdefault(task, {"protocol": record["protocol"], "dataset": record.get("dataset")})
    return tasks


def _as_list(change: Any) -> list[dict[str, Any]]:
    return change if isinstance(change, list) else [] if change is None else [change]
