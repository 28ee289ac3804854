"""RULER-style tasks: scores by task and length.

The prompts are made in ruler_tasks.py, and asked by answering.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from ctxext.data import resolve_bos
from ctxext.errors import ConfigError, nearest
from ctxext.evaluation.answering import AnswersResult, answer_prompts, shares_prefixes
from ctxext.evaluation.prompts import Prompt
from ctxext.evaluation.ruler_tasks import PROMPT_VERSION, TASKS, build_prompt, score
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
from ctxext.evaluation.statistics import wilson95_mean

THRESHOLD = 0.856
"""RULER's: the mean score of Llama-2-7B-chat at its own 4,096 tokens, below which a length doesn't count as read."""


class RulerResult(AnswersResult):
    """Rows (one per task and length), the mean over tasks by length, the record of every prompt.

    ``summary`` holds the effective length: all lengths up to it have a mean score of at least ``THRESHOLD``.
    """


def evaluate_ruler(
    model: Any,
    tokenizer: Any,
    *,
    lengths: Sequence[int],
    tasks: Sequence[str] = tuple(TASKS),
    trials: int = 10,
    seed: int = 0,
    batch_size: int = 1,
    bos: Literal["auto", "always", "never"] = "auto",
    answers: Literal["both", "generated", "forced"] = "generated",
    run: Run | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> RulerResult:
    """Scores of RULER-style tasks, one row per task and length, by greedy decoding whatever the model's own settings.

    ``score`` is RULER's: the share of a prompt's answers that the continuation contains, averaged over ``trials``
    prompts; ``strict`` counts an answer only as a word of its own. Arguments are as in ``evaluate_passkey``.

    Reference: Hsieh et al., RULER (https://arxiv.org/abs/2404.06654). Prompts are our own: compare methods, not papers.

    Raises ConfigError for arguments out of range, an unknown task, or a length too short for one.
    """
    check_arguments(lengths=lengths, tasks=tasks, trials=trials, seed=seed, batch_size=batch_size)
    model = bare_model(model)
    check_positions(model)
    check_length(model, max(lengths))
    cells = list(itertools.product(tasks, lengths))
    with evaluating(model) as cost:
        prompts = [
            build_prompt(tokenizer, task=task, length=length, index=index, seed=seed, bos=bos)
            for task, length in cells
            for index in range(trials)
        ]
        if answers != "generated":
            check_head(model)
        records = answer_prompts(
            model,
            tokenizer,
            prompts,
            _judge,
            batch_size=batch_size,
            forced=answers != "generated",
            generated=answers != "forced",
            run=run,
            progress=progress,
        )
    rows = [
        {"task": task, "length": length, **_row(records[i * trials :][:trials])}
        for i, (task, length) in enumerate(cells)
    ]
    by_length = [
        {"length": length, **_row([record for record in records if record["length"] == length])} for length in lengths
    ]
    reached = itertools.takewhile(lambda row: row["score"] >= THRESHOLD, sorted(by_length, key=lambda r: r["length"]))
    return RulerResult(
        rows=rows,
        samples=records,
        protocol={
            "name": "ruler",
            "version": PROMPT_VERSION,
            "lengths": list(lengths),
            "tasks": list(tasks),
            "trials": trials,
            "seed": seed,
            "answers": answers,
            "decoding": "greedy",
            "reuses_prefix": batch_size == 1 and shares_prefixes(model),
            "bos": bos,
            "bos_id": resolve_bos(tokenizer, bos),
        },
        counts={
            "samples": len(records),
            "tokens_processed": sum(record["prompt_tokens"] for record in records),
            "errors": sum(record["error"] is not None for record in records),
        },
        wall_seconds=cost.wall_seconds,
        peak_memory_bytes=cost.peak_memory_bytes,
        by_length=by_length,
        summary={"effective_length": max((row["length"] for row in reached), default=None), "threshold": THRESHOLD},
    )


def check_arguments(
    *,
    lengths: Sequence[int],
    tasks: Sequence[str] = tuple(TASKS),
    trials: int = 10,
    seed: int = 0,
    batch_size: int = 1,
) -> None:
    """Raise ConfigError for arguments that ``evaluate_ruler`` would not accept; needs no model."""
    for task in tasks:
        if task not in TASKS:
            near = nearest(task, TASKS)
            hint = f": did you mean {near!r}?" if near else ""
            raise ConfigError(f"{task!r} is not a RULER task ({', '.join(TASKS)}){hint}")
    for length in lengths:
        require_whole("lengths", length, 1)
    require_distinct("lengths", lengths)
    require_distinct("tasks", tasks)
    for name, value, least in (("trials", trials, 1), ("seed", seed, 0), ("batch_size", batch_size, 1)):
        require_whole(name, value, least)


def _judge(prompt: Prompt, text: str) -> Mapping[str, Any]:
    contained, strict = score(text, prompt.answers)
    return {"score": contained, "strict": strict, "correct": contained == 1.0}


def _row(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Mean scores; a prompt that failed scores nothing, and counts among ``errors``."""
    trials = len(records)
    scores = [record.get("score", float(record["correct"])) for record in records]
    mean = sum(scores) / trials
    row = {
        "trials": trials,
        "score": mean,
        "wilson95": wilson95_mean(mean, trials),
        "strict": sum(record.get("strict", float(record["correct"])) for record in records) / trials,
        "correct": sum(record["correct"] for record in records),
        "errors": sum(record["error"] is not None for record in records),
    }
    losses = [record["answer_nll"] for record in records if record.get("answer_nll") is not None]
    return row | ({"answer_nll": sum(losses) / len(losses)} if losses else {})
