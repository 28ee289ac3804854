"""Put a method on one model instance, prove that it acts, and take it off again."""

from __future__ import annotations

import copy
import hashlib
import os
import struct
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
from accelerate.hooks import add_hook_to_module
from accelerate.utils import extract_model_from_parallel
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ctxext.attention import naive
from ctxext.attention.engine import rotate
from ctxext.attention.interface import NAME, Planner, positions_to_probe
from ctxext.attention.partition import Partition
from ctxext.config import load_method
from ctxext.errors import ConfigError, PatchError, UnsupportedModelError
from ctxext.families import (
    Family,
    check_trained_length,
    extension_record,
    find_family,
    rotary_dim,
    rotary_module,
    stock_frequencies,
    trained_rope,
    window_layers,
)
from ctxext.learned import SavePretrained, Weights, file_name, put_weights, split, write_weights
from ctxext.methods import Method
from ctxext.methods.base import as_longrope
from ctxext.rope import RopeSpec, default_inv_freq
from ctxext.rotary import LearnedRotaryEmbedding, ScaledRotaryEmbedding

_HANDLE = "_ctxext_patch"
_PROBES = (1, 4099, 1_000_003)
_OWN_KEYS = (
    "rope_parameters",
    "max_position_embeddings",
    "original_max_position_embeddings",
    "head_dim",
    "ctxext",
    "dual_chunk_attention_config",
)


