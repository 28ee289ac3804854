"""Token losses against full-logits cross-entropy, and what they may cost in memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutput

import ctxext
import tiny
from ctxext.errors import ConfigError, UnsupportedModelError
from ctxext.evaluation import scoring
from ctxext.evaluation.scoring import check_head, check_length, check_positions, equal_batches, evaluating, token_nll


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """On tensors this small, threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def naive_nll(model: nn.Module, ids: Tensor, n_targets: int) -> Tensor:
    with torch.no_grad():
        log_p = model(input_ids=ids).logits.float().log_softmax(-1)
    losses = -log_p[:, :-1].gather(-1, ids[:, 1:, None]).squeeze(-1)
    return losses[:, losses.shape[1] - n_targets :]


class Counter(nn.Module):
    """Certain that the next id is this id plus one; ``step`` moves what it believes."""

    def __init__(self, step: int = 1) -> None:
        super().__init__()
        self.head = nn.Linear(tiny.VOCABULARY, tiny.VOCABULARY, bias=False)
        self.head.weight.data = torch.eye(tiny.VOCABULARY)
        self.step, self.device = step, torch.device("cpu")

    def believe(self, ids: Tensor) -> Tensor:
        return 1e4 * nn.functional.one_hot((ids + self.step) % tiny.VOCABULARY, tiny.VOCABULARY)

    def get_decoder(self) -> Any:
        return lambda input_ids, **_: BaseModelOutput(last_hidden_state=self.believe(input_ids))

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, input_ids: Tensor, **_: Any) -> CausalLMOutput:
        return CausalLMOutput(logits=self.head(self.get_decoder()(input_ids).last_hidden_state))


