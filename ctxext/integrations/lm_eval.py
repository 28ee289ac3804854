"""Tasks of lm-evaluation-harness on an extended model, from Python and from the command line.

    lm = make_lm(model, tokenizer)
    results = lm_eval.simple_evaluate(lm, tasks=["lambada_openai"])

    python -m ctxext.integrations.lm_eval --model ctxext \
        --model_args pretrained=builtin:smollm2-135m,config=configs/yarn-2x.yaml --tasks lambada_openai

The second takes every option of ``lm_eval``, which can't find a model type outside of itself; importing this module
registers it. The harness's own ``use_cache`` (``--use_cache``) is refused: it finds answers by the request alone, so
that the first method's would be returned for all of them (lm-evaluation-harness issue 2715).

Reference: https://github.com/EleutherAI/lm-evaluation-harness.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch

import ctxext
from ctxext.data import resolve_bos, tokenize
from ctxext.errors import ConfigError, CtxextError, nearest
from ctxext.evaluation.scoring import bare_model, check_length, check_positions, require_whole
from ctxext.models import load_model
from ctxext.patching import active_patch

try:
    from lm_eval.api.registry import register_model
    from lm_eval.models.huggingface import HFLM
    from lm_eval.utils import simple_parse_args_string
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] != "lm_eval":
        raise
    raise CtxextError("lm-evaluation-harness is not installed: run `pip install 'ctxext[lm-eval]'`") from error


def make_lm(
    model: Any,
    tokenizer: Any,
    *,
    max_length: int | None = None,
    batch_size: int | str = 1,
    max_batch_size: int = 64,
    bos: Literal["auto", "always", "never"] = "auto",
    truncate: bool = False,
) -> ExtendedLM:
    """The model as lm-evaluation-harness wants it, for ``lm_eval.simple_evaluate``.

    The model is put in eval mode; the tokenizer is copied, because the harness gives it a padding token.

    Args:
        model: a causal language model of Transformers, plain or patched, on the device where it shall run.
        tokenizer: its tokenizer.
        max_length: how many tokens the model may read at once, prompt and generated text together. None: what the
            active patch is set to read, or the ``max_position_embeddings`` of a plain model. More than that is allowed
            unless the method changes attention, since showing how a model fails there is what a comparison needs.
        batch_size: requests at a time, or the harness's "auto".
        max_batch_size: where "auto" begins.
        bos: whether texts begin with the BOS token. "auto" does what the tokenizer does by itself. Never twice,
            whatever a chat template writes; and always once where the harness asks for a start token: for
            ``loglikelihood_rolling`` and an empty context.
        truncate: let the harness cut requests that don't fit, dropping the beginning with its BOS token and its
            instruction; False makes them errors. ``loglikelihood_rolling`` cuts nothing: it reads in windows.

    Raises:
        ConfigError: ``max_length`` is more than the method is set to read, or an argument is wrong.
        UnsupportedModelError: the checkpoint's own scaling makes results depend on batches and order.
    """
    return ExtendedLM(
        model,
        tokenizer,
        max_length=max_length,
        batch_size=batch_size,
        max_batch_size=max_batch_size,
        bos=bos,
        truncate=truncate,
    )


class ExtendedLM(HFLM):  # type: ignore[misc]  # lm_eval has no annotations
    """The harness's model of Transformers, which reads as far as the method does and refuses what is longer.

    Deviations from ``HFLM``: requests that don't fit raise a ConfigError instead of being cut; BOS is not put in front
    twice by ``loglikelihood_rolling``; log-probabilities are float32 whatever the model's dtype; the response cache is
    refused; results name the method. Arguments are those of ``make_lm``.
    """

    add_bos_token: bool

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        max_length: int | None = None,
        batch_size: int | str = 1,
        max_batch_size: int = 64,
        bos: Literal["auto", "always", "never"] = "auto",
        truncate: bool = False,
    ) -> None:
        check_positions(model)
        if max_length is None:
            max_length = _readable(model)
        require_whole("max_length", max_length, 2)
        check_length(model, max_length)
        if not str(batch_size).startswith("auto"):
            require_whole("batch_size", batch_size, 1)
        self.bos_id = resolve_bos(tokenizer, bos)
        self.truncate = truncate
        super().__init__(
            model,
            tokenizer=copy.deepcopy(tokenizer),
            max_length=max_length,
            batch_size=batch_size,
            max_batch_size=max_batch_size,
            add_bos_token=self.bos_id is not None,
            softmax_dtype=torch.float32,
        )

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: Mapping[str, Any], additional_config: Mapping[str, Any] | None = None
    ) -> ExtendedLM:
        """Load the model that ``--model_args`` name; ``additional_config`` holds batch sizes and device."""
        names = [name for name in inspect.signature(_load).parameters if name not in _HARNESS_OPTIONS]
        for name in arg_dict:
            if name not in names:
                near = nearest(name, names)
                hint = f"; did you mean {near}?" if near else ""
                if name in _HARNESS_OPTIONS:
                    hint = f"; it is an option of the harness itself (--{name})"
                raise ConfigError(f"model_args: {name} is not one of {', '.join(names)}{hint}")
        for name in ("trust_remote_code", "replace_scaling", "truncate"):
            if not isinstance(value := arg_dict.get(name, False), bool):
                raise ConfigError(f"model_args: {name} must be True or False, got {value!r}")
        if "pretrained" not in arg_dict:
            raise ConfigError("model_args: pretrained is missing; give a checkpoint folder, a .gguf file or a hub id")
        given = {name: value for name, value in (additional_config or {}).items() if value is not None}
        if given.get("device") == "cuda:0" and not torch.cuda.is_available():
            del given["device"]  # the harness's default, which its own models don't take at its word either
        return _load(**arg_dict, **given)

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: Mapping[str, Any] | None = None) -> ExtendedLM:
        """The same from ``name=value,name=value``."""
        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None) -> list[int]:
        """Token ids of a text, BOS in front of them if it is wanted and not there already."""
        ids = tokenize(self.tokenizer, string)
        wanted = self.add_bos_token if add_special_tokens is None else add_special_tokens
        if not wanted or self.bos_id is None or ids[:1] == [self.bos_id]:
            return ids
        return [self.bos_id, *ids]

    def tok_batch_encode(
        self,
        strings: Sequence[str],
        padding_side: Literal["left", "right"] = "left",
        left_truncate_len: int | None = None,
        truncation: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids and mask ``[B, T]`` of prompts to generate from.

        ``left_truncate_len`` is what ``max_length`` leaves of itself to the prompt. ``truncation`` (to the tokenizer's
        own idea of a length) is not followed.

        Raises:
            ConfigError: a prompt is longer, and ``truncate`` is off.
        """
        prompts = [self.tok_encode(string) for string in strings]
        if left_truncate_len is not None:
            for string, ids in zip(strings, prompts, strict=True):
                if len(ids) > left_truncate_len and not self.truncate:
                    raise ConfigError(
                        f"the prompt {string[:40]!r}... has {len(ids):,} tokens, and "
                        f"{self.max_length - left_truncate_len:,} are to be generated: more than max_length "
                        f"{self.max_length:,}; {_WAYS_OUT}"
                    )
            prompts = [ids[-left_truncate_len:] for ids in prompts]
        padded = self.tokenizer.pad({"input_ids": prompts}, padding_side=padding_side, return_tensors="pt")
        return padded["input_ids"], padded["attention_mask"]

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Log-likelihood in nats of each request's continuation, and whether it is the model's first choice.

        Raises:
            ConfigError: a request doesn't fit ``max_length``, and ``truncate`` is off.
        """
        for request in [] if self.truncate else requests:
            context, continuation = request.args
            # The last token is predicted, not read; an empty context is read as one start token.
            positions = len(self.tok_encode(context + continuation, add_special_tokens=None if context else False))
            positions -= 1 if context else 0
            if positions > self.max_length:
                raise ConfigError(
                    f"task {request.task_name!r}, document {request.doc_id}: context and continuation have "
                    f"{positions:,} tokens to read, more than max_length {self.max_length:,}; {_WAYS_OUT}"
                )
        answers: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm=disable_tqdm)
        return answers

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood in nats of each request's whole text, in windows of ``max_length`` tokens side by side."""
        added = self.add_bos_token
        self.add_bos_token = False  # the start token is put before the first window, whatever the tokenizer does
        try:
            sums: list[float] = super().loglikelihood_rolling(requests, disable_tqdm=disable_tqdm)
        finally:
            self.add_bos_token = added
        return sums

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """The text generated for each request.

        Raises:
            ConfigError: a prompt and what it asks to generate don't fit ``max_length``, and ``truncate`` is off.
        """
        for request in requests:
            if "max_length" in request.args[1]:
                raise ConfigError(
                    f"task {request.task_name!r}: generation_kwargs.max_length counts the prompt too, which differs "
                    "from document to document; give max_gen_toks"
                )
        texts: list[str] = super().generate_until(requests, disable_tqdm=disable_tqdm)
        return texts

    def set_cache_hook(self, cache_hook: Any) -> None:
        """Raises ConfigError: the harness's response cache would mix up methods."""
        raise ConfigError(
            "use_cache finds answers by the request alone, whatever the method: the first method's would be returned "
            "for all; run without it (cache_requests, which keeps prompts only, is harmless)"
        )

    def get_model_info(self) -> dict[str, Any]:
        """What the harness writes beside results, and with which method they came about."""
        patch = active_patch(self.model)
        method = None if patch is None else patch.method.model_dump(exclude_none=True, mode="json")
        info: dict[str, Any] = super().get_model_info()
        return {
            **info,
            "ctxext_version": ctxext.__version__,
            "ctxext_method": method,
            "max_length": self.max_length,
            "bos_id": self.bos_id,
            "truncate": self.truncate,
        }