class Patch:
    """A method on a model: what was changed, and how to undo it.

    Usable as a context manager. :meth:`remove` brings back the same config and the same rotary module.

    Attributes:
        model: the unwrapped model.
        method: the method, with the defaults that the checkpoint has a say in filled in.
        spec: the trained rotary embedding that the method extends.
        partition: what the patched attention does, or None where attention is stock.
        rotary: the module that has taken the place of the model's own.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        family: Family,
        method: Method,
        spec: RopeSpec,
        config: PretrainedConfig,
        weights: Weights | None = None,
    ) -> None:
        rotary = rotary_module(model, family)
        assert rotary is not None  # find_family has seen it
        self.model = model
        self.method = method
        self.spec = spec
        self.original_config: PretrainedConfig = model.config
        self.config = config
        self.written = copy.deepcopy(vars(config))
        self.original_rotary = rotary
        self.partition = method.partition(spec)
        if method.log_n and (self.partition is None or self.partition.log_length is None):
            raise ConfigError(f"method {method.name}: log_n is not supported; its partition() leaves it out")
        self.planner: Planner | None = None
        period = None
        if self.partition is not None:
            period = self.partition.period
            naive_attention = getattr(method, "attention", "") == "naive"
            self.planner = Planner(self.partition, method.name, (method, spec), naive=naive_attention)
        self.rotary: ScaledRotaryEmbedding | LearnedRotaryEmbedding
        learned = _learned(method, spec, weights)
        if learned is None:
            self.rotary = ScaledRotaryEmbedding(*self._scaled_rope, device=_device(rotary), period=period)
        else:
            factor, (_, attention_factor) = method.lengths(spec).factor, method.scaled_rope(spec)
            self.rotary = LearnedRotaryEmbedding(learned, factor, attention_factor, device=_device(rotary))
            self.update_config()
        hook = getattr(rotary, "_hf_hook", None)
        if hook is not None:
            add_hook_to_module(self.rotary, copy.copy(hook))
        self.family = family
        self._wrappers: list[nn.Module] = []
        self._hook: RemovableHandle | None = None

    @property
    def active(self) -> bool:
        """Whether this patch is the one that is on the model now."""
        return vars(self.model.base_model).get(_HANDLE) is self

    @property
    def rope(self) -> tuple[torch.Tensor, float]:
        """Frequencies fp32 ``[d/2]`` and attention factor that the rotary module has to rotate by.

        Where they are learned, the frequencies as they are now.
        """
        if self.learned is None:
            return self._scaled_rope
        with torch.no_grad():
            inv_freq: torch.Tensor = self.learned(self.method.lengths(self.spec).factor)
        return inv_freq.detach().cpu(), self.rotary.attention_scaling

    @property
    def _scaled_rope(self) -> tuple[torch.Tensor, float]:
        if self.partition is not None:
            return self.partition.inv_freq, self.partition.attention_factor
        inv_freq, attention_factor = self.method.scaled_rope(self.spec)
        return inv_freq.detach().float().cpu(), attention_factor

    @property
    def saved_rope(self) -> tuple[torch.Tensor, float]:
        """The same of a checkpoint saved now, as Transformers alone would load it."""
        if self.partition is not None:
            return default_inv_freq(self.spec.rope_theta, self.spec.rotary_dim), 1.0
        return self.rope

    @property
    def learned(self) -> nn.Module | None:
        """The module with what the method learns, a part of ``rotary``; None for most methods."""
        return self.rotary.learned if isinstance(self.rotary, LearnedRotaryEmbedding) else None

    @property
    def trained(self) -> bool:
        """Whether the frequencies are no longer those that the method starts with."""
        return self.learned is not None and not torch.equal(self.rope[0], self.method.scaled_rope(self.spec)[0])

    @property
    def max_length(self) -> int:
        """How many tokens ctxext's own tools let the model read; the mathematics of no method has a limit."""
        return self.method.lengths(self.spec).target

    def update_config(self) -> None:
        """Write the frequencies into the config as they are now, where they are learned; saving the model does it."""
        if self.learned is None:
            return
        if self.trained:
            parameters = as_longrope(self.spec, self.method.lengths(self.spec), *self.rope)
        else:
            parameters = self.method.rope_parameters(self.spec)
        self.config.rope_parameters = parameters
        self.written["rope_parameters"] = copy.deepcopy(parameters)

    @contextmanager
    def holding(self, state: Mapping[str, Any] | None) -> Iterator[None]:
        """Have the learned weights of a state dict in place of the model's own, which may be spread over processes.

        Not for running the model. Where there are none of them nothing happens.
        """
        own = self.learned
        weights = {} if own is None or state is None else split(state, self)[1]
        if own is None or not weights:
            yield
            return
        stand_in = _learned(self.method, self.spec, weights)
        assert isinstance(self.rotary, LearnedRotaryEmbedding)
        assert stand_in is not None
        self.rotary.learned = stand_in
        try:
            yield
        finally:
            self.rotary.learned = own

    def write_weights(self, folder: str | os.PathLike[str]) -> None:
        """Write what the method has learned into a folder, if it learns. Raises ConfigError if that fails."""
        if self.learned is not None:
            write_weights(self.learned, self.method, folder)

    def remove(self) -> None:
        """Restore the model; a patch that is already off stays off.

        Raises:
            PatchError: something else has replaced the rotary module or the config since; nothing is changed.
        """
        if self.active:
            self._remove_from(self.model)

    def _install(self, outer: nn.Module) -> None:
        inner = set(self.model.modules())
        # Wrappers may hold the config too, as PEFT's do.
        self._wrappers = [module for module in outer.modules() if module not in inner and "config" in vars(module)]
        try:
            _swap_config(outer, self.original_config, self.config)
            setattr(self.model.base_model, self.family.rotary, self.rotary)
            setattr(self.model.base_model, _HANDLE, self)
            if self.learned is not None:
                vars(self.model)["save_pretrained"] = SavePretrained(self)
            if self.planner is not None:
                self._hook = self.model.base_model.register_forward_pre_hook(self.planner, with_kwargs=True)
            _prove(self)
        except BaseException:
            self._restore(outer)
            raise

    def _remove_from(self, outer: nn.Module) -> None:
        if rotary_module(self.model, self.family) is not self.rotary or self.model.config is not self.config:
            raise PatchError(
                f"the {self.method.name} patch can't come off: another program has replaced the model's rotary "
                "embedding or config since; undo that first"
            )
        device = _device(self.rotary)
        if device.type == "meta":  # filled since by load_state_dict(assign=True), which moves no module
            device = next(self.model.parameters()).device
        _follow(self.original_rotary, self.original_config, device)
        self._restore(outer)

    def _restore(self, outer: nn.Module) -> None:
        setattr(self.model.base_model, self.family.rotary, self.original_rotary)
        # What a user changed meanwhile (attention, vocabulary, ...) was meant for the model, not for the patch.
        for key, value in vars(self.config).items():
            if key not in _OWN_KEYS and (key not in self.written or self.written[key] != value):
                vars(self.original_config)[key] = value
        for root in (outer, self.model, *self._wrappers):
            _swap_config(root, self.config, self.original_config)
        vars(self.model.base_model).pop(_HANDLE, None)
        if self.learned is not None:
            vars(self.model).pop("save_pretrained", None)
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def __getstate__(self) -> dict[str, Any]:
        # A copy of the model shall not drag along the wrapper that the original was in.
        return {**vars(self), "_wrappers": []}

    def __enter__(self) -> Patch:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.remove()

    def __repr__(self) -> str:
        state = "on" if self.active else "off"
        return f"Patch({self.method!r}, {state} {type(self.model).__name__})"


