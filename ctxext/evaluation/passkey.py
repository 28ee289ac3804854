"""Passkey retrieval: a five-digit key hidden at a set depth in filler text of an exact number of tokens.

Prompts are built by tokens and answers are scored as text, so one definition serves every tokenizer.
"""

from __future__ import annotations

import hashlib
import inspect
import itertools
import logging
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from transformers import DynamicCache, GenerationConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from ctxext.data import resolve_bos, tokenize
from ctxext.errors import ConfigError
from ctxext.evaluation.scoring import (
    bare_model,
    check_length,
    check_positions,
    equal_batches,
    evaluating,
    require_distinct,
    require_whole,
)
from ctxext.evaluation.statistics import wilson95
from ctxext.families import window_layers

# The prompt, version passkey-v1, in the manner of Landmark Attention (https://arxiv.org/abs/2305.16300). Changing a
# word here changes every result: raise the version. No filler sentence is longer than 20 characters, so that even a
# tokenizer with one token per character fills a prompt to within 24 tokens of its length.
PROMPT_VERSION = "passkey-v1"
INSTRUCTION = "A pass key is hidden inside a lot of irrelevant text. Find it and memorize it. I will ask you for it."
FILLER = ("The grass is green.", "The sky is blue.", "The sun is warm.", "The road is long.", "We walk on and on.")
NEEDLE = "The pass key is {key}. Remember it. {key} is the pass key."
QUESTION = "What is the pass key? The pass key is"

ANSWER_ROOM = 8
"""Tokens that the model may generate beyond those of the key."""
SLACK = 24
"""A prompt with its room for the answer is less than this many tokens shorter than the length asked for."""


@dataclass(frozen=True)
class PasskeySample:
    """One prompt. ``needle_start`` is the index in ``input_ids`` of the first token of the sentence with the key."""

    id: str
    length: int
    depth: float
    trial: int
    key: str
    input_ids: list[int]
    max_new_tokens: int
    needle_start: int
    depth_realised: float
    sha256: str


@dataclass(frozen=True)
class PasskeyResult:
    """Rows (one per length and depth), the record of every sample, and what is needed to repeat them."""

    rows: list[dict[str, Any]]
    samples: list[dict[str, Any]]
    protocol: dict[str, Any]
    counts: dict[str, int]
    wall_seconds: float
    peak_memory_bytes: int | None