_WAYS_OUT = (
    "leave such documents out, extend the model further (or give max_length, where the method allows more), or pass "
    "truncate=True, which drops the beginning"
)
_HARNESS_OPTIONS = ("batch_size", "max_batch_size", "device")


def _readable(model: Any) -> int:
    """How many tokens the model is meant to read: the config of one with changed attention keeps the trained length."""
    patch = active_patch(model)
    length: int = bare_model(model).config.max_position_embeddings if patch is None else patch.max_length
    return length


def _load(
    pretrained: str,
    *,
    config: str | None = None,
    dtype: str = "auto",
    attn_implementation: str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    replace_scaling: bool = False,
    base: str | None = None,
    max_length: int | None = None,
    bos: Literal["auto", "always", "never"] = "auto",
    truncate: bool = False,
    batch_size: int | str = 1,
    max_batch_size: int = 64,
    device: str | None = None,
) -> ExtendedLM:
    """What ``--model_args`` may say: arguments of ``load_model`` (its method is ``config``) and of ``make_lm``."""
    model, tokenizer = load_model(
        pretrained,
        config,
        dtype=dtype,
        device=device,
        attn_implementation=attn_implementation,
        revision=revision,
        trust_remote_code=trust_remote_code,
        replace_scaling=replace_scaling,
        base=base,
    )
    if isinstance(batch_size, str) and batch_size.isdecimal():  # as the harness's command line hands it on
        batch_size = int(batch_size)
    return make_lm(
        model,
        tokenizer,
        max_length=max_length,
        batch_size=batch_size,
        max_batch_size=max_batch_size,
        bos=bos,
        truncate=truncate,
    )


def main() -> None:
    """The harness's command line with the model type ``ctxext``; a user's mistake is one line and exit status 2."""
    from lm_eval.__main__ import cli_evaluate

    try:
        cli_evaluate()
    except CtxextError as error:
        print(f"ctxext: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    # Run as a module, this file is no module that others could import: the one they can is registered.
    from ctxext.integrations import lm_eval

    lm_eval.main()
else:
    register_model("ctxext")(ExtendedLM)