def patch(
    model: nn.Module,
    method: Method | Mapping[str, Any] | str | os.PathLike[str],
    *,
    replace: bool = False,
    replace_scaling: bool = False,
    weights: Weights | None = None,
) -> Patch:
    """Extend one model's context window.

    Changes the model's config (a copy takes its place) and its rotary module, on this instance alone, and reads the
    frequencies back from the module that the model calls before returning.

    Args:
        model: a supported causal language model or its decoder; PEFT, DDP, compile and accelerate wrappers are looked
            through.
        method: a method, a mapping ``{"name": "yarn", "factor": 4}``, or a YAML file with a section ``method``.
        replace: swap the method of a model that is already patched.
        replace_scaling: start from the unscaled base of a checkpoint that comes with a scaling of its own.
        weights: what a method that learns has learned. Default: what the patch that is replaced has learned by the
            same method, else nothing yet.

    Returns:
        The handle that takes the patch off: ``.remove()``, or leaving a ``with`` block.

    Raises:
        ConfigError: the method's settings are wrong, or don't fit the model.
        UnsupportedModelError: the model isn't supported, or its own scaling can't be built upon.
        PatchError: the model is already patched, or the patch would not act. The model is left as it was.
    """
    method = load_method(method)
    base = unwrap(model)
    if getattr(base, "base_model", None) is base:
        warnings.warn(
            f"{type(base).__name__} is a decoder: if it is part of a larger model, that model keeps its own config, "
            "and saving it would lose the method; patch the larger model instead",
            stacklevel=2,
        )
    previous = active_patch(base)
    if previous is None:
        new = _prepare(base, method, weights, replace_scaling=replace_scaling)
        _warn_about_windows(new.config)
        new._install(model)
    else:
        if not replace:
            raise PatchError(
                f"the model is already patched with {previous.method!r}; pass replace=True to swap it, "
                "or call ctxext.unpatch(model) first"
            )
        if weights is None and previous.learned is not None and previous.method.name == method.name:
            weights = {name: value.detach() for name, value in previous.learned.named_parameters()}
        previous._remove_from(model)
        try:
            new = _prepare(base, method, weights, replace_scaling=replace_scaling)
            _warn_about_windows(new.config)
            new._install(model)
        except BaseException:
            previous._install(model)
            raise
    return new


def unpatch(model: nn.Module) -> None:
    """Take the patch off a model, however it is wrapped.

    Raises:
        PatchError: no patch is on, or something else has changed the patched parts since.
    """
    active = active_patch(model)
    if active is None:
        raise PatchError("no ctxext patch is on this model")
    active._remove_from(model)


def active_patch(model: nn.Module) -> Patch | None:
    """The patch that is on a model, or None."""
    bare = unwrap(model)
    found: Patch | None = vars(getattr(bare, "base_model", bare)).get(_HANDLE)
    return found


