"""A search from a configuration: defaults, what the sampler proposes, and a comparison on held-out text."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from ctxext.config import Config, PerplexitySection, parse_inner_method
from ctxext.data import dataset_id, fingerprint, require_disjoint
from ctxext.errors import ConfigError, CtxextError
from ctxext.evaluation.compare import NOISE, Bench, Entry, compare
from ctxext.evaluation.results import result_record, run_settings
from ctxext.evaluation.runs import RESULTS, Run
from ctxext.evaluation.scoring import peak_memory
from ctxext.evaluation.tasks import Prepared, Progress, shown
from ctxext.families import trained_rope
from ctxext.files import plain, write_bytes, write_json
from ctxext.folder import SETTINGS, RunFolder
from ctxext.inspection import inspect
from ctxext.methods import NTK, PI, LongRoPE, Method, YaRN
from ctxext.models import model_id
from ctxext.patching import unwrap
from ctxext.processes import process_count
from ctxext.rope import RopeSpec, default_inv_freq
from ctxext.search.objective import PARTS, Sums, Texts, objective, parts, read, read_texts, sums
from ctxext.search.space import PLAIN, Fixed, Space, parse_spaces
from ctxext.search.trials import JOURNAL, METHOD, Proposal, TrialLog, fixed, is_behind, optuna, propose, searched
from ctxext.search.verdict import comparison

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

    from ctxext.config import SearchSection

HELD_OUT, BEST = "held-out", "best.yaml"
_WRITTEN = (RESULTS, "table.md", "search.png", BEST, "config.yaml", JOURNAL, f"{JOURNAL}.lock", SETTINGS)
_UNFINISHED = tuple(f".{name}.????????.tmp" for name in _WRITTEN)

Report = Callable[[Mapping[str, Any], int], None]
"""Called with the row of each finished trial, and how many trials there will be."""


@dataclass(frozen=True)
class SearchResult:
    """A row for each trial, the comparison on held-out text, and what is needed to repeat them."""

    rows: list[dict[str, Any]]
    summary: dict[str, Any]
    protocol: dict[str, Any]
    counts: dict[str, int]
    document_ids: list[str]
    dataset_fingerprint: str
    wall_seconds: float
    peak_memory_bytes: int | None


@dataclass(frozen=True)
class Start:
    """A setting that is tried before the sampler is asked: a method's defaults, or another method's divisors."""

    title: str
    proposal: Proposal
    is_default: bool = True


def check(configuration: Config) -> None:
    """Raise ConfigError for a search that can't be run; needs no model."""
    section = configuration.search
    if configuration.method is not None:
        raise ConfigError("a search takes its methods from the section search.methods: leave 'method' out")
    if section.target is None:
        raise ConfigError("no target; give --target, or search.target in the file")
    if not section.methods:
        raise ConfigError(
            "nothing to search; give search.methods in the file, e.g. yarn: {beta_fast: {low: 8, high: 64}}"
        )
    for name in ("text", "held_out"):
        lengths = getattr(section, name).length
        if lengths and max(lengths) > section.target:
            raise ConfigError(
                f"search.{name}.length: {max(lengths)} is beyond the target {section.target}; raise that, or read less"
            )
        if min((section.target, *lengths)) <= section.last:
            raise ConfigError(
                f"search.last: {section.last} tokens don't stand before a length of {min((section.target, *lengths))}"
            )
    if section.text.seed == section.held_out.seed:
        raise ConfigError(
            f"search.held_out.seed: {section.held_out.seed} is that of the search's own keys; give another"
        )
    if process_count() > 1:
        raise ConfigError("a search runs in one process: start it without torchrun or accelerate launch")
    optuna()


