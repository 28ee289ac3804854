"""The training loss by slices is that of the whole logits, with the same gradients, in a fraction of the memory."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

import ctxext
import tiny
from ctxext.blocks import IGNORED
from ctxext.loss import summed_loss


def reference(model: Any, ids: torch.Tensor, labels: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    return cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED, reduction="sum")


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("method", ["yarn", "dca", "dynamic_ntk"])
@pytest.mark.parametrize("rows", [1, 5, 1000])
def test_loss_and_gradients_are_those_of_whole_logits(family: str, method: str, rows: int) -> None:
    ids = tiny.tokens(75, 2)
    labels, positions = ids.clone(), torch.arange(75).expand(2, -1)
    labels[:, 0] = labels[0, 30:35] = labels[1, 60:] = IGNORED
    gradients = []
    for naive in (True, False):
        model = tiny.model(family, experts_implementation="eager").double()
        ctxext.patch(model, tiny.METHODS[method])
        if naive:
            loss = expected = reference(model, ids, labels, positions)
        else:
            loss = summed_loss(model, ids, labels, positions, rows=rows)
        loss.backward()
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    assert loss.item() == pytest.approx(expected.item(), rel=1e-9)
    for wanted, found in zip(*gradients, strict=True):
        assert tiny.difference(wanted, found) <= 1e-9 * max(1.0, wanted.abs().max().item())


def test_nothing_is_scored_where_all_labels_are_left_out() -> None:
    ids = tiny.tokens(10)
    loss = summed_loss(tiny.model(), ids, torch.full_like(ids, IGNORED), torch.arange(10)[None])
    assert loss.item() == 0


_MEMORY = """
import ctypes, resource, sys, torch
from transformers import AutoModelForCausalLM, LlamaConfig
ctypes.CDLL("libc.so.6").mallopt(-3, 1 << 16)  # large blocks are given back at once
from ctxext.loss import summed_loss
torch.manual_seed(0)
config = LlamaConfig(vocab_size=49152, hidden_size=64, intermediate_size=128, num_hidden_layers=1,
                     num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=8192)
model = AutoModelForCausalLM.from_config(config)
ids = torch.randint(0, 49152, (1, 8192))
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before = peak()
if sys.argv[1] == "whole":
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
else:
    loss = summed_loss(model, ids, ids, torch.arange(8192)[None]) / 8191
loss.backward()
print(loss.item(), peak() - before, sum(p.grad.double().abs().sum().item() for p in model.parameters()))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read as Linux tells it")
def test_at_8k_tokens_it_takes_less_than_a_quarter_of_the_memory() -> None:
    def run(kind: str) -> list[float]:
        done = subprocess.run([sys.executable, "-c", _MEMORY, kind], capture_output=True, text=True, check=True)
        return [float(part) for part in done.stdout.split()]

    whole, sliced = run("whole"), run("sliced")
    assert sliced[0] == pytest.approx(whole[0], abs=1e-5)
    assert sliced[1] < whole[1] / 4
    assert sliced[2] == pytest.approx(whole[2], rel=1e-4)