def unwrap(model: nn.Module) -> Any:
    """The Transformers model inside PEFT, DDP, DataParallel, DeepSpeed and ``torch.compile`` wrappers.

    Raises:
        UnsupportedModelError: not a torch module.
    """
    while True:
        if not isinstance(model, nn.Module):
            raise UnsupportedModelError(f"{type(model).__name__} is not supported: expected a model of Transformers")
        inner: Any = getattr(model, "_orig_mod", None) or extract_model_from_parallel(model, keep_fp32_wrapper=True)
        if hasattr(inner, "get_base_model") and not isinstance(inner, PreTrainedModel):
            inner = inner.get_base_model()
        if inner is model:
            return model
        model = inner


def fingerprint(inv_freq: torch.Tensor, attention_factor: float | None) -> str:
    """sha256 of the frequencies as little-endian fp32, followed by the attention factor (fp64) unless it is None."""
    digest = hashlib.sha256(inv_freq.detach().cpu().float().numpy().astype("<f4").tobytes())
    if attention_factor is not None:
        digest.update(struct.pack("<d", attention_factor))
    return digest.hexdigest()


def effective_fingerprint(partition: Partition, trained: int) -> str:
    """sha256 of the relative rotations at the probe positions: what each of their scores sees.

    ``trained`` is the trained length in tokens.

    Relative positions as little-endian int64 (fp64 where they are fractions), which keys are attended to unless it is
    all up to the query, then frequencies and factors of each query as little-endian fp32, then the attention factor
    (fp64). A hash of ``inv_freq`` would not tell these methods from the plain model.
    """
    positions = torch.tensor(positions_to_probe(partition, trained), device="cpu")
    attended = partition.attended(positions, positions)
    relative = partition.relative_positions(positions, positions).masked_fill(~attended, 0)
    inv_freq, gain = partition.frequencies_at(positions)
    digest = hashlib.sha256(relative.numpy().astype("<f8" if relative.is_floating_point() else "<i8").tobytes())
    if not torch.equal(attended, positions <= positions[:, None]):
        digest.update(attended.numpy().tobytes())
    for values in (inv_freq, gain):
        digest.update(values.contiguous().numpy().astype("<f4").tobytes())
    digest.update(struct.pack("<d", partition.attention_factor))
    return digest.hexdigest()