def build_sample(
    tokenizer: Any,
    *,
    length: int,
    depth: float,
    trial: int,
    seed: int,
    bos: Literal["auto", "always", "never"] = "auto",
) -> PasskeySample:
    """The prompt of one trial: a function of its arguments and the tokenizer alone.

    The prompt and its room for the answer (the key's tokens and ``ANSWER_ROOM``) take at most ``length`` tokens, and
    more than ``length - SLACK``. The needle stands at the sentence boundary nearest to ``depth`` of the filler's
    tokens: 0 is right after the instruction, 1 right before the question. Raises ConfigError if not even the prompt
    without filler fits.
    """
    depth = float(depth)
    identity = f"{seed}|{length}|{depth}|{trial}"
    key = str(10_000 + int(hashlib.sha256(identity.encode()).hexdigest(), 16) % 90_000)
    bos_id = resolve_bos(tokenizer, bos)
    prefix = [] if bos_id is None else [bos_id]
    max_new_tokens = len(tokenize(tokenizer, key)) + ANSWER_ROOM
    room = length - max_new_tokens - len(prefix)

    bare = tokenize(tokenizer, _join(key, [], 0))
    if len(bare) > room:
        raise ConfigError(
            f"length {length} is too short for a passkey prompt: this tokenizer needs at least "
            f"{length - room + len(bare)} tokens, answer included"
        )
    filler, boundary, ids = _fill(tokenizer, key, room, depth, bare)
    if room - len(ids) >= SLACK:
        raise ConfigError(f"this tokenizer can't fill a passkey prompt to within {SLACK} tokens of length {length}")
    start = _common_prefix(ids, tokenize(tokenizer, " ".join([INSTRUCTION, *filler[:boundary]])))
    before, total = start - len(tokenize(tokenizer, INSTRUCTION)), len(ids) - len(bare)
    ids = prefix + ids
    return PasskeySample(
        id=identity,
        length=length,
        depth=depth,
        trial=trial,
        key=key,
        input_ids=ids,
        max_new_tokens=max_new_tokens,
        needle_start=len(prefix) + start,
        depth_realised=before / total if total else 0.0,
        sha256=hashlib.sha256(" ".join(map(str, ids)).encode()).hexdigest(),
    )


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
    progress: Callable[[int, int], None] | None = None,
) -> PasskeyResult:
    """Share of keys retrieved, one row per length and depth, by greedy decoding whatever the model's own settings.

    All prompts are built, and checked, before the first is run; none is ever cut. Only prompts of equal length share
    a batch, so nothing is padded. One at a time (``batch_size`` 1), prompts that start with the same filler share its
    cached keys and values: equal up to rounding, and faster by a third for five depths. ``progress`` is called with the
    prompts done so far and in all.

    Raises ConfigError for arguments out of range, a length too short for a prompt, or a tokenizer that can't spell
    the key.
    """
    check_arguments(lengths=lengths, depths=depths, trials=trials, batch_size=batch_size)
    model = bare_model(model)
    check_positions(model)
    check_length(model, max(lengths))
    with evaluating(model) as cost:
        samples = [
            build_sample(tokenizer, length=length, depth=depth, trial=trial, seed=seed, bos=bos)
            for length, depth, trial in itertools.product(lengths, depths, range(trials))
        ]
        spaced = {sample.id: _is_spaced(tokenizer, sample) for sample in samples}
        answers: dict[str, str] = {}
        reused = ReusedPrefix(model) if batch_size == 1 and ReusedPrefix.works_for(model) else None
        for batch in equal_batches(samples, batch_size, key=lambda s: (len(s.input_ids), s.max_new_tokens)):
            for sample, ids in zip(batch, _generate(model, tokenizer, batch, reused), strict=True):
                answers[sample.id] = _decode(tokenizer, ids, spaced=spaced[sample.id])
            if progress is not None:
                progress(len(answers), len(samples))

    cells = itertools.product(lengths, depths)
    return PasskeyResult(
        rows=[_row(length, depth, samples[i * trials :][:trials], answers) for i, (length, depth) in enumerate(cells)],
        samples=[_record(sample, answers[sample.id]) for sample in samples],
        protocol={
            "name": "passkey",
            "version": PROMPT_VERSION,
            "lengths": list(lengths),
            "depths": [float(depth) for depth in depths],
            "trials": trials,
            "seed": seed,
            "answer_room": ANSWER_ROOM,
            "decoding": "greedy",
            "reuses_prefix": reused is not None,
            "bos": bos,
            "bos_id": resolve_bos(tokenizer, bos),
        },
        counts={"samples": len(samples), "tokens_processed": sum(len(sample.input_ids) for sample in samples)},
        wall_seconds=cost.wall_seconds,
        peak_memory_bytes=cost.peak_memory_bytes,
    )


def check_arguments(
    *, lengths: Sequence[int], depths: Sequence[float] = (0.1, 0.5, 0.9), trials: int = 5, batch_size: int = 1
) -> None:
    """Raise ConfigError for arguments that ``evaluate_passkey`` would not accept; needs no model."""
    for length in lengths:
        require_whole("lengths", length, 1)
    for depth in depths:
        if not 0 <= depth <= 1:
            raise ConfigError(f"depths must lie between 0 and 1, got {depth!r}")
    require_distinct("lengths", lengths)
    require_distinct("depths", depths)
    for name, value, least in (("trials", trials, 1), ("batch_size", batch_size, 1)):
        require_whole(name, value, least)


def _join(key: str, filler: Sequence[str], boundary: int) -> str:
    """The prompt as text, the needle standing before filler sentence number ``boundary``."""
    return " ".join([INSTRUCTION, *filler[:boundary], NEEDLE.format(key=key), *filler[boundary:], QUESTION])


