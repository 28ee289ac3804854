"""The training loss without logits of the whole input: head and cross-entropy by slices, forwards and backwards."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from ctxext.blocks import IGNORED

SLICE_LOGITS = 2**24
"""Logits that exist at a time: 64 MiB in float32, whatever the vocabulary and the length."""


def summed_loss(
    model: Any,
    input_ids: Tensor,
    labels: Tensor,
    position_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    rows: int | None = None,
) -> Tensor:
    """The sum of the cross-entropy of all labels, in nats, fp32 or better.

    The decoder runs once. The states before scored tokens go through the output head ``rows`` at a time, and again in
    the backward pass, so that neither logits ``[B, T, vocabulary]`` nor their gradient ever exist. Valid for models
    whose logits are the head applied to the decoder's states (``evaluation.scoring.check_head``).

    Args:
        model: a causal language model, not wrapped.
        input_ids: ``[B, T]``.
        labels: ``[B, T]``: ``labels[:, t]`` is predicted from the state at t - 1; ``IGNORED`` is left out.
        position_ids: ``[B, T]``.
        attention_mask: what the decoder takes.
        rows: positions at a time; default: ``SLICE_LOGITS`` logits.
    """
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    states = decoder(
        input_ids=input_ids, position_ids=position_ids, attention_mask=attention_mask, use_cache=False
    ).last_hidden_state
    targets = labels[:, 1:].flatten()
    scored = (targets != IGNORED).nonzero()[:, 0]
    states = states[:, :-1].flatten(0, 1)
    if len(scored) < len(targets):
        states, targets = states[scored], targets[scored]
    vocabulary = int(getattr(head, "out_features", None) or model.config.vocab_size)
    rows = rows or max(1, SLICE_LOGITS // vocabulary)
    total = torch.zeros((), device=states.device)
    for some, wanted in zip(torch.split(states, rows), torch.split(targets, rows), strict=True):
        total = total + checkpoint(_loss_of, head, some, wanted, use_reentrant=False)
    return total


def _loss_of(head: Any, states: Tensor, targets: Tensor) -> Tensor:
    logits = head(states)
    wide = torch.promote_types(logits.dtype, torch.float32)
    return cross_entropy(logits.to(wide), targets, reduction="sum")
