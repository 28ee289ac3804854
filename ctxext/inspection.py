"""What is really in effect on a model, read from the module that it calls."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import nn

from ctxext.attention.partition import Partition
from ctxext.errors import CtxextError
from ctxext.families import (
    extension_record,
    find_family,
    rope_parameters,
    rotary_module,
    stock_frequencies,
    window_layers,
)
from ctxext.patching import (
    Patch,
    active_patch,
    difference_from_method,
    effective_fingerprint,
    fingerprint,
    loaded_frequencies,
    same_up_to_rounding,
    unwrap,
)
from ctxext.rope import default_inv_freq, wavelengths

_ROWS = 12


@dataclass(frozen=True)
class Inspection:
    """The report of :func:`inspect`; ``str()`` is for people, :meth:`to_dict` for files.

    Attributes:
        model: class name of the model.
        model_type: its architecture.
        method: settings of the patch that is on, or None.
        scaling: Transformers' rope type of the loaded checkpoint, ``default`` for none.
        original_max_position_embeddings: trained length in tokens.
        max_position_embeddings: target length in tokens; for methods that change attention the patch's ``max_length``,
            because the config keeps the trained length.
        factor: target over trained length.
        rope_theta: base of the frequencies before extension.
        attention_factor: factor on cosine and sine, as measured.
        inv_freq: live frequencies in radians per token.
        base_inv_freq: the same before any scaling.
        checkpoint_method: name of the ctxext method that the checkpoint was saved with, or None.
        patched_modules: number of modules that the patch replaced (the rotary embedding) or redirected (attention).
        inv_freq_sha256: of the live frequencies as little-endian fp32.
        fingerprint: sha256 over frequencies and attention factor, or over the relative rotations that scores see where
            the method changes attention.
        attention: what the method does to attention in one sentence, or None.
        consistent: whether the config describes what the live module does.
        problems: what is not as it should be, one sentence each.
        notes: what a user should know, one sentence each.
        partition: what the patched attention does, for pictures; not part of files.
    """

    model: str
    model_type: str
    method: dict[str, Any] | None
    scaling: str
    original_max_position_embeddings: int
    max_position_embeddings: int
    factor: float
    rope_theta: float
    attention_factor: float
    inv_freq: tuple[float, ...]
    base_inv_freq: tuple[float, ...]
    checkpoint_method: str | None
    patched_modules: int
    inv_freq_sha256: str
    fingerprint: str
    consistent: bool
    attention: str | None = None
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default=())
    partition: Partition | None = field(default=None, repr=False, compare=False)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(replace(self, partition=None), dict_factory=_without_partition)

    def summary(self) -> dict[str, Any]:
        """What a result file says of the patch: everything but the frequencies themselves."""
        return {key: value for key, value in self.to_dict().items() if key not in ("inv_freq", "base_inv_freq")}

    def __str__(self) -> str:
        lines = [f"{label:<18}{value}" for label, value in self._facts()]
        lines += ["", *self._table(), ""]
        lines += [f"note: {note}" for note in self.notes]
        lines += [f"PROBLEM: {problem}" for problem in self.problems]
        lines += [] if self.problems else ["config and live module agree"]
        return "\n".join(lines)

    def _facts(self) -> list[tuple[str, str]]:
        if self.method is not None:
            method = _with_settings(self.method)
        else:
            method = (
                "none" if self.scaling == "default" else f"none; the checkpoint itself is scaled with {self.scaling}"
            )
        attention = [] if self.attention is None else [("attention", self.attention)]
        return [
            ("model", f"{self.model} ({self.model_type})"),
            ("method", method),
            *attention,
            ("original length", f"{self.original_max_position_embeddings:,} tokens"),
            ("target length", f"{self.max_position_embeddings:,} tokens (factor {self.factor:g})"),
            ("rope_theta", f"{self.rope_theta:,.6g}"),
            ("attention factor", self._attention_factor()),
            ("patched modules", str(self.patched_modules)),
            ("frequencies", f"sha256 {self.inv_freq_sha256[:16]}, fingerprint {self.fingerprint[:16]}"),
            ("dimensions", self._summary()),
        ]

    def farthest(self) -> tuple[tuple[float, ...], float]:
        """Frequencies and attention factor for the last token of the target length."""
        if self.partition is None:
            return self.inv_freq, self.attention_factor
        last = torch.tensor([self.max_position_embeddings - 1], device="cpu")
        inv_freq, gain = self.partition.frequencies_at(last)
        return tuple(inv_freq[0].tolist()), self.attention_factor * float(gain[0]) ** 0.5

    def _attention_factor(self) -> str:
        far = self.farthest()[1]
        growth = "" if far == self.attention_factor else f", {far:.6f} at {self.max_position_embeddings:,} tokens"
        return f"{self.attention_factor:.6f}{growth}"

    def _ratios(self) -> list[float]:
        return [before / after for before, after in zip(self.base_inv_freq, self.farthest()[0], strict=True)]

    def _summary(self) -> str:
        ratios = self._ratios()
        where = "" if self.farthest()[0] == self.inv_freq else f" at {self.max_position_embeddings:,} tokens"
        kept = sum(abs(ratio - 1) < 1e-4 for ratio in ratios)
        if kept == len(ratios):
            return f"all {kept} frequencies unchanged"
        full = sum(ratio >= max(ratios) * (1 - 1e-4) and abs(ratio - 1) >= 1e-4 for ratio in ratios)
        slowed = f"{kept} unchanged, {full} slowed most (x{max(ratios):.3g}), rest between"
        return f"of {len(ratios)} frequencies{where} {slowed}"

    def _table(self) -> list[str]:
        count = len(self.inv_freq)
        shown = sorted({round(i * (count - 1) / (_ROWS - 1)) for i in range(_ROWS)})
        before, after = (
            wavelengths(torch.tensor(frequencies, dtype=torch.float64, device="cpu")).tolist()
            for frequencies in (self.base_inv_freq, self.farthest()[0])
        )
        lines = ["dimension   wavelength before        after   slowed by   turns in trained length"]
        for i in shown:
            turns = self.original_max_position_embeddings / before[i]
            lines.append(
                f"{i:>9}   {before[i]:>17,.1f} {after[i]:>12,.1f} {after[i] / before[i]:>10.3f}x {turns:>20,.2f}"
            )
        return lines

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw into a picture file what the method does: wavelengths before and after, or relative positions.

        Raises:
            CtxextError: matplotlib is not installed, or the file can't be written.
        """
        from ctxext.plotting import plot_relative_positions, plot_wavelengths

        if self.partition is not None and self.method is not None:
            plot_relative_positions(
                self.partition,
                self.original_max_position_embeddings,
                path,
                title=f"{self.model_type}: {_with_settings(self.method)}",
            )
        else:
            plot_wavelengths(self, path)


