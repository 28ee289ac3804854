"""How a model answers prompts: the loss of the right answer and what it says by itself, both from one reading.

What a prompt says and which answer is right is decided by the tasks (passkey.py, ruler.py).
"""

from __future__ import annotations

import itertools
import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import DynamicCache, GenerationConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from ctxext.errors import ConfigError
from ctxext.evaluation.prompts import Prompt, common_prefix
from ctxext.evaluation.runs import Run
from ctxext.evaluation.scoring import cache_argument, equal_batches
from ctxext.families import window_layers

BLOCK = 5
"""Prompts, run one at a time, that may share cached beginnings: so few that little is done again when a run that broke
off goes on, and the same whatever the number of processes, so that results are too."""

Judge = Callable[[Prompt, str], Mapping[str, Any]]
"""Facts about an answer, given as text: ``correct`` at least."""


@dataclass(frozen=True)
class AnswersResult:
    """Rows of scores, the record of every prompt, and what is needed to repeat them.

    ``by_length`` pools the rows of each length, ``summary`` is what follows from all of them.
    """

    rows: list[dict[str, Any]]
    samples: list[dict[str, Any]]
    protocol: dict[str, Any]
    counts: dict[str, int]
    wall_seconds: float
    peak_memory_bytes: int | None
    by_length: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)

    @property
    def parts(self) -> list[str]:
        """The ids of the run's parts, in order."""
        return [sample["id"] for sample in self.samples]