def search(
    configuration: Config,
    output: Path,
    load: Callable[[], tuple[Any, Any]],
    *,
    resume: bool = False,
    overwrite: bool = False,
    dry_run: Callable[[str, Prepared, Any, Any], None] | None = None,
    report: Report | None = None,
    progress: Callable[[str], Any] | None = None,
) -> dict[str, Any] | None:
    """Search as section ``search`` says, and compare the best setting with the defaults on held-out text.

    Args:
        configuration: with the sections ``model`` and ``search``.
        output: folder of the search: its trials, the runs on held-out text, and the result.
        load: gives model and tokenizer; the plain model.
        resume: go on with the search in the folder; asked for more trials, it runs those.
        overwrite: throw it away.
        dry_run: called with a title, a reading, model and tokenizer for each kind of reading; nothing is run then.
        report: called with the row of each trial.
        progress: called with a title before each reading; a context manager that gives a callback for the tokens read.

    Returns:
        The record, as results.json holds it; None of a dry run.

    Raises:
        CtxextError: settings, data, model or folder can't be used, or no setting could be measured.
    """
    check(configuration)
    if dry_run is not None:
        model, tokenizer = load()
        for title, prepared in _Search(configuration, output, model, tokenizer, progress).readings():
            dry_run(title, prepared, model, tokenizer)
        return None
    claim = RunFolder(
        output, "search", resume=resume, overwrite=overwrite, begun=_begun, clear=_clear, unfinished=_UNFINISHED
    )
    model, tokenizer = load()
    job = _Search(configuration, output, model, tokenizer, progress)
    try:
        claim.begin(job.settings())
        job.run(report)
        record = job.finish()
        _write(record, output)
    finally:
        claim.close()
    return record


