"""The trials of a search on disk, and the next setting to try.

Only finished trials are stored, each as one line of Optuna's journal. The next setting is a function of them, the seed
and the trial's number alone: a search that was killed goes on as if it had not been.
"""

from __future__ import annotations

import json
import statistics
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ctxext.errors import ConfigError, CtxextError
from ctxext.files import plain, write_bytes
from ctxext.search.space import Space

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.samplers import BaseSampler
    from optuna.trial import FrozenTrial

    from ctxext.config import SearchSection

JOURNAL = "trials.journal"
METHOD = "method"
"""The parameter that chooses among the spaces, by label."""


def optuna() -> ModuleType:
    """The library. Raises CtxextError where it isn't installed."""
    try:
        import optuna as found
    except ImportError:
        raise CtxextError("a search needs optuna: pip install optuna") from None
    return found


class Proposal(NamedTuple):
    """A setting to try: label and settings of the method, and the parameters that it was made of.

    Parameters without a distribution are those of a setting that the space can't express: none.
    """

    label: str
    settings: dict[str, Any] | None
    parameters: dict[str, Any]
    distributions: dict[str, BaseDistribution]


class TrialLog:
    """The finished trials in a folder, which must be held by this process alone."""

    def __init__(self, folder: Path) -> None:
        """Open the journal, or begin one. Raises ConfigError if it can't be read or written."""
        file = folder / JOURNAL
        file.with_name(f"{JOURNAL}.lock").unlink(missing_ok=True)  # Optuna's own, left by a process that was killed
        if file.exists() and not (content := file.read_bytes()).endswith(b"\n"):
            write_bytes(content[: content.rfind(b"\n") + 1], file)
        library = optuna()
        with _quietly(library), _about(file):
            from optuna.storages.journal import JournalFileBackend

            storage = library.storages.JournalStorage(JournalFileBackend(str(file)))
            self._study = library.create_study(storage=storage, study_name="search", load_if_exists=True)
        self._file = file

    @property
    def finished(self) -> list[FrozenTrial]:
        """All trials in order."""
        found: list[FrozenTrial] = self._study.get_trials(deepcopy=False)
        return found

    @property
    def facts(self) -> dict[str, Any]:
        """What was noted about the search as a whole."""
        found: dict[str, Any] = self._study.user_attrs
        return found

    def note(self, key: str, value: Any) -> None:
        """Keep a fact about the search as a whole."""
        with _about(self._file):
            self._study.set_user_attr(key, plain(value))

    def add(
        self, proposal: Proposal, value: float | None, steps: Mapping[int, float], facts: Mapping[str, Any]
    ) -> FrozenTrial:
        """Store a trial; without a value it is a pruned one. Raises ConfigError if it can't be written."""
        from optuna.trial import TrialState, create_trial

        with _about(self._file):
            self._study.add_trial(
                create_trial(
                    state=TrialState.PRUNED if value is None else TrialState.COMPLETE,
                    value=value,
                    params=dict(proposal.parameters),
                    distributions=dict(proposal.distributions),
                    intermediate_values=dict(steps),
                    user_attrs=plain(facts),
                )
            )
        return self.finished[-1]


def fixed(label: str, spaces: Mapping[str, Space], parameters: Mapping[str, Any], frequencies: int) -> Proposal:
    """The setting that ``parameters`` stand for."""
    trial = optuna().trial.FixedTrial(dict(parameters))
    labels = searched(spaces)
    if len(labels) > 1:
        trial.suggest_categorical(METHOD, labels)
    settings = spaces[label].suggest(trial, label, frequencies)
    return Proposal(label, settings, dict(trial.params), dict(trial.distributions))


def propose(
    trials: Sequence[FrozenTrial], spaces: Mapping[str, Space], section: SearchSection, frequencies: int
) -> Proposal:
    """The next setting, from what is known of ``trials``."""
    library = optuna()
    with _quietly(library):
        study = library.create_study(sampler=_sampler(section, len(trials)))
        study.add_trials(trials)
        trial = study.ask()
        labels = searched(spaces)
        label = trial.suggest_categorical(METHOD, labels) if len(labels) > 1 else labels[0]
        settings = spaces[label].suggest(trial, label, frequencies)
    return Proposal(label, settings, dict(trial.params), dict(trial.distributions))


def searched(spaces: Mapping[str, Space]) -> list[str]:
    """The labels with something to search."""
    return [label for label, space in spaces.items() if space.searched]


def is_behind(trials: Sequence[FrozenTrial], step: int, value: float, section: SearchSection) -> bool:
    """Whether half of the complete trials were better over the same first ``step`` documents.

    Optuna's own median pruner would compare a trial's best step, which here is its easiest document.
    """
    others = [trial.intermediate_values[step] for trial in trials if trial.value is not None]
    return section.pruning == "median" and len(others) >= section.startup and value > statistics.median(others)


def _sampler(section: SearchSection, number: int) -> BaseSampler:
    from optuna import samplers

    seed = int(np.random.SeedSequence([section.seed, number]).generate_state(1)[0])
    if section.sampler == "random":
        return samplers.RandomSampler(seed=seed)
    if section.sampler == "gp":
        return samplers.GPSampler(seed=seed, n_startup_trials=section.startup)
    return samplers.TPESampler(seed=seed, n_startup_trials=section.startup, multivariate=True, group=True)


@contextmanager
def _quietly(library: ModuleType) -> Iterator[None]:
    """Without Optuna's log, and its remarks about options that it calls experimental."""
    verbosity = library.logging.get_verbosity()
    library.logging.set_verbosity(library.logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", library.exceptions.ExperimentalWarning)
            yield
    finally:
        library.logging.set_verbosity(verbosity)


@contextmanager
def _about(file: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}; the trials that are there stay: go on with --resume") from error
    except (json.JSONDecodeError, KeyError) as error:
        raise ConfigError(
            f"{file}: isn't a journal of trials any more ({error}); start again with --overwrite"
        ) from error