def measured_rotation(rotary: nn.Module, frequencies: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine, each fp64 ``[P, frequencies]``, that calling the module yields at the probe positions."""
    device = _device(rotary)
    if device.type == "meta":
        device = torch.device("cpu")
    positions = torch.tensor([_PROBES], device=device)
    states = torch.zeros(1, len(_PROBES), 1, device=device, dtype=torch.float32)
    cos, sin = rotary(states, position_ids=positions)
    return cos[0, :, :frequencies].double().cpu(), sin[0, :, :frequencies].double().cpu()


def is_rotation(
    cos: torch.Tensor, sin: torch.Tensor, inv_freq: torch.Tensor, attention_factor: float, period: int | None = None
) -> bool:
    """Whether cosine and sine, measured at the probe positions modulo ``period``, are those of the frequencies."""
    positions = torch.tensor(_PROBES, device="cpu") % (period or _PROBES[-1] + 1)
    angles = positions[:, None].float() * inv_freq.float().cpu()
    # The module computes the angle in fp32 as here; only the cosine and sine leave room for rounding.
    room = 1e-5 * max(1.0, abs(attention_factor))
    expected = ((cos, attention_factor * angles.double().cos()), (sin, attention_factor * angles.double().sin()))
    return all(torch.allclose(measured, value, rtol=0, atol=room) for measured, value in expected)


def _prepare(model: Any, method: Method, weights: Weights | None, *, replace_scaling: bool) -> Patch:
    family = find_family(model)
    rotary: Any = rotary_module(model, family)
    method = method.for_config(model.config)
    if method.changes_attention:
        _check_attention(model, family, method)
    check_trained_length(model.config, rotary, method)
    _check_live_matches_config(rotary, model.config)
    if method.learns and weights is None:
        _check_untrained(model, method)
    spec = trained_rope(model.config, method, replace_scaling=replace_scaling)
    _check_frequencies(method, spec, method.scaled_rope(spec)[0])
    new = Patch(model, family, method, spec, _extended_config(model.config, method, spec), weights)
    if new.trained:
        _check_frequencies(method, spec, new.rope[0])
    return new


def _learned(method: Method, spec: RopeSpec, weights: Weights | None) -> nn.Module | None:
    """A module with what the method learns, filled if ``weights`` are given."""
    if weights is not None and not method.learns:
        raise PatchError(f"method {method.name} learns nothing that weights could be given for")
    # What is made in inference mode could never be trained.
    with torch.inference_mode(False):
        module = method.learned_rope(spec)
        if module is not None and weights is not None:
            put_weights(module, weights, method.name)
    return module


def _check_untrained(model: Any, method: Method) -> None:
    """Refuse to begin anew on a checkpoint that was trained with what the method had learned."""
    record = extension_record(model.config)
    if record is not None and record["trained"] and record["method"]["name"] == method.name:
        raise PatchError(
            f"the checkpoint was trained with what {method.name} had learned, which lies beside it in "
            f"{file_name(method)}: load it with ctxext.load_model, which puts that on, or give weights"
        )


def _check_frequencies(method: Method, spec: RopeSpec, inv_freq: torch.Tensor) -> None:
    usable = int((inv_freq.isfinite() & (inv_freq > 0)).sum())
    if inv_freq.shape != (spec.rotary_dim // 2,) or usable != inv_freq.numel():
        raise PatchError(
            f"method {method.name} gives frequencies of shape {tuple(inv_freq.shape)}, of which {usable} are positive "
            f"numbers; the model needs {spec.rotary_dim // 2}"
        )


def _extended_config(config: PretrainedConfig, method: Method, spec: RopeSpec) -> PretrainedConfig:
    lengths = method.lengths(spec)
    extended = copy.deepcopy(config)
    if method.changes_attention:
        # Nobody else can run the method, so the checkpoint must not claim to be more than it was trained for.
        extended.rope_parameters = {"rope_type": "default", "rope_theta": spec.rope_theta}
        extended.max_position_embeddings = lengths.original
        extended._attn_implementation = NAME
        vars(extended).pop("dual_chunk_attention_config", None)  # engines that know the key would run what it says
    else:
        extended.rope_parameters = method.rope_parameters(spec)
        extended.max_position_embeddings = lengths.target
    record = getattr(config, "ctxext", None)
    if record is not None and record["method"]["name"] == "dca":
        # It was the earlier method's; engines that know the key would run Dual Chunk Attention.
        vars(extended).pop("dual_chunk_attention_config", None)
    for key, value in method.config_entries(spec).items():
        setattr(extended, key, value)
    if hasattr(extended, "original_max_position_embeddings"):
        # Transformers lets this attribute, where a config has it, override the one in rope_parameters.
        extended.original_max_position_embeddings = lengths.original
    # Transformers' YaRN can't load a config that leaves head_dim None, as Mixtral's does.
    extended.head_dim = rotary_dim(config)
    extended.ctxext = {
        "method": method.model_dump(exclude_none=True, mode="json"),
        "rope_theta": spec.rope_theta,
        "original_max_position_embeddings": lengths.original,
    }
    if method.changes_attention:
        extended.ctxext["changes_attention"] = True
    if method.learns:
        extended.ctxext["learned"] = True
    return extended


def _check_live_matches_config(rotary: Any, config: PretrainedConfig) -> None:
    """A config that was edited after loading describes another model than the one in memory: refuse to build on it."""
    if _device(rotary).type == "meta":
        return
    try:
        inv_freq, attention_factor, rope_type = stock_frequencies(type(rotary), config)
    except Exception as error:
        raise PatchError(
            f"Transformers can't build a rotary embedding from config.rope_parameters ({error!r}); "
            "they were probably edited after loading and are not in effect: load the model again"
        ) from error
    if (
        rope_type != rotary.rope_type
        or abs(attention_factor - rotary.attention_scaling) > 1e-6
        or not same_up_to_rounding(loaded_frequencies(rotary), inv_freq)
    ):
        raise PatchError(
            "the live rotary embedding isn't that of config.rope_parameters: one of them was edited after loading, and "
            "the config is not in effect; load the model again, and put the change into the method"
        )


def loaded_frequencies(rotary: Any) -> torch.Tensor:
    """The frequencies that a stock module was loaded with, even if it has since followed the length of an input."""
    follows = rotary.rope_type in ("dynamic", "longrope")
    frequencies: torch.Tensor = rotary.original_inv_freq if follows else rotary.inv_freq
    return frequencies


def same_up_to_rounding(live: torch.Tensor, exact: torch.Tensor) -> bool:
    """Whether live frequencies are the exact ones, or those ones after a cast of the whole model to 16 bits."""
    live = live.detach().float().cpu()
    candidates = (exact, exact.bfloat16().float(), exact.half().float())
    return live.shape == exact.shape and any(torch.allclose(live, c, rtol=1e-6, atol=0) for c in candidates)


def _check_attention(model: Any, family: Family, method: Method) -> None:
    """Refuse a model whose attention isn't what the patched one computes."""
    config = model.config
    windows = window_layers(config)
    if windows is not None:
        raise UnsupportedModelError(
            f"method {method.name}: {windows[0]} of {config.num_hidden_layers} layers attend to a sliding window of "
            f"{windows[1]} tokens, where positions beyond it don't occur; use a static method (yarn, ntk, ...)"
        )
    if not getattr(config, "is_causal", True):
        raise UnsupportedModelError(f"method {method.name}: the model isn't causal (config.is_causal is False)")
    for layer in getattr(model.base_model, family.layers):
        module = getattr(layer, family.attention, None)
        if module is None or getattr(module, "config", None) is not config:
            raise UnsupportedModelError(
                f"{type(model).__name__}: expected every layer's {family.attention!r} to read the model's own config; "
                "nothing was patched"
            )


def _prove(patch: Patch) -> None:
    """Read back from the live model what it computes, and from the config what would be saved."""
    name = patch.method.name
    live = rotary_module(patch.model, find_family(patch.model))
    problem = difference_from_method(patch, live)
    if problem is not None:
        raise PatchError(f"after patching, {problem}; another program may have wrapped it. The model was restored")
    inv_freq, attention_factor = patch.saved_rope
    try:
        saved, saved_factor, _ = stock_frequencies(type(patch.original_rotary), patch.model.config)
    except Exception as error:
        raise PatchError(
            f"Transformers can't load the rope_parameters() of method {name} ({type(error).__name__}: {error}). "
            "The model was restored"
        ) from error
    if not torch.allclose(saved, inv_freq, rtol=1e-6, atol=0) or abs(saved_factor - attention_factor) > 1e-6:
        raise PatchError(
            f"rope_parameters of {name} would load with other frequencies than the model has now; "
            "the method's rope_parameters() doesn't match its scaled_rope(). The model was restored"
        )


def difference_from_method(patch: Patch, rotary: Any) -> str | None:
    """What the live model computes otherwise than its method says, or None.

    The rotation is read from the module that the model calls. Where the method changes attention, the function that the
    layers call is run too, through the live hook, on random queries and keys at positions around and far beyond the
    range where nothing changes; the result has to be that of the dense reference in float64.
    """
    name = patch.method.name
    cos, sin = measured_rotation(rotary, patch.rope[0].numel())
    period = None if patch.partition is None else patch.partition.period
    if not is_rotation(cos, sin, *patch.rope, period):
        return f"{type(rotary).__name__} does not rotate by the frequencies of {name}"
    if patch.partition is None:
        return None
    layers = [getattr(layer, patch.family.attention) for layer in getattr(patch.model.base_model, patch.family.layers)]
    if any(layer.config is not patch.config for layer in layers) or patch.config._attn_implementation != NAME:
        return f"not every layer runs the attention of {name}"
    if patch.planner not in patch.model.base_model._forward_pre_hooks.values():
        return f"the hook of {name} is gone"
    measured, expected, room = _probe_attention(patch, patch.partition, rotary, layers[0])
    if not torch.allclose(measured, expected, rtol=0, atol=room):
        return f"attention does not see the relative positions of {name}"
    return None


def _probe_attention(
    patch: Patch, partition: Partition, rotary: Any, layer: Any
) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Attention output ``[1, n, H, d]`` of the live path and of the reference, fp64, and the room for rounding."""
    device = _device(rotary) if _device(rotary).type != "meta" else torch.device("cpu")
    positions = torch.tensor(positions_to_probe(partition, patch.method.lengths(patch.spec).original), device="cpu")
    config: Any = patch.config
    heads = (config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads)
    generator = torch.Generator(device="cpu").manual_seed(0)
    dim = patch.spec.rotary_dim
    query, key, value = (
        torch.randn(1, n, len(positions), dim, generator=generator, device="cpu", dtype=torch.float32) for n in heads
    )

    ids = positions[None].to(device)
    given = {"input_ids": torch.zeros_like(ids), "position_ids": ids, "use_cache": False, "output_attentions": False}
    assert patch.planner is not None  # a partition comes with one
    _, planned = patch.planner(patch.model.base_model, (), given)
    cos, sin = rotary(torch.zeros(1, len(positions), 1, device=device, dtype=torch.float32), position_ids=ids)
    states = [x.to(device) for x in (query, key, value)]
    for i in range(2):
        first, second = states[i].chunk(2, dim=-1)
        states[i] = states[i] * cos[:, None] + torch.cat((-second, first), dim=-1) * sin[:, None]
    function = ALL_ATTENTION_FUNCTIONS[config._attn_implementation]
    with torch.no_grad():
        out, _ = function(layer, *states, None, dropout=0.0, scaling=dim**-0.5, ctxext=planned["ctxext"])
    rotated_query, rotated_key = (
        rotate(x.double(), positions % partition.period, partition.inv_freq) * partition.attention_factor
        for x in (query, key)
    )
    expected, _ = naive.attend(rotated_query, rotated_key, value.double(), positions, partition, dim**-0.5)
    # Angles are fp32, as in every rotary embedding: at position p those of the fastest dimensions are off by p * 2^-24.
    # What comes of that in the output has been found to be a tenth of this and less.
    room = 1e-3 + float(positions[-1]) * 2**-25
    return out.double().cpu(), expected.transpose(1, 2), room


def _warn_about_windows(config: PretrainedConfig) -> None:
    found = window_layers(config)
    if found and found[1] < config.max_position_embeddings:
        count, window = found
        layers = "every layer" if count == config.num_hidden_layers else f"{count} of {config.num_hidden_layers} layers"
        warnings.warn(
            f"in {layers} attention sees only the last {window} tokens: nothing beyond that window is seen there, "
            "whatever the rotary embedding allows",
            stacklevel=3,
        )


def _swap_config(root: nn.Module, old: PretrainedConfig, new: PretrainedConfig) -> None:
    for module in root.modules():
        if vars(module).get("config") is old:
            vars(module)["config"] = new


def _follow(rotary: Any, config: PretrainedConfig, device: torch.device) -> None:
    """Bring a module that was out of the model to the model's device, filling it where it has never held values."""
    if rotary.inv_freq.device.type == "meta" and device.type != "meta":
        inv_freq, _, _ = stock_frequencies(type(rotary), config)
        rotary.to_empty(device=device)
        rotary.inv_freq.copy_(inv_freq)
        rotary.original_inv_freq.copy_(inv_freq)
    else:
        rotary.to(device)


def _device(rotary: Any) -> torch.device:
    device: torch.device = rotary.inv_freq.device
    return device
