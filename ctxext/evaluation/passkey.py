"""Passkey retrieval: the share of hidden keys that a model finds, by length and depth.

Prompts are built by tokens (haystack.py) and answers are scored as text, so one definition serves every tokenizer.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from ctxext.data import resolve_bos
from ctxext.errors import ConfigError
from ctxext.evaluation.answering import AnswersResult, answer_prompts, shares_prefixes
from ctxext.evaluation.haystack import ANSWER_ROOM, NAMES, PROMPT_VERSION, Filler, build_prompt
from ctxext.evaluation.prompts import Prompt
from ctxext.evaluation.runs import Run
from ctxext.evaluation.scoring import (
    bare_model,
    check_head,
    check_length,
    check_positions,
    evaluating,
    require_distinct,
    require_whole,
)
from ctxext.evaluation.statistics import wilson95, wilson95_mean

CONTROL_LENGTH = 512
"""Tokens of the control prompts: short enough for every model that can do the task at all."""
FLOOR = 0.95
"""A model that finds fewer keys than this share in short prompts can't do the task."""


class PasskeyResult(AnswersResult):
    """Rows (one per length and depth), the record of every prompt, and what is needed to repeat them.

    ``by_length`` pools the depths; its interval counts depths, not keys, because keys at one depth are found or lost
    together. ``summary`` holds the effective length (all lengths up to it have four of five keys
    found), for each length the largest distance from the end up to which keys are found (PI's k_max), the share of
    prompts in which the forced and the generated answer agree, and the controls.
    """


def score(continuation: str, key: str) -> bool:
    """Whether the first maximal run of the digits 0-9 in ``continuation`` is ``key``, neither longer nor shorter."""
    run = re.search("[0-9]+", continuation)
    return run is not None and run.group() == key


