"""A fine-tune from a configuration: data and model found and checked, trained, measured, and written where it belongs.

The loop itself is training.py's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from ctxext.adapters import save_adapter
from ctxext.checkpoints import SHARDED, Checkpoints
from ctxext.config import Config
from ctxext.data import Document, dataset_id, tokenize, without_overlap
from ctxext.errors import ConfigError
from ctxext.evaluation.perplexity import check_arguments
from ctxext.evaluation.results import tokenizer_fingerprint, versions, weights_fingerprint
from ctxext.evaluation.runs import Run
from ctxext.evaluation.tasks import perplexity_arguments, prepare, section_documents, shown
from ctxext.export import model_card, write_checkpoint
from ctxext.inspection import inspect
from ctxext.models import model_id
from ctxext.patching import active_patch
from ctxext.processes import process_count
from ctxext.training import Finetune, Plan, Report, own_state

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# They decide how a run is looked after, not what comes of it.
_FREE = ("evaluate_every", "save_every", "keep", "trackers")


def finetune(
    configuration: Config,
    output: Path,
    load: Callable[[], tuple[Any, Any]],
    *,
    resume: bool = False,
    overwrite: bool = False,
    dry_run: bool = False,
    command: str | None = None,
    announce: Callable[[Plan], None] | None = None,
    report: Report | None = None,
) -> Path:
    """Fine-tune a model as section ``finetune`` says.

    Args:
        configuration: with the sections ``finetune`` and, for evaluations, ``perplexity``.
        output: folder of the run; the result is in its subfolder ``model``, or ``adapter``.
        load: gives model and tokenizer, patched.
        resume: go on with the run in the folder.
        overwrite: throw it away.
        dry_run: announce, and train nothing.
        command: how this was called, for the model card.
        announce: called with the plan before the first step.
        report: called with each step and evaluation.

    Returns:
        Where the result is.

    Raises:
        CtxextError: settings, data, model or folder can't be used, or training had to stop.
    """
    settings = configuration.finetune
    read = _training_data(configuration)
    section = configuration.perplexity
    prepared = prepare("perplexity", configuration) if section.length or section.window else None
    if settings.evaluate_every is not None and prepared is None:
        raise ConfigError(
            "finetune.evaluate_every: nothing to evaluate; give perplexity.length (or window) and dataset in the file"
        )
    checkpoints = Checkpoints(output, resume=resume, overwrite=overwrite, keep=settings.keep)
    result = output / ("adapter" if settings.lora is not None and not settings.lora.merge else "model")
    model, tokenizer = load()
    if prepared is not None:
        held_out = list(_held_out(configuration, tokenizer))
        everything, read = read, lambda: without_overlap(everything(), held_out)
    run_settings = _run_settings(configuration, model, tokenizer, evaluates=prepared is not None)
    try:
        with own_state():
            sharded = False

            def evaluate(trained: Any) -> list[dict[str, Any]]:
                assert prepared is not None  # or it is not handed over
                rows: list[dict[str, Any]] = prepared.evaluate(trained, tokenizer, Run(shared=not sharded), None).rows
                return rows

            job = Finetune(model, tokenizer, read, settings, checkpoints, evaluate if prepared is not None else None)
            sharded = job.accelerator.distributed_type in SHARDED
            if sharded and settings.lora is not None and settings.lora.merge:
                raise ConfigError(
                    "finetune.lora.merge: the weights are spread over the processes; leave it out, and merge with "
                    "ctxext export"
                )
            patch = active_patch(model)
            if sharded and patch is not None and patch.method.learns and settings.precision == "bf16":
                raise ConfigError(
                    f"finetune.precision: bf16 would round what {patch.method.name} learns where the weights "
                    "are spread over the processes; give fp32"
                )
            plan = job.plan()
            if announce is not None:
                announce(plan)
            if not dry_run:
                checkpoints.begin(run_settings)  # not before all is checked: it may throw a run away
                job.run(report)
                _write_result(job, configuration, tokenizer, result, plan, command)
            job.accelerator.end_training()  # closes trackers and the group of processes
    finally:
        checkpoints.close()
    return result


def _training_data(configuration: Config) -> Callable[[], Iterator[Document]]:
    settings = configuration.finetune
    if settings.dataset is None:
        raise ConfigError("no data; give --dataset, or finetune.dataset in the file")

    dataset = settings.dataset

    def read() -> Iterator[Document]:
        return section_documents(settings, dataset, for_training=True)

    read()  # a data set that isn't there should not wait for the weights
    return read


def _held_out(configuration: Config, tokenizer: PreTrainedTokenizerBase) -> Iterator[Document]:
    """The documents that evaluations read."""
    section, kept = configuration.perplexity, 0
    least = check_arguments(**perplexity_arguments(section)).min_tokens
    for document in section_documents(section, section.dataset):
        yield document
        kept += len(tokenize(tokenizer, document.text)) >= least
        if kept == section.max_documents:
            return


def _run_settings(
    configuration: Config, model: Any, tokenizer: PreTrainedTokenizerBase, *, evaluates: bool
) -> dict[str, Any]:
    """All that decides what comes of the run."""
    settings, source = configuration.finetune, configuration.model
    assert source is not None  # checked before
    assert settings.dataset is not None
    patch = active_patch(model)
    free = (*_FREE, "steps") if settings.schedule == "constant" else _FREE
    return {
        "model": model_id(source.name),
        "revision": source.revision,
        "method": None if patch is None else patch.method.model_dump(mode="json", exclude_none=True),
        "finetune": {
            **{key: value for key, value in settings.model_dump(mode="json").items() if key not in free},
            "dataset": dataset_id(settings.dataset, revision=settings.dataset_revision),
        },
        "perplexity": shown(configuration.resolved("perplexity"))["perplexity"] if evaluates else None,
        "processes": process_count(),
        "tokenizer": tokenizer_fingerprint(tokenizer),
        "weights": weights_fingerprint(model),
        "patch": inspect(model).fingerprint,
        "versions": {
            name: version for name, version in versions().items() if name in ("ctxext", "torch", "transformers")
        },
    }


def _write_result(
    job: Finetune, configuration: Config, tokenizer: Any, folder: Path, plan: Plan, command: str | None
) -> None:
    """The trained model or adapter, whole or not at all."""
    state = job.full_weights()
    if not job.accelerator.is_main_process:
        return
    source, settings = configuration.model, configuration.finetune
    assert source is not None  # checked before
    assert settings.dataset is not None
    recipe = {key: value for key, value in settings.model_dump(mode="json").items() if value is not None}
    recipe["dataset"] = dataset_id(settings.dataset, revision=settings.dataset_revision)
    notes = [
        f"Fine-tuned for {plan.steps:,} steps of {plan.global_batch} blocks of {job.length:,} tokens on "
        f"{recipe['dataset']}, {100 * plan.beyond:.0f} % of them beyond the trained length:",
        "```yaml\n" + yaml.safe_dump({"finetune": recipe}, sort_keys=False).strip() + "\n```",
    ]
    card = model_card(job.model, source.name, notes=notes, command=command)
    if folder.name == "adapter":
        save_adapter(job.model, folder, base=source.name, overwrite=True, state=state, card=card)
    else:
        write_checkpoint(job.model, tokenizer, folder, overwrite=True, card=card, state=state)