def answer_prompts(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    judge: Judge,
    *,
    batch_size: int = 1,
    forced: bool = True,
    generated: bool = True,
    run: Run | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[dict[str, Any]]:
    """A record of every prompt, in order: what the model says by greedy decoding, and the loss of the right answer.

    Only prompts of equal length share a batch, so nothing is padded. One at a time (``batch_size`` 1), those of the
    ``BLOCK`` prompts in a row that begin alike share the cached keys and values of that beginning: equal up to
    rounding, and faster. A prompt that fails, for lack of memory say or with logits that are not finite, has ``error``
    in its record and counts as wrong.

    Args:
        model: without wrappers, in evaluation mode.
        tokenizer: that the prompts were made with.
        prompts: with ids that differ.
        judge: what makes an answer right.
        batch_size: prompts of equal length that are run together.
        forced: take ``answer_nll``, the mean loss of the answer's tokens in nats, and ``greedy_match``, whether each of
            them is the likeliest. Needs logits that are the output head's (``scoring.check_head``).
        generated: let the model answer, and judge that; without it ``correct`` is ``greedy_match``.
        run: keeps the records as they come.
        progress: called with the prompts done so far and in all, by this process.

    Raises:
        ConfigError: the tokenizer can't spell an answer, or neither way of answering is asked for.
    """
    if not forced and not generated:
        raise ConfigError("nothing to do: answers are neither generated nor forced")
    spaced = {prompt.id: _is_spaced(tokenizer, prompt) for prompt in prompts}
    run = run or Run()
    reader = _Reader(model, tokenizer, share_prefix=batch_size == 1)

    def answered(batch: Sequence[Prompt]) -> list[dict[str, Any]]:
        try:
            facts = [{} for _ in batch] if not forced else reader.forced(batch)
            if generated:
                for prompt, known, (ids, finite) in zip(batch, facts, reader.generated(batch), strict=True):
                    answer = _decode(tokenizer, ids, spaced=spaced[prompt.id])
                    known |= {"answer": answer, **judge(prompt, answer)} | ({} if finite else _NOT_FINITE)
            else:
                for known in facts:
                    known["correct"] = known["greedy_match"]
            for known in facts:
                if not math.isfinite(known.get("answer_nll", 0)):
                    known |= _NOT_FINITE
        except (RuntimeError, MemoryError) as error:  # torch's out-of-memory errors are RuntimeErrors
            reader.forget()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            return [{"correct": False, "error": f"{type(error).__name__}: {_first_line(error)}"} for _ in batch]
        return facts

    if batch_size == 1:
        blocks = equal_batches(prompts, BLOCK, key=lambda p: (p.task, p.length, p.index))
    else:
        blocks = equal_batches(
            prompts, batch_size, key=lambda p: (len(p.input_ids), p.forced_start, len(p.forced_ids), p.max_new_tokens)
        )
    own = run.share(blocks, lambda prompt: prompt.id, lambda prompt: len(prompt.input_ids), at_once=batch_size)
    done, total = 0, sum(map(len, own))
    for block in own:
        reader.forget()
        for first in range(0, len(block), batch_size):
            batch = block[first : first + batch_size]
            for prompt, known in zip(batch, answered(batch), strict=True):
                run.add(prompt.id, {**_about(prompt), **known})
            done += len(batch)
            if progress is not None:
                progress(done, total)
    parts = run.collect()
    return [{"id": prompt.id, **_checked(parts[prompt.id].facts, prompt)} for prompt in prompts]


def shares_prefixes(model: Any) -> bool:
    """Whether a cache can be cut back: Transformers' models without sliding windows."""
    config = getattr(model, "config", None)
    return isinstance(model, PreTrainedModel) and config is not None and window_layers(config) is None


_NOT_FINITE: dict[str, Any] = {
    "correct": False,
    "error": "the model's logits are not finite; check the patch, try float32",
}


class _Reader:
    """Reads prompts, and keeps the keys and values of the last ones for what comes next."""

    def __init__(self, model: Any, tokenizer: Any, *, share_prefix: bool) -> None:
        self._model, self._tokenizer = model, tokenizer
        self._keeps, self._share = shares_prefixes(model), share_prefix
        self._cache: Any = None
        self._rows: list[list[int]] = []
        self._name = cache_argument(model) if self._keeps else ""

    def forget(self) -> None:
        """Start anew."""
        self._cache, self._rows = None, []

    def forced(self, batch: Sequence[Prompt]) -> list[dict[str, Any]]:
        """Loss of the answer's tokens, and whether each is the likeliest, for each prompt of equal length."""
        rows = [prompt.input_ids[: prompt.forced_start] + prompt.forced_ids for prompt in batch]
        targets = len(batch[0].forced_ids)
        ids = torch.tensor(rows, device=self._model.device)
        # The position before the answer is read again: its logits are for the answer's first token.
        cached = self._continued(rows, batch[0].forced_start - 1)
        fresh = ids[:, self._length() if cached else 0 :]
        states = self._model.get_decoder()(input_ids=fresh, use_cache=bool(cached), **cached).last_hidden_state
        logits = self._model.get_output_embeddings()(states[:, -targets - 1 : -1]).float()  # [B, targets, vocabulary]
        labels = ids[:, -targets:].to(logits.device)
        nll = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(len(rows), targets)
        match = (logits.argmax(-1) == labels).all(-1)
        return [
            {"answer_nll": round(float(loss), 4), "greedy_match": bool(same)}
            for loss, same in zip(nll.mean(-1), match, strict=True)
        ]

    def generated(self, batch: Sequence[Prompt]) -> list[tuple[list[int], bool]]:
        """The tokens that the model adds to each prompt, up to the first end-of-sequence token.

        And whether their logits were finite.
        """
        rows = [prompt.input_ids for prompt in batch]
        prompts = torch.tensor(rows, device=self._model.device)
        config = _greedy(self._model, self._tokenizer, batch[0].max_new_tokens)
        with _sole_generation_config(self._model, config):
            cached = self._continued(rows, len(rows[0]) - 1)  # one token is left to be read
            out = self._model.generate(
                input_ids=prompts, attention_mask=torch.ones_like(prompts), generation_config=config, **cached
            )
        ends = set(config.eos_token_id or ())
        new: Tensor = out.sequences[:, prompts.shape[1] :]
        answers = [list(itertools.takewhile(lambda token: token not in ends, row)) for row in new.tolist()]
        wrong = torch.stack([(x.isnan() | x.isposinf()).any(-1) for x in out.logits], dim=1).tolist()  # [B, new tokens]
        # Behind a row's own end are logits of padding.
        return [(ids, not any(bad[: len(ids) + 1])) for ids, bad in zip(answers, wrong, strict=True)]

    def _continued(self, rows: list[list[int]], keep: int) -> dict[str, Any]:
        """The cache as an argument, cut back to what ``rows`` have in common with it, ``keep`` positions at most."""
        if not self._keeps:
            return {}
        same_prompts = len(rows) == len(self._rows)
        common = min(map(common_prefix, self._rows, rows)) if same_prompts and self._cache is not None else 0
        common = min(common, keep)
        # In batches the rows that follow are others altogether: only the prompt's second reading finds something.
        if common == 0 or (not self._share and common < keep):
            self._cache = DynamicCache(config=self._model.config)
        elif surplus := self._length() - common:
            self._cache.crop(-surplus)
        self._rows = rows
        return {self._name: self._cache}

    def _length(self) -> int:
        return int(self._cache.get_seq_length())


def _about(prompt: Prompt) -> dict[str, Any]:
    return {
        "task": prompt.task,
        "length": prompt.length,
        "index": prompt.index,
        **prompt.details,
        "answers": list(prompt.answers),
        "prompt_tokens": len(prompt.input_ids),
        "prompt_sha256": prompt.sha256,
        "error": None,
    }


def _checked(facts: dict[str, Any], prompt: Prompt) -> dict[str, Any]:
    if facts["prompt_sha256"] != prompt.sha256:
        raise ConfigError(f"prompt {prompt.id!r} of the run's folder is another than this one's: use --overwrite")
    return facts


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0]