def inspect(model: nn.Module) -> Inspection:
    """Read from a live model which rotary embedding is in effect, and whether its config says the same.

    Raises:
        UnsupportedModelError: the architecture isn't supported.
    """
    model = unwrap(model)
    family = find_family(model)  # type: ignore[arg-type]  # find_family checks the type
    config: Any = model.config
    rotary: Any = rotary_module(model, family)  # type: ignore[arg-type]
    patch = active_patch(model)

    live = rotary.inv_freq.detach().float().cpu() if rotary.inv_freq.device.type != "meta" else None
    problems = list(_disagreements(patch, rotary, config, live))
    if live is None:
        live = patch.rotary._exact if patch else stock_frequencies(type(rotary), config)[0]
    attention_factor = float(rotary.attention_scaling)
    if patch is not None:
        difference = difference_from_method(patch, rotary)
        problems += [] if difference is None else [f"{difference}: the patch is not in effect"]
    try:
        record = extension_record(config)
    except CtxextError as error:
        record = None
        problems += [] if problems else [str(error)]
    theta, original = _trained(patch, record, config, rotary)
    notes = _notes(patch, record, config)
    partition = None if patch is None else patch.partition
    target = config.max_position_embeddings if partition is None or patch is None else patch.max_length
    return Inspection(
        model=type(model).__name__,
        model_type=family.model_type,
        method=None if patch is None else patch.method.model_dump(exclude_none=True, mode="json"),
        scaling="default" if patch is not None else str(rotary.rope_type),
        original_max_position_embeddings=original,
        max_position_embeddings=target,
        factor=target / original,
        rope_theta=theta,
        attention_factor=attention_factor,
        inv_freq=tuple(live.tolist()),
        base_inv_freq=tuple(default_inv_freq(theta, 2 * live.numel()).tolist()),
        checkpoint_method=record["method"]["name"] if patch is None and record is not None else None,
        patched_modules=0 if patch is None else 1 + (0 if partition is None else config.num_hidden_layers),
        inv_freq_sha256=fingerprint(live, None),
        fingerprint=fingerprint(live, attention_factor)
        if partition is None
        else effective_fingerprint(partition, original),
        attention=None if partition is None else partition.describe(),
        partition=partition,
        consistent=not problems,
        problems=tuple(problems),
        notes=tuple(notes),
    )


