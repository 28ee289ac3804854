"""Methods that users write themselves, those that change attention among them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import ctxext
import tiny
from ctxext.attention.partition import Block, Partition, Region
from ctxext.rope import RopeSpec, default_inv_freq
from patches import assert_as_before, snapshot

pytestmark = [
    pytest.mark.usefixtures("strictly"),
    pytest.mark.filterwarnings("error:.*deprecated"),
    # PyTorch's own compiler still uses it.
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated"),
]


class Squeeze(ctxext.Method):
    """Half of the frequencies interpolated, the other half kept; sharper attention."""

    title: ClassVar[str] = "Squeeze"
    reference: ClassVar[str] = "none"
    name: Literal["squeeze"] = "squeeze"
    flaw: str | None = None

    def scaled_rope(self, spec: RopeSpec) -> tuple[torch.Tensor, float]:
        inv_freq = default_inv_freq(spec.rope_theta, spec.rotary_dim)
        slow = torch.arange(inv_freq.numel()) >= inv_freq.numel() // 2
        result = torch.where(slow, inv_freq / self.lengths(spec).factor, inv_freq)
        flawed: dict[str | None, Any] = {"nan": result * math.nan, "too many": result.repeat(2)}
        return flawed.get(self.flaw, result), 1.1

    def rope_parameters(self, spec: RopeSpec) -> dict[str, Any]:
        if self.flaw == "other export":
            return {"rope_type": "linear", "rope_theta": spec.rope_theta, "factor": 4.0}
        if self.flaw == "no export":
            return {"rope_type": "squeeze", "rope_theta": spec.rope_theta}
        return super().rope_parameters(spec)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_a_method_of_a_user_is_patched_and_saved(family: str, tmp_path: Path) -> None:
    model, ids = tiny.model(family), tiny.tokens(101)
    plain = tiny.logits(model, ids)
    handle = ctxext.patch(model, Squeeze(factor=4))
    extended = tiny.logits(model, ids)
    assert tiny.difference(extended, plain) > 1e-2
    model.save_pretrained(tmp_path)
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert tiny.difference(tiny.logits(reloaded, ids), extended) < 1e-4
    again = ctxext.patch(reloaded, Squeeze(factor=4))
    assert again.spec == handle.spec
    assert torch.equal(reloaded.base_model.rotary_emb.inv_freq, handle.rotary.inv_freq)


@pytest.mark.parametrize("flaw", ["nan", "too many", "other export", "no export"])
def test_a_method_that_is_wrong_is_refused_and_the_model_restored(flaw: str) -> None:
    model = tiny.model()
    before = snapshot(model)
    with pytest.raises(ctxext.CtxextError):
        ctxext.patch(model, Squeeze(factor=4, flaw=flaw))
    assert_as_before(model, before)


def test_frequencies_in_another_precision_are_taken() -> None:
    class Double(Squeeze):
        def scaled_rope(self, spec: RopeSpec) -> tuple[torch.Tensor, float]:
            inv_freq, attention_factor = super().scaled_rope(spec)
            return inv_freq.double() * (1 + 1e-9), attention_factor

    model, reference = tiny.model(), tiny.model()
    ctxext.patch(model, Double(factor=4))
    ctxext.patch(reference, Squeeze(factor=4))
    assert tiny.difference(tiny.logits(model, tiny.tokens(101)), tiny.logits(reference, tiny.tokens(101))) < 1e-3


@dataclass(frozen=True, eq=False)
class Clamped(Partition):
    """Distances up to a limit, and the limit beyond it; every query is a block of its own."""

    limit: int
    flaw: str | None = None

    def describe(self) -> str:
        return f"distances up to {self.limit}"

    def relative_positions(self, query: Tensor, key: Tensor) -> Tensor:
        return (query[:, None] - key).clamp(max=self.limit)

    def frequencies_at(self, query: Tensor) -> tuple[Tensor, Tensor]:
        gain = torch.full((len(query),), 1.5 if self.flaw == "gain" else 1.0)
        return self.inv_freq.expand(len(query), -1) * (2 if self.flaw == "frequencies" else 1), gain

    def blocks(self, positions: Tensor, first: int) -> list[Block]:
        blocks = []
        for i in range(first, len(positions)):
            own = positions[i : i + 1]
            limit = self.limit + (self.flaw == "positions")
            keys = torch.maximum(positions[: i + 1], own - limit)
            start = int(self.flaw == "a key left out" and i > 0)
            region = Region(slice(start, i + 1), own, turned=True)
            blocks.append(Block(slice(i, i + 1), (region,), self.inv_freq, keys, step=int(own)))
        return blocks


class Near(ctxext.Method):
    """A user's method that changes attention: no distance is seen as larger than a limit."""

    title: ClassVar[str] = "Near"
    reference: ClassVar[str] = "none"
    name: Literal["near"] = "near"
    limit: int = 20
    flaw: str | None = None

    @property
    def changes_attention(self) -> bool:
        return True

    def scaled_rope(self, spec: RopeSpec) -> tuple[torch.Tensor, float]:
        return default_inv_freq(spec.rope_theta, spec.rotary_dim), 1.0

    def partition(self, spec: RopeSpec) -> Clamped:
        return Clamped(
            inv_freq=self.scaled_rope(spec)[0],
            attention_factor=1.0,
            period=1,
            identity_length=self.limit + 1,
            limit=self.limit,
            flaw=self.flaw,
        )


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_attention_of_a_users_method_sees_the_positions_that_it_says(family: str) -> None:
    # In a model of one layer, a row of the logits depends on the positions in its own row of the scores alone, so that
    # stock attention gives one row after the other if it is handed these as the positions of the keys.
    model, plain, ids = (
        tiny.model(family, num_hidden_layers=1),
        tiny.model(family, num_hidden_layers=1),
        tiny.tokens(61),
    )
    ctxext.patch(model, Near(factor=4))
    ours = tiny.logits(model, ids)
    assert tiny.difference(ours, tiny.logits(plain, ids)) > 1e-2
    for i in range(0, 61, 4):
        positions = torch.arange(61).clamp(min=i - 20)[None]
        row = tiny.logits(plain, ids, position_ids=positions, attention_mask=torch.ones_like(ids), use_cache=False)[
            :, i
        ]
        assert tiny.difference(ours[:, i], row) < 1e-4, i


def test_a_users_method_that_changes_attention_is_inspected_saved_and_undone(tmp_path: Path) -> None:
    model, ids = tiny.model(), tiny.tokens(61)
    model.save_pretrained(tmp_path)  # notes dtype and class in the config, which taking the patch off keeps
    before, plain = snapshot(model), tiny.logits(model, ids)
    handle = ctxext.patch(model, Near(factor=4))
    extended = tiny.logits(model, ids)
    assert ctxext.inspect(model).consistent
    assert "distances up to 20" in str(ctxext.inspect(model))
    model.save_pretrained(tmp_path)
    handle.remove()
    assert torch.equal(tiny.logits(model, ids), plain)
    assert_as_before(model, before)
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(tiny.logits(reloaded, ids), plain)
    ctxext.patch(reloaded, Near(factor=4))
    assert torch.equal(tiny.logits(reloaded, ids), extended)


@pytest.mark.parametrize("flaw", ["positions", "frequencies", "gain", "a key left out"])
def test_a_partition_whose_blocks_are_not_what_it_says_is_refused_and_the_model_restored(flaw: str) -> None:
    model = tiny.model()
    before = snapshot(model)
    with pytest.raises(ctxext.PatchError, match="attention does not see the relative positions of near"):
        ctxext.patch(model, Near(factor=4, flaw=flaw))
    assert_as_before(model, before)