class _Search:
    """One search on a loaded model."""

    def __init__(
        self,
        configuration: Config,
        output: Path,
        model: Any,
        tokenizer: Any,
        progress: Callable[[str], Any] | None,
    ) -> None:
        self._configuration, self._output, self._progress = configuration, output, progress
        self._model, self._tokenizer = model, tokenizer
        self._section: SearchSection = configuration.search
        assert self._section.target is not None  # check() has seen to it
        self._target = self._section.target
        assert configuration.model is not None
        scaled = configuration.model.replace_scaling
        self._bench = Bench(model, replace_scaling=scaled)
        self._spec = trained_rope(unwrap(model).config, PI(), replace_scaling=scaled)
        self._trained = self._spec.original_max_position_embeddings
        if self._target <= self._trained:
            raise ConfigError(f"search.target: {self._target} is within the trained length {self._trained}; raise it")
        self._texts, self._held_out = (self._read_texts(name) for name in ("text", "held_out"))
        require_disjoint(
            self._texts.originals,
            self._held_out.originals,
            names="search.text and search.held_out (see skip_documents)",
        )
        spaces = parse_spaces(self._section.methods)
        self._spaces = {label: space for label, space in spaces.items() if space is not None}
        self._frequencies = self._spec.rotary_dim // 2
        self._starts = list(self._find_starts(plain_too=PLAIN in spaces))
        if self._section.trials < len(self._starts):
            raise ConfigError(
                f"search.trials: {self._section.trials} are fewer than the {len(self._starts)} settings that are tried "
                "first; raise it"
            )
        if self._section.sampler == "gp":
            self._check_gp()
        self._log: TrialLog | None = None

    def _check_gp(self) -> None:
        """Optuna's Gaussian process sees only parameters that every trial has, and draws the others at random."""
        unseen = [start.title for start in self._starts if not start.proposal.distributions]
        several = len(searched(self._spaces)) > 1
        if unseen or several:
            why = "search one method" if several else f"{unseen[0]} is not a setting that the ranges hold"
            raise ConfigError(
                f"search.sampler: gp needs a single method whose defaults lie within its ranges ({why}); give tpe"
            )

    def settings(self) -> dict[str, Any]:
        """All that decides what comes of the search, except for how long it goes on."""
        configuration, section = self._configuration, self._section
        source = configuration.model
        assert source is not None
        resolved = section.model_dump(mode="json", exclude={"trials", "minutes"})
        for name in ("text", "held_out"):
            resolved[name]["dataset"] = dataset_id(resolved[name]["dataset"])
        return {
            **run_settings(
                "search",
                model=self._model,
                model_id=model_id(source.name),
                revision=source.revision,
                tokenizer=self._tokenizer,
                bos=section.text.bos,
                answers=None,
                dataset_id=self._texts.name,
                method=None,
                patch=inspect(self._model).summary(),
            ),
            "search": resolved,
            "order": list(section.methods),
            "texts": {
                name: fingerprint(text.document for text in texts.keyed)
                for name, texts in (("text", self._texts), ("held_out", self._held_out))
            },
            "optuna": optuna().__version__,
        }

    def readings(self) -> Iterator[tuple[str, Prepared]]:
        """What is read for each trial, and for each setting in the end."""
        yield (
            f"a trial ({len(self._starts)} settings first, {self._section.trials} at most)",
            self._reading(self._texts),
        )
        yield "held-out text (the best setting and each of the defaults)", self._reading(self._held_out)

    def _reading(self, texts: Texts) -> Prepared:
        def evaluate(model: Any, tokenizer: Any, run: Run, progress: Progress | None) -> Any:
            return read(model, tokenizer, texts, run=run, progress=progress)

        return Prepared(evaluate, texts.name, None, "tokens")

    def run(self, report: Report | None) -> None:
        """Run the trials that are missing."""
        section, self._log = self._section, TrialLog(self._output)
        done = len(self._log.finished)
        if done > section.trials:
            raise ConfigError(
                f"search.trials: {section.trials}, but the search in {self._output} has {done} trials already; ask for "
                "as many or more, or give another folder"
            )
        (self._output / RESULTS).unlink(missing_ok=True)  # until it is finished again
        if "plain" not in self._log.facts:
            self._log.note("plain", self._measure_plain())
        for number in range(done, section.trials):
            if number >= len(self._starts) and (self._out_of_time() or not searched(self._spaces)):
                break
            trial = self._try(number)
            if report is not None:
                values = [one.value for one in self._finished if one.value is not None]
                report({**_row(trial), "is_best": trial.value == min(values, default=None)}, section.trials)

    def finish(self) -> dict[str, Any]:
        """Compare the best setting with the defaults on held-out text; the record of it all."""
        trials = self._finished
        complete = [trial for trial in trials if trial.value is not None]
        if not complete:
            raise CtxextError(f"no setting could be measured; the first: {trials[0].user_attrs['reason']}")
        best = min(complete, key=lambda trial: (trial.value, trial.number))
        entries = self._compare(best, complete)
        failed = {
            trial.user_attrs["title"]: trial.user_attrs["reason"]
            for trial in trials
            if trial.value is None and trial.user_attrs["is_default"]
        }
        found = comparison(
            entries,
            failed,
            best.user_attrs["title"],
            self._held_out,
            self._section,
            self._trained,
            noise=NOISE.get(str(unwrap(self._model).dtype).removeprefix("torch."), 1e-3),
            is_default=best.user_attrs["is_default"],
        )
        method = self._method_of(best)
        found["best"] = {
            "trial": best.number,
            "title": best.user_attrs["title"],
            "is_default": best.user_attrs["is_default"],
            "method": best.user_attrs["method"],
            "objective": best.value,
        }
        found["held_out"] = {
            "id": self._held_out.name,
            "fingerprint": fingerprint(text.document for text in self._held_out.keyed),
            "document_ids": [document.id for document in self._held_out.originals],
        }
        with self._bench.extended(best.user_attrs["title"], method):
            patch = inspect(self._model).summary()
        return self._record(trials, found, patch)

    @property
    def _finished(self) -> list[FrozenTrial]:
        assert self._log is not None  # run() has opened it
        return self._log.finished

    def _read_texts(self, name: str) -> Texts:
        section = getattr(self._section, name)
        lengths = section.length or (self._target,)
        if max(lengths) <= self._trained:
            raise ConfigError(
                f"search.{name}.length: {max(lengths)} is within the trained length {self._trained}, where there is "
                "nothing to search for; read further"
            )
        return read_texts(section, self._tokenizer, lengths, self._section.depth)

    def _measure_plain(self) -> list[float]:
        """The plain model's loss within the trained length, for each document."""
        length = min(self._trained, self._texts.longest)
        with self._bar("plain model, trained length") as bar:
            result = read(self._model, self._tokenizer, self._texts, length=length, progress=bar)
        records = zip(result.losses[length], self._texts.keyed, strict=True)
        return [sums(record, keyed, (), 0, self._trained)["trained"][0] for record, keyed in records]

    def _out_of_time(self) -> bool:
        spent = sum(trial.user_attrs["seconds"] for trial in self._finished)
        return self._section.minutes is not None and spent >= 60 * self._section.minutes

    def _bar(self, title: str) -> Any:
        return nullcontext() if self._progress is None else self._progress(title)

    def _build(self, settings: Mapping[str, Any] | None, label: str) -> Method | None:
        """The method, set to reach the target where its settings leave that open.

        Raises:
            ConfigError: settings that forbid each other, or don't reach the target.
        """
        if settings is None:
            return None
        path = f"search.methods.{label}"
        method = parse_inner_method(settings, path)
        if "max_position_embeddings" not in settings:
            try:
                reaching = parse_inner_method({**settings, "max_position_embeddings": self._target}, path)
                reaching.lengths(self._spec)
                method = reaching
            except ConfigError as error:
                try:
                    method.lengths(self._spec)  # it says by itself how far it reaches
                except ConfigError:
                    raise error from None
        if (reach := method.lengths(self._spec).target) < self._target:
            raise ConfigError(f"method {method.name}: reaches {reach:,} tokens, not the target {self._target:,}")
        return method

    def _find_starts(self, *, plain_too: bool) -> Iterator[Start]:
        if plain_too:
            yield Start(PLAIN, Proposal(PLAIN, None, {}, {}))
        seen: list[Method] = []
        for label, space in self._spaces.items():
            settings = _default_settings(space)
            if settings is None:
                continue
            title = f"{label}, defaults"
            try:
                method = self._build(settings, label)
            except ConfigError:  # the trial will say so
                yield Start(title, Proposal(label, settings, {}, {}))
                continue
            if method is None or method in seen:  # two labels for one method
                continue
            seen.append(method)
            yield Start(title, self._expressed(label, space, method, settings))
        for label, space in self._spaces.items():
            field = space.monotone_field()
            for name, source in (("YaRN", YaRN), ("NTK", NTK)) if field == "long_factor" else ():
                proposal = self._with_divisors(label, space, source(max_position_embeddings=self._target))
                if proposal is not None:
                    yield Start(f"{label}, {name}'s factors", proposal, is_default=False)

    def _expressed(self, label: str, space: Space, method: Method, settings: dict[str, Any]) -> Proposal:
        """The proposal of a given method; without parameters if the space doesn't hold it, which teaches nothing."""
        known = _parameters(space, label, method, self._spec)
        if known is None or not space.searched:
            return Proposal(label, settings, {}, {})
        # Settings as given, not as the parameters spell them: the defaults are what they are.
        return fixed(label, self._spaces, {METHOD: label, **known}, self._frequencies)._replace(settings=settings)

    def _with_divisors(self, label: str, space: Space, source: Method) -> Proposal | None:
        """The divisors of the frequencies that another method has, as nearly as the knots allow; None if not at all."""
        inv_freq, attention_factor = source.scaled_rope(self._spec)
        base = default_inv_freq(self._spec.rope_theta, self._spec.rotary_dim)
        divisors = tuple((base.double() / inv_freq.double()).tolist())
        for factor in (attention_factor, None):
            like = LongRoPE(
                long_factor=divisors, attention_factor=factor, max_position_embeddings=self._target
            )  # fmt: skip
            known = _parameters(space, label, like, self._spec)
            if known is not None:
                return fixed(label, self._spaces, {METHOD: label, **known}, self._frequencies)
        return None

    def _try(self, number: int) -> FrozenTrial:
        """Run trial ``number`` and store it."""
        start = self._starts[number] if number < len(self._starts) else None
        trials = self._finished
        proposal = start.proposal if start is not None else self._proposed(trials)
        facts: dict[str, Any] = {
            "label": proposal.label,
            "title": f"trial {number}" if start is None else start.title,
            "is_default": start is not None and start.is_default,
            "settings": proposal.settings,
            "method": None,
            "parts": None,
            "reason": None,
            "seconds": 0.0,
        }
        try:
            method = self._build(proposal.settings, proposal.label)
        except ConfigError as error:
            facts["reason"] = str(error)
            return self._store(proposal, None, {}, facts)
        facts["method"] = plain(_dumped(method))
        for earlier in trials:
            known = earlier.user_attrs
            if facts["method"] is None or known["method"] != facts["method"]:
                continue
            said = f"; {known['reason']}" if known["reason"] else ""
            facts |= {"parts": known["parts"], "reason": f"as trial {earlier.number}{said}"}
            return self._store(proposal, earlier.value, earlier.intermediate_values, facts)
        started = time.perf_counter()
        value, steps = self._judge(method, facts, may_stop=start is None)
        facts["seconds"] = time.perf_counter() - started
        return self._store(proposal, value, steps, facts)

    def _proposed(self, trials: Sequence[FrozenTrial]) -> Proposal:
        return propose(trials, self._spaces, self._section, self._frequencies)

    def _store(
        self, proposal: Proposal, value: float | None, steps: Mapping[int, float], facts: Mapping[str, Any]
    ) -> FrozenTrial:
        assert self._log is not None  # run() has opened it
        return self._log.add(proposal, value, steps, facts)

    def _judge(
        self, method: Method | None, facts: dict[str, Any], *, may_stop: bool
    ) -> tuple[float | None, dict[int, float]]:
        """The objective over all documents, None with a reason if it has none, and over the first 1, 2, ... of them."""
        assert self._log is not None  # run() has opened it
        found: list[Sums] = []
        steps: dict[int, float] = {}
        texts = self._texts
        with ExitStack() as stack:
            try:
                stack.enter_context(self._bench.extended(facts["title"], method))
                bar = stack.enter_context(self._bar(f"{facts['title']} ({facts['label']})"))
                for i, keyed in enumerate(texts.keyed):
                    result = read(
                        self._model, self._tokenizer, texts, [keyed], progress=_shifted(bar, i, len(texts.keyed))
                    )  # fmt: skip
                    [record] = result.losses[texts.longest]
                    found.append(sums(record, keyed, texts.lengths, self._section.last, self._trained))
                    facts["parts"] = parts(found, self._log.facts["plain"])
                    steps[i + 1] = value = objective(facts["parts"], self._section.weights)
                    last = i + 1 == len(texts.keyed)
                    if may_stop and not last and is_behind(self._finished, i + 1, value, self._section):
                        count = f"{i + 1} documents" if i else "document"
                        facts["reason"] = f"stopped: worse than half of the others on the first {count}"
                        break
            except (CtxextError, RuntimeError, MemoryError) as error:  # torch's out-of-memory errors are RuntimeErrors
                facts["reason"] = " ".join(str(error).split()) or type(error).__name__
        return (steps[len(steps)] if facts["reason"] is None else None), steps

    def _method_of(self, trial: FrozenTrial) -> Method | None:
        settings = trial.user_attrs["method"]
        return None if settings is None else parse_inner_method(settings, "method")

    def _compare(self, best: FrozenTrial, complete: Sequence[FrozenTrial]) -> list[Entry]:
        """The best setting, then the defaults, on held-out text."""
        chosen = [best, *(trial for trial in complete if trial.user_attrs["is_default"] and trial is not best)]
        if len(chosen) == 1:
            return []
        texts = self._held_out
        section = PerplexitySection(
            dataset=self._section.held_out.dataset,
            length=(texts.longest,),
            min_tokens=2,
            bos=texts.bos,
        )
        prepared = self._reading(texts)
        entries = compare(
            self._model,
            self._tokenizer,
            {trial.user_attrs["title"]: self._method_of(trial) for trial in chosen},
            {"perplexity": prepared},
            replace(self._configuration, perplexity=section),
            folder=self._output / HELD_OUT,
            resume=True,
            with_plain=False,
            progress=lambda label, task, _: self._bar(f"held-out text, {label}"),
        )
        order = [trial.user_attrs["title"] for trial in chosen]
        return sorted(entries, key=lambda entry: order.index(entry.label))

    def _record(
        self, trials: Sequence[FrozenTrial], summary: dict[str, Any], patch: Mapping[str, Any]
    ) -> dict[str, Any]:
        section, source = self._section, self._configuration.model
        assert source is not None
        resolved = shown(self._configuration.resolved("model", "search"))
        complete = sum(trial.value is not None for trial in trials)
        result = SearchResult(
            rows=[_row(trial) for trial in trials],
            summary=summary,
            protocol={
                "name": "search",
                "version": 1,
                "target": self._target,
                "trained": self._trained,
                "lengths": list(self._texts.lengths),
                "held_out_lengths": list(self._held_out.lengths),
                "last": section.last,
                "depths": list(section.depth),
                "weights": section.weights.model_dump(),
                "sampler": section.sampler,
            },
            counts={
                "trials": len(trials),
                "complete": complete,
                "pruned": len(trials) - complete,
                "documents": len(self._texts.keyed),
                "held_out_documents": len(self._held_out.keyed),
            },
            document_ids=[document.id for document in self._texts.originals],
            dataset_fingerprint=fingerprint(text.document for text in self._texts.keyed),
            wall_seconds=sum(trial.user_attrs["seconds"] for trial in trials),
            peak_memory_bytes=peak_memory(unwrap(self._model).device),
        )
        return result_record(
            "search",
            result,
            model=self._model,
            model_id=model_id(source.name),
            tokenizer=self._tokenizer,
            revision=source.revision,
            dataset_id=self._texts.name,
            method=summary["best"]["method"],
            patch=patch,
            configuration=resolved,
            seed=section.seed,
        )