def _disagreements(patch: Patch | None, rotary: Any, config: Any, live: torch.Tensor | None) -> list[str]:
    """Ways in which the config, as it stands now, isn't what the live module does."""
    problems = []
    reload = (
        "use ctxext.patch(model, method, replace=True) to change the method"
        if patch is not None
        else "extend the model with ctxext.patch(model, method) instead"
    )
    if patch is not None and config is not patch.config:
        return [
            "the patch was put on the decoder alone, so this model's own config knows nothing of it and is "
            "not in effect: save_pretrained would lose the method; unpatch, and patch the whole model"
        ]
    if patch is not None and config.rope_parameters != patch.written["rope_parameters"]:
        changed = _changed_keys(patch.written["rope_parameters"], config.rope_parameters)
        problems.append(
            f"config.rope_parameters ({changed}) were edited after patching and are not in effect; {reload}"
        )
        return problems
    if patch is not None and config.max_position_embeddings != patch.written["max_position_embeddings"]:
        problems.append(
            f"config.max_position_embeddings ({config.max_position_embeddings}) was edited after patching; it scales "
            f"nothing and is not in effect: the target is {patch.max_length}"
        )
    parameters = getattr(config, "rope_parameters", None) or {}
    unread = [key for key in parameters if key not in ("rope_type", "rope_theta", "type", "partial_rotary_factor")]
    if patch is None and unread and parameters.get("rope_type") == "default":
        problems.append(
            f"config.rope_parameters have {', '.join(unread)}, which rope_type default doesn't read: "
            f"not in effect; {reload}"
        )
    if getattr(config, "rope_theta", None) not in (None, parameters.get("rope_theta")):
        problems.append(
            f"config.rope_theta ({config.rope_theta}) is not in effect: Transformers reads rope_parameters; {reload}"
        )
    loaded = getattr(rotary, "original_max_seq_len", None)
    if loaded not in (None, config.max_position_embeddings):
        problems.append(
            f"config.max_position_embeddings was edited after loading ({loaded} -> {config.max_position_embeddings}); "
            f"it scales nothing and is not in effect; {reload}"
        )
    rotary_class = type(rotary if patch is None else patch.original_rotary)
    try:
        expected, attention_factor, rope_type = stock_frequencies(rotary_class, config)
    except Exception as error:
        problems.append(
            f"config.rope_parameters were edited after loading and are not in effect; Transformers couldn't even load "
            f"them ({type(error).__name__}: {error}); {reload}"
        )
        return problems
    if patch is not None and (patch.partition is not None or patch.learned is not None):
        # The config describes the trained model, and is meant to; or what was learned, when the model is saved.
        expected, attention_factor = patch.rope
    if patch is None and rope_type != rotary.rope_type:
        problems.append(
            f"config.rope_parameters ask for {rope_type}, but the model was loaded with {rotary.rope_type}: "
            f"the edit is not in effect; {reload}"
        )
        return problems
    if live is None:
        return problems
    loaded_with = live if patch is not None else loaded_frequencies(rotary)
    if not same_up_to_rounding(loaded_with, expected) or abs(attention_factor - rotary.attention_scaling) > 1e-6:
        problems.append(
            "the live frequencies are not those of config.rope_parameters, which were edited after loading and are "
            f"not in effect; {reload}"
        )
    elif not same_up_to_rounding(live, expected):
        problems.append(f"{rope_type}: the live frequencies are those of the last input, not of the config")
    elif not torch.allclose(live, expected, rtol=1e-6, atol=0):
        problems.append(
            "the frequencies were rounded to 16 bits when the model was cast; load it with from_pretrained(dtype=...) "
            "instead, or patch it: ctxext keeps them in fp32"
        )
    return problems