def _fill(tokenizer: Any, key: str, room: int, depth: float, bare: list[int]) -> tuple[list[str], int, list[int]]:
    """The most filler with which the prompt takes at most ``room`` tokens: sentences, needle's boundary, token ids.

    What each sentence costs is measured once, so the first guess is right for tokenizers that treat a sentence the
    same wherever it stands; whole prompts are tokenised to be sure, and the guess is corrected if it was off.
    """
    heads = [" ".join([INSTRUCTION, *_sentences(n)]) for n in range(len(FILLER), 2 * len(FILLER) + 1)]
    totals = [len(tokenize(tokenizer, head)) for head in heads]
    costs = [max(1, after - before) for before, after in itertools.pairwise(totals)]

    filler: list[str] = []
    boundary, ids, too_many = 0, bare, math.inf
    guess = _affordable(costs, 0, room - len(bare))
    while len(filler) < guess < too_many:
        sentences = _sentences(guess)
        offsets = [0, *itertools.accumulate(itertools.islice(itertools.cycle(costs), guess))]
        nearest = min(range(guess + 1), key=lambda i: abs(offsets[i] - depth * offsets[-1]))
        attempt = tokenize(tokenizer, _join(key, sentences, nearest))
        spare = room - len(attempt)
        if spare >= 0:
            filler, boundary, ids = sentences, nearest, attempt
            guess += _affordable(costs, guess, spare)
        else:
            too_many = guess
            guess -= max(1, -spare // max(costs))
    return filler, boundary, ids


def _sentences(n: int) -> list[str]:
    return list(itertools.islice(itertools.cycle(FILLER), n))


def _affordable(costs: Sequence[int], first: int, tokens: int) -> int:
    """How many sentences, from number ``first`` on, cost no more than ``tokens`` together."""
    totals = itertools.accumulate(itertools.islice(itertools.cycle(costs), first % len(costs), None))
    return sum(1 for _ in itertools.takewhile(lambda total: total <= tokens, totals))


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _decode(tokenizer: Any, ids: Sequence[int], *, spaced: bool) -> str:
    """The text of ``ids``; ``spaced`` closes up digits that the tokenizer's decoder has set apart."""
    text: str = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return re.sub(r"(?<=[0-9])\s+(?=[0-9])", "", text) if spaced else text


def _is_spaced(tokenizer: Any, sample: PasskeySample) -> bool:
    """Whether the decoder puts spaces between a key's digits (word-level vocabularies do)."""
    for spaced in (False, True):
        if _decode(tokenizer, sample.input_ids, spaced=spaced).count(sample.key) == 2:
            return spaced
    raise ConfigError(f"the tokenizer can't spell the key {sample.key}: its vocabulary needs the digits 0-9")


class ReusedPrefix:
    """The key-value cache of the prompt before, cut back to what the next prompt has in common with it."""

    def __init__(self, model: Any) -> None:
        self._cache = DynamicCache(config=model.config)
        self._tokens: Sequence[int] = ()
        # Transformers renamed the argument during 5.x.
        self._name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"

    @staticmethod
    def works_for(model: Any) -> bool:
        """Whether the model is one of Transformers', without sliding windows, whose caches can't be cut back."""
        config = getattr(model, "config", None)
        return isinstance(model, PreTrainedModel) and config is not None and window_layers(config) is None

    def continued(self, tokens: Sequence[int]) -> dict[str, DynamicCache]:
        """The argument of ``generate`` that lets it start where ``tokens`` leave the prompt before."""
        common = min(_common_prefix(self._tokens, tokens), len(tokens) - 1)  # one token is left to be read
        if surplus := self._cache.get_seq_length() - common:
            self._cache.crop(-surplus)
        self._tokens = tokens
        return {self._name: self._cache}


def _generate(
    model: Any, tokenizer: Any, batch: Sequence[PasskeySample], reused: ReusedPrefix | None
) -> list[list[int]]:
    """The tokens that ``model`` adds to each prompt of equal length, up to the first end-of-sequence token."""
    prompts = torch.tensor([sample.input_ids for sample in batch], device=model.device)
    config = _greedy(model, tokenizer, batch[0].max_new_tokens)
    with _sole_generation_config(model, config):
        cache = {} if reused is None else reused.continued(batch[0].input_ids)
        out = model.generate(
            input_ids=prompts, attention_mask=torch.ones_like(prompts), generation_config=config, **cache
        )
    ends = set(config.eos_token_id or ())
    return [
        list(itertools.takewhile(lambda token: token not in ends, row)) for row in out[:, prompts.shape[1] :].tolist()
    ]


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


def _row(length: int, depth: float, samples: Sequence[PasskeySample], answers: dict[str, str]) -> dict[str, Any]:
    from ctxext.evaluation.metrics import PasskeyAccuracy  # loads `evaluate`, which takes a second

    metric = PasskeyAccuracy().compute(
        predictions=[answers[s.id] for s in samples], references=[s.key for s in samples]
    )
    return {
        "length": length,
        "depth": float(depth),
        **metric,
        "wilson95": wilson95(metric["correct"], metric["trials"]),
    }


def _record(sample: PasskeySample, answer: str) -> dict[str, Any]:
    return {
        "id": sample.id,
        "length": sample.length,
        "depth": sample.depth,
        "trial": sample.trial,
        "key": sample.key,
        "answer": answer,
        "correct": score(answer, sample.key),
        "prompt_tokens": len(sample.input_ids),
        "prompt_sha256": sample.sha256,
        "needle_start": sample.needle_start,
        "depth_realised": sample.depth_realised,
    }