def _is_spaced(tokenizer: Any, prompt: Prompt) -> bool:
    """Whether the decoder puts spaces between an answer's digits (word-level vocabularies do)."""
    for spaced in (False, True):
        text = _decode(tokenizer, prompt.forced_ids, spaced=spaced)
        if all(answer in text for answer in prompt.answers):
            return spaced
    raise ConfigError(
        f"the tokenizer can't spell the answer {', '.join(prompt.answers)}: its vocabulary lacks the characters"
    )


def _decode(tokenizer: Any, ids: Sequence[int], *, spaced: bool) -> str:
    """The text of ``ids``; ``spaced`` closes up digits that the tokenizer's decoder has set apart."""
    text: str = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return re.sub(r"(?<=[0-9])\s+(?=[0-9])", "", text) if spaced else text


def _greedy(model: Any, tokenizer: Any, max_new_tokens: int) -> GenerationConfig:
    own = getattr(model, "generation_config", None)
    ends = getattr(own, "eos_token_id", None)
    ends = tokenizer.eos_token_id if ends is None else ends
    ends = [ends] if isinstance(ends, int) else ends
    pad = tokenizer.pad_token_id
    return GenerationConfig(  # type: ignore[no-untyped-call]  # has no annotations
        do_sample=False,
        num_beams=1,
        use_cache=True,
        max_new_tokens=max_new_tokens,
        return_dict_in_generate=True,
        output_logits=True,
        eos_token_id=ends,
        pad_token_id=ends[0] if pad is None and ends else pad,
    )


@contextmanager
def _sole_generation_config(model: Any, config: GenerationConfig) -> Iterator[None]:
    """Put ``config`` in the place of the model's own, and say nothing about prompts beyond the trained length.

    ``generate`` fills each field that is None in the config it is given from the model's own, so penalties, forced and
    suppressed tokens can't be switched off by passing a config alone. The model's own object is untouched.
    """
    own, verbosity = getattr(model, "generation_config", None), transformers_logging.get_verbosity()
    model.generation_config = config
    transformers_logging.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        model.generation_config = own
        transformers_logging.set_verbosity(verbosity)