def _trained(patch: Patch | None, record: dict[str, Any] | None, config: Any, rotary: Any) -> tuple[float, int]:
    """Base and trained length, as far as they can be told."""
    if patch is not None:
        return patch.spec.rope_theta, patch.method.lengths(patch.spec).original
    try:
        parameters = rope_parameters(config)
    except CtxextError:
        return float(getattr(rotary.config, "default_theta", 10_000.0)), config.max_position_embeddings
    if record is not None:
        return record["rope_theta"], record["original_max_position_embeddings"]
    original = parameters.get("original_max_position_embeddings") or config.max_position_embeddings
    return float(parameters["rope_theta"]), int(original)


def _changed_keys(written: dict[str, Any], now: Any) -> str:
    if not isinstance(now, dict):
        return repr(now)
    keys = [key for key in {**written, **now} if written.get(key) != now.get(key)]
    return ", ".join(f"{key}: {_short(written.get(key))} -> {_short(now.get(key))}" for key in keys)


def _notes(patch: Patch | None, record: dict[str, Any] | None, config: Any) -> list[str]:
    notes = []
    windows = window_layers(config)
    if windows is not None:
        notes.append(
            f"{windows[0]} of {config.num_hidden_layers} layers attend to a sliding window of {windows[1]} tokens: "
            "nothing beyond it is seen there"
        )
    if patch is None and record is not None:
        notes.append(f"this checkpoint was saved with ctxext's {record['method']}")
    if patch is not None and patch.learned is not None:
        count = sum(parameter.numel() for parameter in patch.learned.parameters())
        state = "have been trained" if patch.trained else "are untrained: the frequencies are those that it starts with"
        notes.append(f"the {count:,} weights of {patch.method.name} {state}")
    if patch is not None and patch.method.lengths(patch.spec).factor == 1:
        notes.append("the target length is the trained length; give factor or max_position_embeddings to raise it")
    return notes


def _without_partition(items: list[tuple[str, Any]]) -> dict[str, Any]:
    return {key: value for key, value in items if key != "partition"}


def _with_settings(method: Mapping[str, Any]) -> str:
    """A method's name and settings on one line."""
    settings = [
        f"{key}={_with_settings(value) if isinstance(value, Mapping) else _short(value)}"
        for key, value in method.items()
        if key != "name"
    ]
    return f"{method['name']} ({', '.join(settings)})" if settings else str(method["name"])


def _short(value: Any) -> str:
    if isinstance(value, (list, tuple)) and len(value) > 4:
        return f"[{value[0]}, ..., {value[-1]}]"
    return f"{value:g}" if isinstance(value, float) else str(value)