class Largest(TorchDispatchMode):
    """Remembers the largest tensor that any operation returned."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple) else (out,):
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_losses_equal_full_logits_cross_entropy_in_every_family(family: str) -> None:
    model, ids = tiny.model(family), tiny.tokens(61, batch=3)
    # fp32 matrix products of other shapes round differently; losses here reach 20 nats.
    torch.testing.assert_close(token_nll(model, ids, 60), naive_nll(model, ids, 60), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("n_targets", [1, 7, 33])
def test_only_the_last_targets_are_scored(n_targets: int) -> None:
    model, ids = tiny.model(), tiny.tokens(41, batch=2)
    expected = naive_nll(model, ids, n_targets)
    torch.testing.assert_close(token_nll(model, ids, n_targets), expected, rtol=1e-5, atol=1e-5)


def test_a_model_that_is_certain_and_right_loses_exactly_nothing() -> None:
    ids = (torch.arange(200) % tiny.VOCABULARY)[None]
    assert token_nll(Counter(), ids, 199).eq(0).all()


def test_a_model_that_is_one_token_off_loses_everywhere() -> None:
    ids = (torch.arange(200) % tiny.VOCABULARY)[None]
    assert token_nll(Counter(step=2), ids, 199).gt(1000).all()


@pytest.mark.parametrize("rows", [1, 7, 1024])
def test_the_size_of_the_slices_does_not_change_the_losses(rows: int) -> None:
    model, ids = tiny.model(), tiny.tokens(64, batch=2)
    # Rounding of matrix products of other shapes, on losses of up to 20 nats.
    torch.testing.assert_close(token_nll(model, ids, 63, rows=rows), token_nll(model, ids, 63), rtol=1e-6, atol=1e-5)


def test_the_head_never_sees_more_rows_than_a_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    model, seen = tiny.model(), []
    model.lm_head.register_forward_pre_hook(lambda module, args: seen.append(args[0].numel() // args[0].shape[-1]))
    monkeypatch.setattr(scoring, "SLICE_LOGITS", 10 * tiny.VOCABULARY)
    token_nll(model, tiny.tokens(64, batch=2), 31)
    assert max(seen) == 10
    assert sum(seen) == 62


def test_no_tensor_grows_with_length_times_vocabulary_or_length_squared(monkeypatch: pytest.MonkeyPatch) -> None:
    model, length = tiny.model(vocab_size=1024, max_position_embeddings=2048), 2048
    monkeypatch.setattr(scoring, "SLICE_LOGITS", 2**16)
    with Largest() as largest:
        token_nll(model, tiny.tokens(length), length - 1)
    widest = 128  # of the activations of one position; the weights are smaller still
    assert largest.elements <= max(2**16, length * widest)


@pytest.mark.parametrize("method", [ctxext.DCA, ctxext.DynamicYaRN])
def test_changed_attention_holds_no_score_for_every_pair_unless_it_is_the_naive_one(method: Any) -> None:
    length, elements = 1000, {}
    for attention in ("fused", "naive"):
        with ctxext.patch(tiny.model(max_position_embeddings=256), method(attention=attention)) as handle:
            with Largest() as largest:
                token_nll(handle.model, tiny.tokens(length), 10)
            elements[attention] = largest.elements
    assert elements["naive"] >= length**2
    assert elements["fused"] <= length * 256


def test_no_cache_is_allocated_and_no_mask_is_passed() -> None:
    model, calls = tiny.model(), []
    model.model.register_forward_hook(lambda module, args, kwargs, out: calls.append((kwargs, out)), with_kwargs=True)
    token_nll(model, tiny.tokens(20), 19)
    [(kwargs, out)] = calls
    assert kwargs["use_cache"] is False
    assert kwargs["attention_mask"] is None
    assert not [name for name in ("cache", "past_key_values") if getattr(out, name, None) is not None]


def test_cross_entropy_of_a_bfloat16_model_is_taken_in_float32() -> None:
    model, ids = tiny.model().to(torch.bfloat16), tiny.tokens(64)
    losses = token_nll(model, ids, 63)
    assert losses.dtype == torch.float32
    assert not torch.equal(losses, losses.bfloat16().float())
    # Logits are the same bfloat16 numbers up to one unit in the last place, 2**-3 for logits up to 32.
    torch.testing.assert_close(losses, naive_nll(model, ids, 63), rtol=0.0, atol=0.125)


@pytest.mark.parametrize("n_targets", [0, 20, -1])
def test_more_targets_than_the_input_has_is_an_error(n_targets: int) -> None:
    with pytest.raises(ConfigError, match="between 1 and 19"):
        token_nll(tiny.model(), tiny.tokens(20), n_targets)


def test_lora_weights_take_part() -> None:
    peft = pytest.importorskip("peft")
    model, ids = tiny.model(), tiny.tokens(40)
    plain = token_nll(model, ids, 39)
    wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "lm_head"], init_lora_weights=False))
    check_head(wrapped)
    losses = token_nll(wrapped, ids, 39)
    torch.testing.assert_close(losses, naive_nll(wrapped, ids, 39), rtol=1e-5, atol=1e-5)
    assert (losses - plain).abs().max() > 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_supported_families_pass_the_check_of_the_head(family: str, dtype: torch.dtype) -> None:
    check_head(tiny.model(family).to(dtype))


@pytest.mark.parametrize(
    "change",
    [lambda logits: logits * 1.1, lambda logits: 30 * torch.tanh(logits / 30)],
    ids=["scaled", "capped"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_that_changes_its_logits_after_the_head_is_refused(change: Any, dtype: torch.dtype) -> None:
    model = tiny.model(initializer_range=1.0).to(dtype)

    def changed(module: nn.Module, args: Any, out: CausalLMOutput) -> CausalLMOutput:
        out.logits = change(out.logits)
        return out

    model.register_forward_hook(changed)
    with pytest.raises(UnsupportedModelError, match="scaled or capped"):
        check_head(model)


def test_a_model_without_an_output_head_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="no decoder with an output head"):
        check_head(tiny.model().model)


@pytest.fixture
def half_trained() -> nn.Module:
    model = tiny.model(attention_dropout=0.5).train()
    model.lm_head.eval()
    return model


def test_evaluation_runs_without_dropout_and_leaves_every_mode_as_it_was(half_trained: nn.Module) -> None:
    before = [module.training for module in half_trained.modules()]
    ids = tiny.tokens(30)
    with evaluating(half_trained) as cost:
        assert torch.equal(token_nll(half_trained, ids, 29), token_nll(half_trained, ids, 29))
    assert [module.training for module in half_trained.modules()] == before
    assert cost.wall_seconds > 0
    assert cost.peak_memory_bytes is not None
    assert cost.peak_memory_bytes > 2**24


def test_modes_are_restored_after_an_error(half_trained: nn.Module) -> None:
    before = [module.training for module in half_trained.modules()]
    with pytest.raises(RuntimeError, match="boom"), evaluating(half_trained):
        raise RuntimeError("boom")
    assert [module.training for module in half_trained.modules()] == before


def test_batches_hold_equal_items_only_and_lose_none() -> None:
    items = ["a", "bb", "c", "dd", "e", "ff", "ggg"]
    assert list(equal_batches(items, 2, key=len)) == [["a", "c"], ["bb", "dd"], ["e"], ["ff"], ["ggg"]]


@pytest.mark.parametrize("changes", [{"rope_type": "dynamic"}, {"rope_type": "longrope", "short": 1.0, "long": 4.0}])
def test_positions_that_depend_on_the_input_length_are_refused(changes: dict[str, Any]) -> None:
    parameters = {"rope_type": changes["rope_type"], "rope_theta": 1e4, "factor": 4.0}
    if "long" in changes:
        parameters |= {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "original_max_position_embeddings": 64}
    with pytest.raises(UnsupportedModelError, match="depends on the length of the input"):
        check_positions(tiny.model(rope_parameters=parameters))
    patched = tiny.model()
    ctxext.patch(patched, ctxext.LongRoPE(factor=4, long_factor=[2] * 8))
    check_positions(patched)


def test_a_text_longer_than_an_attention_method_is_set_to_read_is_refused() -> None:
    model = tiny.model()
    check_length(model, 10_000)
    with ctxext.patch(model, ctxext.DCA()):
        check_length(model, 4 * tiny.TRAINED)
        with pytest.raises(ctxext.ConfigError, match=r"257 tokens.*dca.*\(256\).*max_position_embeddings=257"):
            check_length(model, 4 * tiny.TRAINED + 1)
    with ctxext.patch(model, ctxext.DynamicYaRN(max_position_embeddings=1000)):
        check_length(model, 1000)
    with ctxext.patch(model, ctxext.YaRN(factor=2)):  # whose config says how far it reaches
        check_length(model, 10_000)


@pytest.mark.parametrize(
    "method", [None, ctxext.YaRN(factor=4), ctxext.DynamicYaRN(), ctxext.DCA()], ids=["plain", "yarn", "dynamic", "dca"]
)
def test_decoding_token_by_token_gives_the_losses_of_one_pass(method: ctxext.Method | None) -> None:
    model = tiny.model()
    if method is not None:
        ctxext.patch(model, method)
    ids = tiny.tokens(150, batch=2)
    calls = []
    model.model.register_forward_hook(lambda *_: calls.append(1))
    decoded = scoring.decoded_nll(model, ids, 140)
    assert len(calls) == 149
    assert decoded.shape == (2, 140)
    assert torch.allclose(decoded, token_nll(model, ids, 140), atol=2e-4)