def evaluate_passkey(
    model: Any,
    tokenizer: Any,
    *,
    lengths: Sequence[int],
    depths: Sequence[float] = (0.1, 0.5, 0.9),
    trials: int = 5,
    seed: int = 0,
    batch_size: int = 1,
    bos: Literal["auto", "always", "never"] = "auto",
    answers: Literal["both", "generated", "forced"] = "both",
    distractors: int = 0,
    filler: Filler | None = None,
    controls: int = 0,
    run: Run | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> PasskeyResult:
    """Share of keys retrieved, one row per length and depth, by greedy decoding whatever the model's own settings.

    All prompts are built, and checked, before the first is run; none is ever cut. Only prompts of equal length share
    a batch, so nothing is padded. One at a time (``batch_size`` 1), prompts that start with the same filler share its
    cached keys and values: equal up to rounding, and faster by a third for five depths.

    Args:
        model: plain or patched; wrappers (PEFT, DDP) are looked through.
        tokenizer: the model's.
        lengths: tokens of prompt and answer.
        depths: where keys stand, 0 start, 1 end.
        trials: keys per length and depth.
        seed: same seed, same prompts, whatever the method.
        batch_size: prompts of equal length that are run together.
        bos: whether prompts start with BOS; auto is as the tokenizer does by default.
        answers: generated: what the model says by itself. forced: the loss of the key after the prompt, and whether
            greedy decoding would give it, which is all that ``correct`` means then. both: one after the other, from one
            reading of the prompt.
        distractors: keys of other names beside the one that is asked for.
        filler: a text to hide keys in, instead of the sentences in ``FILLER``.
        controls: prompts of ``CONTROL_LENGTH`` tokens with the key (can the model do the task at all?), and as many
            without (can it guess?).
        run: keeps the records as they come.
        progress: called with the prompts done so far and in all, by this process.

    Raises:
        ConfigError: arguments out of range, a length too short for a prompt, or a tokenizer that can't spell the key.
    """
    check_arguments(
        lengths=lengths, depths=depths, trials=trials, batch_size=batch_size, distractors=distractors, controls=controls
    )
    model = bare_model(model)
    check_positions(model)
    check_length(model, max(lengths))

    def build(length: int, depth: float, trial: int, *, needle: bool = True) -> Prompt:
        settings: dict[str, Any] = {"seed": seed, "bos": bos, "distractors": distractors, "filler": filler}
        return build_prompt(tokenizer, length=length, depth=depth, trial=trial, needle=needle, **settings)

    with evaluating(model) as cost:
        cells = list(itertools.product(lengths, depths))
        prompts = [build(length, depth, trial) for length, depth in cells for trial in range(trials)]
        short = [build(CONTROL_LENGTH, 0.5, -1 - i) for i in range(controls)]
        empty = [build(CONTROL_LENGTH, 0.5, -1 - i, needle=False) for i in range(controls)]
        if answers != "generated":
            check_head(model)
        records = answer_prompts(
            model,
            tokenizer,
            [*short, *empty, *prompts],
            lambda prompt, text: {"correct": score(text, prompt.answers[0])},
            batch_size=batch_size,
            forced=answers != "generated",
            generated=answers != "forced",
            run=run,
            progress=progress,
        )
    asked = records[2 * controls :]
    rows = [
        {"length": length, "depth": float(depth), **aggregate(asked[i * trials :][:trials])}
        for i, (length, depth) in enumerate(cells)
    ]
    by_length = [
        {"length": length, **aggregate([record for record in asked if record["length"] == length], groups=len(depths))}
        for length in lengths
    ]
    errors = sum(record["error"] is not None for record in records)
    return PasskeyResult(
        rows=rows,
        by_length=by_length,
        summary=_summary(rows, by_length, asked, records[:controls], records[controls : 2 * controls]),
        samples=records,
        protocol={
            "name": "passkey",
            "version": PROMPT_VERSION,
            "lengths": list(lengths),
            "depths": [float(depth) for depth in depths],
            "trials": trials,
            "seed": seed,
            "answer_room": ANSWER_ROOM,
            "answers": answers,
            "distractors": distractors,
            "filler": None if filler is None else filler.name,
            "controls": controls,
            "decoding": "greedy",
            "reuses_prefix": batch_size == 1 and shares_prefixes(model),
            "bos": bos,
            "bos_id": resolve_bos(tokenizer, bos),
        },
        counts={
            "samples": len(records),
            "tokens_processed": sum(record["prompt_tokens"] for record in records),
            "errors": errors,
        },
        wall_seconds=cost.wall_seconds,
        peak_memory_bytes=cost.peak_memory_bytes,
    )


def check_arguments(
    *,
    lengths: Sequence[int],
    depths: Sequence[float] = (0.1, 0.5, 0.9),
    trials: int = 5,
    batch_size: int = 1,
    distractors: int = 0,
    controls: int = 0,
) -> None:
    """Raise ConfigError for arguments that ``evaluate_passkey`` would not accept; needs no model."""
    for length in lengths:
        require_whole("lengths", length, 1)
    for depth in depths:
        if not 0 <= depth <= 1:
            raise ConfigError(f"depths must lie between 0 and 1, got {depth!r}")
    require_distinct("lengths", lengths)
    require_distinct("depths", depths)
    counts = (("trials", trials, 1), ("batch_size", batch_size, 1), ("distractors", distractors, 0))
    for name, value, least in (*counts, ("controls", controls, 0)):
        require_whole(name, value, least)
    if distractors >= len(NAMES):
        raise ConfigError(f"distractors {distractors} are more than there are names for: at most {len(NAMES) - 1}")


def is_control(sample: Mapping[str, Any]) -> bool:
    """Whether a prompt's record is that of a control, which belongs to no length."""
    return bool(sample.get("trial", 0) < 0)


def aggregate(records: Sequence[dict[str, Any]], groups: int | None = None) -> dict[str, Any]:
    """Share of right answers with its 95 % Wilson interval, mean loss of the answers, mean distance from the end.

    With ``groups`` the interval is that of so many trials: as many as there are prompts that say something new.
    A prompt that failed counts as wrong, and among ``errors``; it has no loss.
    """
    from ctxext.evaluation.metrics import PasskeyAccuracy  # loads `evaluate`, which takes a second

    trials = len(records)
    if all("answer" in record and record["error"] is None for record in records):
        answered = PasskeyAccuracy().compute(
            predictions=[record["answer"] for record in records],
            references=[record["answers"][0] for record in records],
        )
        correct = answered["correct"]
    else:
        correct = sum(record["correct"] for record in records)
    accuracy = correct / trials
    row = {"trials": trials, "correct": correct, "accuracy": accuracy}
    row["wilson95"] = wilson95(correct, trials) if groups is None else wilson95_mean(accuracy, groups)
    row["errors"] = sum(record["error"] is not None for record in records)
    if any("greedy_match" in record for record in records):
        row["greedy_match"] = sum(record.get("greedy_match", False) for record in records) / trials
    for name in ("answer_nll", "distance"):
        values = [
            record[name] for record in records if record.get(name) is not None
        ]  # a loss that isn't finite is None
        if values:
            row[name] = sum(values) / len(values)
    return row


def _summary(
    rows: Sequence[dict[str, Any]],
    by_length: Sequence[dict[str, Any]],
    asked: Sequence[dict[str, Any]],
    short: Sequence[dict[str, Any]],
    empty: Sequence[dict[str, Any]],
) -> dict[str, Any]:
    twice = [record for record in asked if "answer" in record and "greedy_match" in record]
    controls = None
    if short:
        controls = {"short": aggregate(short), "no_needle": aggregate(empty)}
    return {
        "effective_length": _reach([(row["length"], row["accuracy"]) for row in by_length], 0.8),
        "k_max": [
            {
                "length": total["length"],
                **{
                    str(share): _reach(
                        [(row["distance"], row["accuracy"]) for row in rows if row["length"] == total["length"]], share
                    )
                    for share in (0.2, 0.8, 1.0)
                },
            }
            for total in by_length
        ],
        "agreement": sum(r["correct"] == r["greedy_match"] for r in twice) / len(twice) if twice else None,
        "controls": controls,
        "floor": None if controls is None else controls["short"]["accuracy"] < FLOOR,
    }


def _reach(points: Sequence[tuple[float, float]], share: float) -> float | None:
    """The largest of the first coordinates up to which, from the smallest on, all second ones are ``share`` or more."""
    reached = list(itertools.takewhile(lambda point: point[1] >= share, sorted(points)))
    return reached[-1][0] if reached else None
