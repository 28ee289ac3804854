"""StreamingLLM."""

from __future__ import annotations

import math
from functools import partial
from typing import ClassVar, Literal

import torch
from pydantic import Field

from ctxext.attention.bands import Band, Bands
from ctxext.errors import ConfigError
from ctxext.methods.base import WholeNumber
from ctxext.methods.remapped import Banded
from ctxext.rope import RopeSpec


class StreamingLLM(Banded):
    """Keep the first tokens and the last ones, and forget what lies between: streams without end, not longer context.

    A query at position i attends to the first ``n_sink`` tokens and to the last ``window`` ones, itself included, and
    positions are counted among those: last tokens are at their true distance, the j-th sink at::

        min(i, n_sink + window - 1) - j

    A text of at most ``n_sink`` + ``window`` tokens is read as by the unpatched model. A cache of
    :class:`ctxext.StreamingCache` really evicts what is forgotten, so memory and time per token stay as they are.
    ``frequencies`` puts a static method inside.

    Reference: Efficient Streaming Language Models with Attention Sinks (https://arxiv.org/abs/2309.17453), section 3.
    """

    title: ClassVar[str] = "StreamingLLM"
    reference: ClassVar[str] = "https://arxiv.org/abs/2309.17453"
    untrained_factor: ClassVar[float | None] = math.inf
    evidence: ClassVar[str] = "steady perplexity over 4 million tokens, of which it remembers one window (2309.17453)"

    no_log_n: ClassVar[str | None] = "it sees the same number of tokens however long the text is"

    name: Literal["streaming_llm"] = "streaming_llm"
    n_sink: WholeNumber = Field(4, ge=1, description="First tokens that are never forgotten (attention sinks).")
    window: WholeNumber | None = Field(
        None, ge=1, description="Last tokens attended to, itself included. Default: the trained length less n_sink."
    )

    def size(self, spec: RopeSpec) -> int:
        """``window`` on a given model.

        Raises:
            ConfigError: with the sinks it is beyond what the model reads.
        """
        original, reach = self.lengths(spec).original, self.reach(spec)
        window = self.window or max(1, original - self.n_sink)
        if self.n_sink + window > reach:
            raise ConfigError(
                f"method {self.name}: n_sink {self.n_sink} and window {window} are together beyond the {reach} "
                "positions that the model reads"
            )
        return window

    def bands(self, spec: RopeSpec) -> Bands:
        window = self.size(spec)
        shown = partial(torch.clamp, max=self.n_sink + window - 1)
        return Bands(
            *self.scaled_rope(spec),
            period=self._period(self.n_sink + window),
            identity_length=self.n_sink + window,
            bands=(Band(0, window), Band(window, None, self.n_sink, shown)),
            description=f"the first {self.n_sink:,} and the last {window:,} tokens; what lies between is forgotten",
        )
