"""RULER's tasks: prompts that fit and fill, facts that stand where and as often as they should, scores read as text."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import random
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_passkey import byte_level_bpe, characters, word_level
from tokenizers import Tokenizer, decoders, models, normalizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from ctxext.data import tokenize
from ctxext.errors import ConfigError
from ctxext.evaluation import ruler_tasks as ruler
from ctxext.evaluation import words as drawn
from ctxext.evaluation.prompts import Prompt
from ctxext.evaluation.ruler_tasks import TASKS, build_prompt, score

# The most characters that one unit takes with the blank before it: what a prompt may leave unused at one token each.
UNIT_CHARACTERS = {"niah_needle": 29, "cwe": 21, "fwe": 7, "kv": 82} | dict.fromkeys(
    ("niah_single", "niah_multikey", "niah_multivalue", "niah_multiquery", "vt"), 24
)
NIAH = [task for task in TASKS if task.startswith("niah")]


def sentencepiece_like() -> PreTrainedTokenizerFast:
    """Blanks are part of the tokens, no split into words, unknown characters as bytes: how LLaMA 2's reads text."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    specials = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    letters = [chr(code) for code in range(33, 127)]
    trainer = trainers.BpeTrainer(vocab_size=640, special_tokens=specials, initial_alphabet=letters)
    tokenizer.train_from_iterator([*ruler.NOISE, ruler.NIAH_HEAD, ruler.NEEDLE, ruler.KV_HEAD], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        clean_up_tokenization_spaces=False,
    )


TOKENIZERS: dict[str, Callable[[], Any]] = {
    "bpe": byte_level_bpe,
    "sentencepiece": sentencepiece_like,
    "words": word_level,
    "characters": characters,
}


@pytest.fixture(scope="module", params=TOKENIZERS)
def tokenizer(request: pytest.FixtureRequest) -> Any:
    return TOKENIZERS[request.param]()


@pytest.fixture(scope="module")
def bpe() -> PreTrainedTokenizerFast:
    return byte_level_bpe()


def prompt_of(tokenizer: Any, task: str, **changes: Any) -> Prompt:
    return build_prompt(tokenizer, **{"task": task, "length": 1024, "index": 0} | changes)