def _default_settings(space: Space) -> dict[str, Any] | None:
    """The method without settings of its own, but for those it can't do without; None if those are searched."""
    needed = [key for key, field in space.cls.model_fields.items() if field.is_required()]
    values = {key: space.fields.get(key) for key in needed}
    if not all(isinstance(field, Fixed) for field in values.values()):
        return None
    return {"name": space.name, **{key: field.value for key, field in values.items() if isinstance(field, Fixed)}}


def _parameters(space: Space, label: str, method: Method, spec: RopeSpec) -> dict[str, Any] | None:
    """The parameters with which the space gives ``method``, or None.

    Factors that the method leaves to its lengths are given as what they come to, where the space needs a number.
    """
    frequencies = spec.rotary_dim // 2
    settings = method.model_dump(mode="json")
    follows = {"factor": method.lengths(spec).factor, "attention_factor": method.scaled_rope(spec)[1]}
    for key, field in space.fields.items():
        if settings[key] is None and key in follows and field.parameters(key, None, frequencies) is None:
            settings[key] = follows[key]
    return space.parameters(label, settings, frequencies)


def _dumped(method: Method | None) -> dict[str, Any] | None:
    return None if method is None else method.model_dump(mode="json", exclude_none=True)


def _shifted(bar: Progress | None, done: int, total: int) -> Progress | None:
    """A callback for one of several readings of about one length."""
    return None if bar is None else lambda read, length: bar(done * length + read, total * length)