def text_of(tokenizer: Any, prompt: Prompt) -> str:
    return tokenizer.decode(prompt.input_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def least_length(tokenizer: Any, task: str) -> int:
    """The length that the error for a short one names."""
    with pytest.raises(ConfigError) as error:
        prompt_of(tokenizer, task, length=10)
    return int(str(error.value).split("at least ")[1].split()[0])


def codes_in(text: str) -> list[tuple[str, str]]:
    return re.findall(r"A code of ([a-z]+) is ([0-9]+)\.", text)


def asked_in(text: str) -> list[str]:
    """The words whose codes are asked for."""
    names = re.search(r"Answer: .*codes? of (.+) (?:is|are)$", text)
    assert names is not None
    return re.split(r", | and ", names.group(1))


def variables_holding(text: str) -> list[str]:
    """Run the statements in order; then the names that hold the number asked for, in the order they were set."""
    values: dict[str, str] = {}
    for name, source in re.findall(r"VAR (\w+) = (?:VAR )?(\w+)\.", text):
        values[name] = source if source.isdigit() else values[source]
    wanted = re.search(r"that hold ([0-9]+) are$", text)
    assert wanted is not None
    return [name for name, value in values.items() if value == wanted.group(1)]


def entries_of(text: str) -> Counter[str]:
    return Counter(text.split("\n")[1].split(" "))


def pairs_in(text: str) -> list[tuple[str, str]]:
    return json.loads(text.split("\n")[1], object_pairs_hook=list)


def solved(task: str, text: str) -> list[str]:
    """The answers of a reader who makes no mistakes, from nothing but the text."""
    if task == "vt":
        return variables_holding(text)
    if task == "kv":
        return [dict(pairs_in(text))[text.rsplit('"', 2)[1]]]
    if task in ("cwe", "fwe"):
        counts = entries_of(text)
        del counts["..."]
        return [word for word, _ in counts.most_common(10 if task == "cwe" else 3)]
    return [code for name in asked_in(text) for key, code in codes_in(text) if key == name]


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("length", [512, 777, 1024, 1801, 4096, 8192])
def test_prompt_and_answer_fill_the_length_to_within_one_unit(tokenizer: Any, task: str, length: int) -> None:
    if length < 900 and task in ("cwe", "fwe", "kv") and length < least_length(tokenizer, task):
        pytest.skip("most words or uuids take too many of these tokens")
    prompt = prompt_of(tokenizer, task, length=length)
    spare = length - len(prompt.input_ids) - prompt.max_new_tokens
    # Our small vocabularies know few of the letters, so that no text takes more tokens than it has characters.
    assert 0 <= spare < UNIT_CHARACTERS[task]
    assert length - prompt.forced_start - len(prompt.forced_ids) >= 0


@pytest.mark.parametrize("task", TASKS)
def test_one_unit_more_would_not_fit(tokenizer: Any, task: str) -> None:
    prompt = prompt_of(tokenizer, task, length=1300)
    draft = TASKS[task].draft(ruler.Draws(prompt.id, 1300))
    start = len(prompt.input_ids) - len(tokenize(tokenizer, draft.text(prompt.details["units"])))
    assert start == (tokenizer.bos_token_id is not None)
    more = len(tokenize(tokenizer, draft.text(prompt.details["units"] + 1)))
    assert start + more + prompt.max_new_tokens > 1300


@pytest.mark.parametrize("task", TASKS)
def test_a_reader_of_the_text_scores_one_and_silence_zero(bpe: Any, task: str) -> None:
    for index in range(5):
        prompt = prompt_of(bpe, task, length=1400, index=index)
        continuation = " " + ", ".join(solved(task, text_of(bpe, prompt)))
        assert score(continuation, prompt.answers) == (1.0, 1.0)
        assert score("", prompt.answers) == (0.0, 0.0)


@pytest.mark.parametrize("task", TASKS)
def test_the_reader_of_another_prompt_scores_zero(bpe: Any, task: str) -> None:
    prompts = [prompt_of(bpe, task, index=index) for index in range(4)]
    for one, other in itertools.permutations(prompts, 2):
        assert score(", ".join(one.answers), other.answers) == (0.0, 0.0)


@pytest.mark.parametrize("task", TASKS)
def test_the_forced_answer_spells_all_answers_behind_the_prompt(bpe: Any, task: str) -> None:
    prompt = prompt_of(bpe, task)
    whole = bpe.decode(prompt.input_ids[: prompt.forced_start] + prompt.forced_ids, skip_special_tokens=True)
    continuation = whole.removeprefix(text_of(bpe, prompt))
    expected = " " + ", ".join(prompt.answers)
    assert continuation == (expected if task != "kv" else f' "{prompt.answers[0]}"')
    assert prompt.max_new_tokens == len(prompt.forced_ids) + 8


@pytest.mark.parametrize("task", TASKS)
def test_there_is_room_to_generate_the_whole_answer(tokenizer: Any, task: str) -> None:
    prompt = prompt_of(tokenizer, task)
    assert len(prompt.forced_ids) <= prompt.max_new_tokens <= len(prompt.forced_ids) + 9
    assert prompt.forced_start <= len(prompt.input_ids)


@pytest.mark.parametrize("task", TASKS)
def test_the_prompt_does_not_end_in_whitespace(tokenizer: Any, task: str) -> None:
    text = text_of(tokenizer, prompt_of(tokenizer, task))
    assert text == text.rstrip()


@pytest.mark.parametrize("task", TASKS)
def test_no_special_token_but_one_leading_bos_is_in_the_prompt(bpe: Any, task: str) -> None:
    for policy, bos in (("auto", [0]), ("always", [0]), ("never", [])):
        ids = prompt_of(bpe, task, bos=policy).input_ids
        assert [token for token in ids if token in bpe.all_special_ids] == bos
        assert ids[: len(bos)] == bos


@pytest.mark.parametrize("task", TASKS)
def test_answers_differ_and_none_stands_inside_another(bpe: Any, task: str) -> None:
    for index in range(10):
        answers = prompt_of(bpe, task, index=index).answers
        assert not any(a in b for a, b in itertools.permutations(answers, 2))


@pytest.mark.parametrize("task", [*NIAH, "kv"])
def test_each_value_stands_in_the_prompt_once(bpe: Any, task: str) -> None:
    for index in range(10):
        prompt = prompt_of(bpe, task, index=index)
        text = text_of(bpe, prompt)
        assert [text.count(answer) for answer in prompt.answers] == [1] * len(prompt.answers)


@pytest.mark.parametrize(
    ("task", "keys", "codes", "asked"),
    [
        ("niah_single", 1, 1, 1),
        ("niah_multikey", 4, 4, 1),
        ("niah_multivalue", 1, 4, 1),
        ("niah_multiquery", 4, 4, 4),
    ],
)
def test_noise_hides_as_many_keys_and_codes_as_the_task_says(
    bpe: Any, task: str, keys: int, codes: int, asked: int
) -> None:
    for index in range(5):
        prompt = prompt_of(bpe, task, index=index)
        text = text_of(bpe, prompt)
        found = codes_in(text)
        assert len({key for key, _ in found}) == keys
        assert len({code for _, code in found}) == len(found) == codes
        assert len(asked_in(text)) == asked
        assert all(len(code) == 7 for _, code in found)
        assert sum(map(str.isdigit, text)) == 7 * codes
        noise = re.sub(r"A code of [a-z]+ is [0-9]+\.", "", text.split("\n")[1])
        assert set(re.findall(r"[A-Z][^.]*\.", noise)) <= set(ruler.NOISE)
        assert len(re.findall(r"[A-Z][^.]*\.", noise)) == prompt.details["units"]


def test_the_order_of_the_codes_in_the_answer_is_that_of_the_question_or_of_the_text(bpe: Any) -> None:
    orders = set()
    for index in range(12):
        text = text_of(bpe, prompt_of(bpe, "niah_multiquery", index=index))
        orders.add(tuple([key for key, _ in codes_in(text)].index(name) for name in asked_in(text)))
        values = prompt_of(bpe, "niah_multivalue", index=index)
        assert [code for _, code in codes_in(text_of(bpe, values))] == list(values.answers)
    assert len(orders) > 4


def test_a_haystack_of_needles_holds_nothing_else_and_repeats_none(bpe: Any) -> None:
    prompt = prompt_of(bpe, "niah_needle", length=4096)
    haystack = text_of(bpe, prompt).split("\n")[1]
    found = codes_in(haystack)
    assert re.sub(r"A code of [a-z]{6} is [0-9]{7}\.", "", haystack).strip() == ""
    assert len(found) == prompt.details["units"] + 3 + 1
    assert len({key for key, _ in found}) == len({code for _, code in found}) == len(found)


@pytest.mark.parametrize("task", [*NIAH, "vt", "kv"])
def test_start_points_at_the_needle(tokenizer: Any, task: str) -> None:
    for index in range(3):
        prompt = prompt_of(tokenizer, task, length=1500, index=index)
        needles = TASKS[task].draft(ruler.Draws(prompt.id, 1500)).needles
        places = prompt.details["needles"]
        assert len(places) == len(needles)
        assert [place["start"] for place in places] == sorted({place["start"] for place in places})
        for place, needle in zip(places, needles, strict=True):
            after = squeezed(tokenizer.decode(prompt.input_ids[place["start"] :]))
            assert after.removeprefix("{").startswith(squeezed(tokenizer.decode(tokenize(tokenizer, needle)))[:-1])


@pytest.mark.parametrize("task", [*NIAH, "vt", "kv"])
def test_depth_is_the_share_of_the_haystack_before_the_needle(bpe: Any, task: str) -> None:
    prompt = prompt_of(bpe, task, length=4096)
    haystack = text_of(bpe, prompt).split("\n")[1]
    needles = TASKS[task].draft(ruler.Draws(prompt.id, 4096)).needles
    shares = [haystack.index(needle) / len(haystack) for needle in needles]  # of characters, nearly those of tokens
    assert [place["depth"] for place in prompt.details["needles"]] == pytest.approx(shares, abs=0.02)
    assert all(0 <= place["depth"] < 1 for place in prompt.details["needles"])


def squeezed(text: str) -> str:
    return re.sub(r"\s", "", text)


def test_the_needles_asked_for_are_marked(bpe: Any) -> None:
    prompt = prompt_of(bpe, "niah_multikey")
    [asked] = [place for place in prompt.details["needles"] if place["asked"]]
    assert codes_in(bpe.decode(prompt.input_ids[asked["start"] :]))[0][1] == prompt.answers[0]
    assert all(place["asked"] for place in prompt_of(bpe, "vt").details["needles"])


@pytest.mark.parametrize("task", ["niah_single", "niah_needle", "kv"])
def test_depths_cover_the_whole_haystack(task: str) -> None:
    tokenizer = word_level()
    depths = [prompt_of(tokenizer, task, index=index).details["needles"][0]["depth"] for index in range(60)]
    assert min(depths) < 0.1
    assert max(depths) > 0.9
    assert sum(depths) / 60 == pytest.approx(0.5, abs=0.12)  # three standard errors of a uniform mean


def test_needles_stand_at_sentence_boundaries(bpe: Any) -> None:
    for task in (*NIAH, "vt"):
        haystack = text_of(bpe, prompt_of(bpe, task)).split("\n")[1]
        for needle in re.finditer(r"(A code|VAR \w+ =) [^.]*\.", haystack):
            assert haystack[: needle.start()].endswith(". ") or needle.start() == 0
            assert haystack[needle.end() :].startswith(" ") or needle.end() == len(haystack)


def test_variables_form_one_chain_of_four_hops(bpe: Any) -> None:
    for index in range(5):
        prompt = prompt_of(bpe, "vt", index=index)
        text = text_of(bpe, prompt)
        assert variables_holding(text) == list(prompt.answers)
        assert len(set(prompt.answers)) == 5
        assert len(re.findall(r"VAR \w+ = VAR \w+\.", text)) == 4
        assert len(re.findall(r"VAR \w+ = [1-9][0-9]{4}\.", text)) == 1
        assert text.count("VAR") == 9
        # Every name but the last is set once and read once.
        assert [text.count(name) for name in prompt.answers] == [2, 2, 2, 2, 1]


@pytest.mark.parametrize(("length", "often", "rarely"), [(1024, 6, 1), (4095, 6, 1), (4096, 30, 3), (8192, 30, 3)])
def test_ten_words_are_common_and_all_others_rare(bpe: Any, length: int, often: int, rarely: int) -> None:
    prompt = prompt_of(bpe, "cwe", length=length)
    counts = entries_of(text_of(bpe, prompt))
    assert {word for word, count in counts.items() if count == often} == set(prompt.answers)
    assert Counter(counts.values()) == {often: 10, rarely: prompt.details["units"] + 10}
    assert (prompt.details["often"], prompt.details["rarely"]) == (often, rarely)
    assert prompt.details["counts"] == [often] * 10


def test_common_words_are_spread_over_the_list(bpe: Any) -> None:
    prompt = prompt_of(bpe, "cwe", length=8192)
    entries = text_of(bpe, prompt).split("\n")[1].split(" ")
    half = Counter(entries[: len(entries) // 2])
    assert all(4 <= half[word] <= 26 for word in prompt.answers)  # four standard deviations about 15


@pytest.mark.parametrize("length", [900, 1024, 4096, 8192])
def test_coded_words_have_zeta_frequencies_and_a_clear_top_three(bpe: Any, length: int) -> None:
    prompt = prompt_of(bpe, "fwe", length=length)
    counts = entries_of(text_of(bpe, prompt))
    ranked = [count for _, count in counts.most_common()]
    assert ranked[0] == counts["..."]
    for rank, count in enumerate(ranked, 1):
        assert ranked[0] // rank**2 - 1 <= count <= ranked[0] // rank**2
    assert [counts[answer] for answer in prompt.answers] == ranked[1:4] == prompt.details["counts"]
    assert ranked[1] > ranked[2] > ranked[3] > ranked[4]


def test_the_top_three_of_coded_words_are_clear_whatever_the_size() -> None:
    draft = TASKS["fwe"].draft(ruler.Draws("any", 8192))
    for n in range(400):
        counts = Counter(draft.body(n))
        assert sum(counts.values()) == n + 96
        a, b, c = (counts[answer] for answer in draft.answers)
        others = [count for word, count in counts.items() if word not in ("...", *draft.answers)]
        assert a > b > c > max(others)


def test_json_parses_and_holds_the_pair_asked_for_among_others(bpe: Any) -> None:
    for index in range(5):
        prompt = prompt_of(bpe, "kv", length=2048, index=index)
        text = text_of(bpe, prompt)
        pairs = pairs_in(text)
        assert len(pairs) == prompt.details["units"] + 3 + 1
        key = text.rsplit('"', 2)[1]
        assert dict(pairs)[key] == prompt.answers[0]
        strings = [string for pair in pairs for string in pair]
        assert len(set(strings)) == len(strings)
        assert all(
            re.fullmatch(r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}", s) for s in strings
        )


@pytest.mark.parametrize("task", TASKS)
def test_a_shorter_body_is_the_longer_one_with_parts_left_out(task: str) -> None:
    draft = TASKS[task].draft(ruler.Draws("any", 1024))
    bodies = [[part for part in draft.body(n) if part not in draft.needles] for n in (0, 1, 7, 30)]
    for short, long in itertools.pairwise(bodies):
        rest = iter(long)
        assert all(part in rest for part in short)


BUILD = """
import json, sys
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast
from ctxext.evaluation.ruler_tasks import build_prompt
tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(sys.stdin.read()), bos_token="<s>")
prompts = [
    build_prompt(tokenizer, task=task, length=length, index=index, seed=7)
    for task, length, index in json.loads(sys.argv[1])
]
print(json.dumps([[p.id, p.answers, p.sha256, p.details] for p in prompts]))
"""


def test_prompts_are_the_same_in_every_process_and_order(bpe: Any) -> None:
    cells = [(task, length, index) for task in TASKS for length in (800, 1024) for index in (0, 1)]
    here = [prompt_of(bpe, task, length=n, index=index, seed=7) for task, n, index in cells]
    environment = {**os.environ, "PYTHONHASHSEED": "12345"}  # this process's is random, or 0
    command = [sys.executable, "-c", BUILD, json.dumps(cells[::-1])]
    run = subprocess.run(
        command, input=bpe.backend_tokenizer.to_str(), env=environment, capture_output=True, text=True, check=True
    )
    assert json.loads(run.stdout) == [[p.id, list(p.answers), p.sha256, p.details] for p in here[::-1]]


def test_drawing_leaves_the_global_generator_alone(bpe: Any) -> None:
    random.seed(1)
    before = random.getstate()
    for task in TASKS:
        prompt_of(bpe, task)
    assert random.getstate() == before


def test_every_argument_of_the_identity_changes_the_prompt(bpe: Any) -> None:
    for task in TASKS:
        changes: list[dict[str, Any]] = [{}, {"index": 1}, {"seed": 1}, {"length": 1025}]
        prompts = [prompt_of(bpe, task, **change) for change in changes]
        assert prompts[0].id == f"{task}|0|1024|0"
        assert len({prompt.id for prompt in prompts}) == len({prompt.answers for prompt in prompts}) == 4


def test_details_are_json_ready(tokenizer: Any) -> None:
    for task in TASKS:
        details = prompt_of(tokenizer, task).details
        assert json.loads(json.dumps(details)) == details


def test_the_prompts_are_those_of_their_version() -> None:
    texts = [TASKS[task].draft(ruler.Draws(f"{task}|0|1024|0", 1024)).text(20) for task in TASKS]
    digest = hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]
    # If this fails, prompts have changed, and no result can be compared with earlier ones: raise the version too.
    assert (ruler.PROMPT_VERSION, digest) == ("ruler-v1", "e827baffb480d221")


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("length", [1, 20, 40])
def test_a_length_below_the_shortest_prompt_is_an_error_at_once(tokenizer: Any, task: str, length: int) -> None:
    began = time.perf_counter()
    with pytest.raises(ConfigError, match=rf"length {length} is too short .* task {task}: .* at least \d+ tokens") as e:
        prompt_of(tokenizer, task, length=length)
    assert time.perf_counter() - began < 1
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("task", TASKS)
def test_the_shortest_length_that_the_error_names_works(tokenizer: Any, task: str) -> None:
    least = least_length(tokenizer, task)
    # Another length draws other words, which may take more tokens.
    assert any(fits(tokenizer, task, length) for length in range(least, least + 60, 3))


def fits(tokenizer: Any, task: str, length: int) -> bool:
    try:
        prompt_of(tokenizer, task, length=length)
    except ConfigError:
        return False
    return True


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task": "niah_singel"}, r"'niah_singel' is not a RULER task \(niah_single, .*did you mean 'niah_single'"),
        ({"length": 0}, "length must be a whole number of at least 1, got 0"),
        ({"length": 512.0}, "length must be a whole number"),
        ({"index": -1}, "index must be a whole number of at least 0, got -1"),
        ({"index": True}, "index must be a whole number"),
        ({"seed": 0.5}, "seed must be a whole number"),
        ({"bos": "atuo"}, "did you mean 'auto'"),
    ],
)
def test_arguments_out_of_range_are_one_line_errors(bpe: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        build_prompt(bpe, **{"task": "niah_single", "length": 1024, "index": 0} | changes)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("continuation", "answers", "contained", "strict"),
    [
        ("91234", ["123"], 1.0, 0.0),
        (" 123, 456.", ["123", "456"], 1.0, 1.0),
        (" 123 and 789", ["123", "456"], 0.5, 0.5),
        (" 123456", ["123", "456"], 1.0, 0.0),
        ("x 1234 y 123", ["123"], 1.0, 1.0),
        ("_123_", ["123"], 1.0, 1.0),
        ("é123", ["123"], 1.0, 0.0),
        (" Kabolu, ZIMURA", ["kabolu", "zimura"], 1.0, 1.0),
        (" kabolu", ["KABOLU"], 1.0, 1.0),
        ("a.c", ["abc"], 0.0, 0.0),
        ("abc", ["a.c"], 0.0, 0.0),
        ("", ["123"], 0.0, 0.0),
    ],
)
def test_scores_are_shares_of_answers(continuation: str, answers: list[str], contained: float, strict: float) -> None:
    assert score(continuation, answers) == (contained, strict)


@given(st.text(), st.lists(st.text(min_size=1), min_size=1))
def test_the_strict_score_never_exceeds_containment(continuation: str, answers: list[str]) -> None:
    contained, strict = score(continuation, answers)
    assert 0 <= strict <= contained <= 1


@pytest.mark.parametrize("answers", [[], [""], ["123", ""]])
def test_nothing_to_look_for_is_an_error(answers: list[str]) -> None:
    with pytest.raises(ConfigError, match="answers must hold at least one string"):
        score("123", answers)


def test_words_are_distinct_of_equal_length_and_more_than_any_prompt_needs() -> None:
    taken = list(itertools.islice(drawn.words(random.Random(0)), 20_000))
    assert len(set(taken)) == 20_000
    assert all(re.fullmatch("([b-df-hj-np-tv-z][aeiou]){3}", word) for word in taken)


def test_no_word_stands_in_the_wording_of_a_prompt() -> None:
    templates = [value for name, value in vars(ruler).items() if name.isupper() and isinstance(value, str)]
    wording = " ".join([*templates, *ruler.NOISE]).lower()
    every = set(drawn.words(random.Random(0)))
    assert len(every) == drawn.WORD_COUNT
    assert not [wording[i : i + 6] for i in range(len(wording)) if wording[i : i + 6] in every]


@given(st.integers(0, 40), st.integers(0, 2**32))
def test_a_permutation_takes_every_number_once(n: int, seed: int) -> None:
    assert sorted(drawn.permutation(random.Random(seed), n)) == list(range(n))


def test_permutations_are_uniform() -> None:
    counts = Counter(tuple(drawn.permutation(random.Random(seed), 3)) for seed in range(6000))
    assert len(counts) == 6
    assert all(850 < count < 1150 for count in counts.values())  # five standard deviations about 1000


def test_a_stream_shows_the_same_items_whatever_was_asked_before() -> None:
    one, other = (drawn.Stream(drawn.numbers(random.Random(3), 5)) for _ in range(2))
    other.first(50)
    assert one.first(7) == other.first(7) == one.first(9)[:7]


def test_a_stream_that_runs_out_says_so() -> None:
    with pytest.raises(ConfigError, match="only 9 different items, 10 are needed"):
        drawn.Stream(drawn.numbers(random.Random(0), 1)).first(10)