def _row(trial: FrozenTrial) -> dict[str, Any]:
    """A trial as a line of the table; its parts are those over the documents that it read."""
    attributes = trial.user_attrs
    given = {key: value for key, value in (attributes["settings"] or {}).items() if key != "name"}
    settings = ", ".join(f"{key} {_short(value)}" for key, value in given.items())
    return {
        "trial": trial.number,
        "method": attributes["label"],
        "state": "pruned" if trial.value is None else "complete",
        "objective": trial.value,
        **(attributes["parts"] or dict.fromkeys(PARTS)),
        "settings": "defaults" if attributes["is_default"] and attributes["settings"] else settings,
        "reason": attributes["reason"],
        "seconds": attributes["seconds"],
        "is_default": attributes["is_default"],
        "parameters": dict(trial.params),
        "method_settings": attributes["method"],
    }


def _short(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(f"{item:.3g}" for item in value) + "]"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _begun(folder: Path) -> bool:
    return any((folder / name).exists() for name in (JOURNAL, RESULTS))


def _clear(folder: Path) -> None:
    shutil.rmtree(folder / HELD_OUT, ignore_errors=True)
    for pattern in (*_UNFINISHED, *_WRITTEN):
        for file in folder.glob(pattern):
            file.unlink()


def _write(record: Mapping[str, Any], folder: Path) -> None:
    best = record["summary"]["best"]
    if best["method"] is None:
        (folder / BEST).unlink(missing_ok=True)
    else:
        text = (
            f"# ctxext eval perplexity --model {record['provenance']['model']} --config best.yaml "
            f"--length {record['protocol']['target']}\n"
            f'# {best["title"]} of a search of {record["counts"]["trials"]} trials; ctxext.patch(model, "best.yaml") '
            "takes it too.\n"
        )
        text += yaml.safe_dump({"method": best["method"]}, sort_keys=False, default_flow_style=None)
        write_bytes(text.encode(), folder / BEST)
    write_json(record, folder / RESULTS)
