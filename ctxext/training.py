"""A short fine-tune of a patched model: one loop, which accelerate runs on one process or many.

Blocks of tokens come from blocks.py, the loss from loss.py; checkpoints.py keeps what is needed to go on.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DistributedType, GradientAccumulationPlugin, set_seed
from torch import Tensor, nn

from ctxext.blocks import Block, Blocks, Packing
from ctxext.checkpoints import SHARDED, TRACKED, Checkpoints
from ctxext.config import FinetuneSection
from ctxext.data import Document
from ctxext.errors import ConfigError, CtxextError
from ctxext.evaluation.scoring import bare_model, check_head, peak_memory
from ctxext.inspection import inspect
from ctxext.lora import add_lora
from ctxext.loss import summed_loss
from ctxext.patching import active_patch
from ctxext.processes import only_cpus
from ctxext.rotary import LearnedRotaryEmbedding

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Report = Callable[[Mapping[str, Any]], None]
Evaluate = Callable[[Any], list[dict[str, Any]]]

SAMPLED = 64
"""Blocks from which the share of tokens beyond the trained length is told before training starts."""


@dataclass(frozen=True)
class Plan:
    """What a fine-tune will do.

    Attributes:
        steps: optimiser steps.
        processes: that share a step.
        global_batch: blocks of a step: per device x accumulation x processes.
        tokens: of all steps.
        trained: trained length of the model, in tokens.
        target: length that it is extended to.
        trainable: parameters that are trained.
        parameters: all of them.
        beyond: share of the scored tokens that stand beyond the trained length, in the first blocks.
        notes: what the user should know before it starts.
    """

    steps: int
    processes: int
    global_batch: int
    tokens: int
    trained: int
    target: int
    trainable: int
    parameters: int
    beyond: float
    notes: tuple[str, ...]


def learning_rate(settings: FinetuneSection, step: int) -> float:
    """The learning rate of optimiser step ``step``, counted from 0: a linear warm-up, then as ``schedule`` says.

    ``linear`` and ``cosine`` end at 0 after the last step. It depends on the step alone, so neither processes nor
    accumulation nor a resumed run can change it.
    """
    if step < settings.warmup_steps:
        return settings.learning_rate * (step + 1) / settings.warmup_steps
    done = (step - settings.warmup_steps) / max(1, settings.steps - settings.warmup_steps)
    share = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}[settings.schedule]
    return settings.learning_rate * share


def sampled_factor(settings: FinetuneSection, step: int, blocks: list[Block], trained: int, factor: float) -> float:
    """The factor of optimiser step ``step``: drawn evenly up to the method's, from what the blocks' length asks for.

    With positions ``pose`` the length is that of the text, else the position of the last token. It depends on seed,
    step and blocks alone, so it is the same in all processes and in a resumed run.
    """
    pose = settings.positions == "pose"
    reach = max(len(block.ids) if pose else int(block.positions.max()) + 1 for block in blocks)
    least = min(max(1.0, reach / trained), factor)
    return float(np.random.default_rng([settings.seed, step, 0, 1]).uniform(least, factor))


class Root(nn.Module):
    """The module that accelerate wraps: runs whatever is asked of the model inside it.

    So the loss can take the decoder and the output head apart, and wrappers that gather weights or gradients around a
    forward pass (DDP, FSDP, DeepSpeed) see a forward pass all the same.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        # Which modules FSDP gathers one by one; without it, each process would hold all weights in every pass.
        self._no_split_modules = getattr(bare_model(model), "_no_split_modules", None)

    def forward(self, task: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """``task(model, ...)``."""
        return task(bare_model(self.model), *args, **kwargs)


class Finetune:
    """A fine-tune that is ready to run.

    Args:
        model: a causal language model, patched or not; it is trained in place.
        tokenizer: its tokenizer.
        read: gives the training documents, the same each time.
        settings: the recipe.
        checkpoints: keeps the state of the run; begun.
        evaluate: rows of an evaluation of the model, each with ``length`` and ``nll``. It runs in the precision of
            training: with bf16 its figures are rounded otherwise than those of the saved fp32 weights.

    Raises:
        ConfigError: settings that contradict each other or the model.
        DataError: the data can't be read, or has too little text.
        UnsupportedModelError: a model whose loss or packed blocks can't be computed exactly.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: PreTrainedTokenizerBase,
        read: Callable[[], Iterator[Document]],
        settings: FinetuneSection,
        checkpoints: Checkpoints,
        evaluate: Evaluate | None = None,
    ) -> None:
        self.settings, self.checkpoints, self._evaluate = settings, checkpoints, evaluate
        lengths = inspect(model)
        self.trained, self.target = lengths.original_max_position_embeddings, lengths.max_position_embeddings
        _check(settings, self.trained, self.target)
        self.sampled = _sampled_rotary(model) if settings.sample_factor else None
        check_head(model)
        set_seed(settings.seed)
        self.accelerator = _accelerator(settings, checkpoints.folder)
        self.processes = int(self.accelerator.num_processes)
        self.model = _trainable(model, settings)
        self.length = settings.sequence_length or self.target
        packing = Packing(self.length, settings.pack, settings.positions, self.target, settings.seed)
        self._read, self._tokenizer, self._packing = read, tokenizer, packing
        parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        if not parameters:
            raise ConfigError(
                "nothing to train: all weights are frozen, as those of an adapter are; merge it first (ctxext export), "
                "or train another on its base model (section finetune.lora)"
            )
        # Norms and biases are not pulled towards zero.
        groups = [
            {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": settings.weight_decay},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(
            [group for group in groups if group["params"]], lr=settings.learning_rate, betas=settings.betas
        )
        self.counted = (sum(p.numel() for p in parameters), sum(p.numel() for p in self.model.parameters()))
        self.root, self.optimizer = self.accelerator.prepare(Root(self.model), optimizer)
        self.step, self.tokens = 0, 0
        self.blocks: Blocks | None = None

    @property
    def global_batch(self) -> int:
        """Blocks of one optimiser step, over all processes."""
        settings = self.settings
        return settings.batch_size * settings.gradient_accumulation_steps * self.processes

    def plan(self) -> Plan:
        """What will be done, from the settings and the first blocks of the data."""
        sample = Blocks(self._read, self._tokenizer, self._packing)
        wanted = min(SAMPLED, self.global_batch * self.settings.steps)
        targets = beyond = 0
        for block, _ in zip(sample, range(wanted), strict=False):
            targets, beyond = targets + block.targets, beyond + block.targets_beyond(self.trained)
        share = beyond / targets if targets else 0.0
        if beyond == 0 and self.length > self.trained:
            raise ConfigError(
                f"no document among the first {wanted} blocks reaches beyond the trained length of {self.trained} "
                f"tokens, so that blocks of {self.length} teach nothing about longer text: give longer documents, "
                "pack: concat, or a shorter sequence_length"
            )
        notes = [] if share else [f"no token stands beyond the trained length of {self.trained:,} tokens"]
        reach = self.target if self.settings.positions == "pose" else self.length
        if reach < self.target:
            notes.append(f"blocks show relative positions up to {reach:,}; the target is {self.target:,}")
        return Plan(
            steps=self.settings.steps,
            processes=self.processes,
            global_batch=self.global_batch,
            tokens=self.settings.steps * self.global_batch * self.length,
            trained=self.trained,
            target=self.target,
            trainable=self.counted[0],
            parameters=self.counted[1],
            beyond=share,
            notes=tuple(notes),
        )

    def run(self, report: Report | None = None) -> None:
        """Train from the last checkpoint, or from the start, to the last step.

        Raises:
            CtxextError: the loss or the gradient isn't finite, or a checkpoint can't be written; the last checkpoint
                stays usable.
        """
        report = report or (lambda entry: None)
        self._check_blocks()
        self._begin()
        if self.step == 0:
            self._measure(report)
        while self.step < self.settings.steps:
            self._train_step(report)
            last = self.step == self.settings.steps
            if last or (self.settings.evaluate_every and self.step % self.settings.evaluate_every == 0):
                self._measure(report)
            if last or self.step % self.settings.save_every == 0:
                self._save()

    def full_weights(self) -> dict[str, Tensor] | None:
        """All weights of the model where wrappers spread them over the processes (in the main one); None elsewhere."""
        if self.accelerator.distributed_type not in SHARDED:
            return None
        state: dict[str, Tensor] = self.accelerator.get_state_dict(self.root)
        return {name.removeprefix("model."): value for name, value in state.items()}

    def _begin(self) -> None:
        """Start, or go on from the last checkpoint."""
        progress = self.checkpoints.load(self.accelerator, self.root)
        self.step, self.tokens = int(progress.get("step", 0)), int(progress.get("tokens", 0))
        if self.step > self.settings.steps:
            raise ConfigError(
                f"steps {self.settings.steps}: the run in {self.checkpoints.folder} has done {self.step} already; give "
                "more, or another folder"
            )
        self.blocks = Blocks(self._read, self._tokenizer, self._packing, progress.get("place"))
        if self.settings.trackers:
            self.accelerator.init_trackers(TRACKED)

    def _train_step(self, report: Report) -> None:
        started = time.perf_counter()
        assert self.blocks is not None  # _begin() has made them
        blocks = [next(self.blocks) for _ in range(self.global_batch)]
        factor = None
        if self.sampled is not None:
            factor = sampled_factor(self.settings, self.step, blocks, self.trained, self.sampled.factor)
            if self.settings.positions == "pose":
                blocks = [block.squeezed(self.target, int(factor * self.trained)) for block in blocks]
        targets = sum(block.targets for block in blocks)
        rate = learning_rate(self.settings, self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        # accelerate divides by the steps that it accumulates, and the mean over processes is taken of gradients.
        scale = self.settings.gradient_accumulation_steps * self.processes / targets
        total, mean, norm = torch.zeros((), device=self.accelerator.device), math.nan, math.nan
        self.root.train()
        for batch in self._own_batches(blocks):
            with self.accelerator.accumulate(self.root), self._at(factor):
                loss = self.root(summed_loss, **batch)
                self.accelerator.backward(loss * scale)
                total += loss.detach()
                if self.accelerator.sync_gradients:
                    mean = float(self.accelerator.reduce(total, reduction="sum")) / targets
                    self._require_finite("loss", mean)
                    norm = self._clip()
                    self._require_finite("norm of the gradient", norm)
                self.optimizer.step()
                self.optimizer.zero_grad()
        self.step += 1
        self.tokens += self.global_batch * self.length
        entry = {
            "step": self.step,
            "loss": mean,
            "learning_rate": rate,
            "gradient_norm": norm,
            "tokens": self.tokens,
            "beyond": sum(block.targets_beyond(self.trained) for block in blocks) / targets,
            "tokens_per_second": self.global_batch * self.length / (time.perf_counter() - started),
            "memory_bytes": peak_memory(self.accelerator.device),
        }
        if factor is not None:
            entry["factor"] = factor
        self._note(entry, report)

    def _at(self, factor: float | None) -> AbstractContextManager[None]:
        return nullcontext() if factor is None or self.sampled is None else self.sampled.at(factor)

    def _own_batches(self, blocks: list[Block]) -> Iterator[dict[str, Tensor | None]]:
        """This process's share of a step's blocks, as many batches as are accumulated."""
        size, processes = self.settings.batch_size, self.processes
        first = self.accelerator.process_index * size
        for start in range(first, len(blocks), size * processes):
            yield self._batch(blocks[start : start + size])

    def _batch(self, blocks: list[Block]) -> dict[str, Tensor | None]:
        ids, positions, labels = (
            torch.from_numpy(np.stack(arrays)).to(self.accelerator.device) for arrays in zip(*blocks, strict=True)
        )
        # Without a mask Transformers takes positions that don't count on for the start of another text. That is what
        # packed documents are; the gap of PoSE is none.
        mask = torch.ones_like(ids) if self.settings.positions == "pose" else None
        return {"input_ids": ids, "labels": labels, "position_ids": positions, "attention_mask": mask}

    def _clip(self) -> float:
        norm = self.accelerator.clip_grad_norm_(self.root.parameters(), self.settings.max_grad_norm)
        if norm is None and self.accelerator.distributed_type == DistributedType.DEEPSPEED:
            norm = self.root.get_global_grad_norm()  # DeepSpeed has clipped by itself
        return math.nan if norm is None else float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)

    def _require_finite(self, what: str, value: float) -> None:
        if not math.isfinite(value):
            raise CtxextError(
                f"the {what} is {value} at step {self.step + 1}, so nothing more is changed: "
                f"{self.checkpoints.last_good()}; lower learning_rate, or look at the data"
            )

    def _measure(self, report: Report) -> None:
        if self._evaluate is None:
            return
        self.root.eval()
        with torch.no_grad():
            rows = self.root(self._evaluate)
        self._note({"step": self.step, "evaluation": rows, "precision": self.settings.precision}, report)

    def _note(self, entry: dict[str, Any], report: Report) -> None:
        if self.accelerator.is_main_process:
            self.checkpoints.log(entry)
            report(entry)
        values = {key: value for key, value in entry.items() if isinstance(value, (int, float)) and key != "step"}
        values |= {f"perplexity/{row['length']}": row["perplexity"] for row in entry.get("evaluation", ())}
        if self.settings.trackers:
            self.accelerator.log(values, step=entry["step"])

    def _save(self) -> None:
        assert self.blocks is not None  # run() has begun
        progress = {"step": self.step, "tokens": self.tokens, "place": self.blocks.place.as_dict()}
        self.checkpoints.save(self.accelerator, self.root, progress)

    def _check_blocks(self) -> None:
        """Prove on the live model that packed documents don't see each other, and that a gap hides nothing."""
        self.root.eval()
        seen = float(self.root(_reach, self.settings.positions == "pose", self.settings.batch_size))
        hidden = self.settings.pack == "documents" and self.settings.positions == "consecutive"
        if hidden and seen > 0.01:
            raise ConfigError(
                "documents in a block see each other on this model's attention "
                f"({bare_model(self.model).config._attn_implementation}, batch_size {self.settings.batch_size}): use "
                "batch_size 1 with gradient_accumulation_steps, attn_implementation sdpa, or pack: concat"
            )
        if self.settings.positions == "pose" and seen == 0:
            raise ConfigError(
                "text before the gap of positions pose is hidden from what follows on this model's attention: use "
                "another attn_implementation"
            )


def _reach(model: Any, gap: bool, batch: int) -> Tensor:
    """How much the states of a second piece of text change with the first, relative to the largest."""
    half = 12
    ids = torch.arange(2 * half, device=model.device)[None] % 7 + 3
    other = ids.clone()
    other[:, :half] += 1
    positions = torch.arange(half, device=model.device)[None]
    second = positions + half + 5 if gap else positions
    inputs = {
        "position_ids": torch.cat([positions, second], dim=1).expand(batch, -1),
        "attention_mask": torch.ones(batch, 2 * half, dtype=torch.long, device=model.device) if gap else None,
        "use_cache": False,
    }
    with torch.no_grad():
        states, changed = (
            model.get_decoder()(input_ids=x.expand(batch, -1), **inputs).last_hidden_state[:, half:].float()
            for x in (ids, other)
        )
    reach: Tensor = (states - changed).abs().max() / states.abs().max()
    return reach


def _check(settings: FinetuneSection, trained: int, target: int) -> None:
    """Refuse settings that don't fit the model or each other."""
    length = settings.sequence_length
    if length is None:
        raise ConfigError("sequence_length: none given; give the tokens of a block (finetune.sequence_length)")
    if length > target:
        raise ConfigError(
            f"sequence_length {length} is beyond the {target} tokens that the model is extended to; raise factor or "
            "max_position_embeddings of the method, or train on shorter blocks"
        )
    if settings.positions == "pose" and length >= target:
        raise ConfigError(
            f"positions pose trains on blocks shorter than the target of {target} tokens; sequence_length is {length}"
        )


def _sampled_rotary(model: Any) -> LearnedRotaryEmbedding:
    patch = active_patch(model)
    if patch is None or not isinstance(patch.rotary, LearnedRotaryEmbedding):
        raise ConfigError("sample_factor: only a method that learns its frequencies takes another factor (clex)")
    return patch.rotary


def _accelerator(settings: FinetuneSection, folder: Path) -> Accelerator:
    try:
        accelerator = Accelerator(
            cpu=only_cpus(),
            mixed_precision="bf16" if settings.precision == "bf16" else "no",
            # As a plugin, because the environment goes before the plain argument.
            gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=settings.gradient_accumulation_steps),
            log_with=list(settings.trackers) or None,
            project_dir=str(folder) if settings.trackers else None,
        )
    except ValueError as error:
        raise ConfigError(f"accelerate refuses the settings: {error}") from None
    if len(accelerator.log_with) < len(settings.trackers):  # it leaves out what isn't installed
        raise ConfigError(f"finetune.trackers: {', '.join(settings.trackers)}: not all of them are installed")
    parallel = getattr(accelerator.state, "parallelism_config", None)
    if parallel is not None and (parallel.cp_enabled or parallel.tp_enabled or getattr(parallel, "sp_enabled", False)):
        raise ConfigError(
            "context, sequence and tensor parallelism are not supported: the loss and the positions of each block are "
            "computed where the whole block is; spread the weights with FSDP instead (configs/accelerate/fsdp2.yaml)"
        )
    fsdp = getattr(accelerator.state, "fsdp_plugin", None)
    if fsdp is not None and settings.precision == "bf16" and getattr(fsdp, "fsdp_version", 1) == 2:
        # By default gradients would be summed, and the summed loss returned, in bf16 too.
        from torch.distributed.fsdp import MixedPrecisionPolicy

        fsdp.mixed_precision_policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32)
    plugin = getattr(accelerator.state, "deepspeed_plugin", None)
    if plugin is not None:  # which counts and clips by itself
        plugin.deepspeed_config |= {
            "train_micro_batch_size_per_gpu": settings.batch_size,
            "gradient_accumulation_steps": settings.gradient_accumulation_steps,
            "gradient_clipping": settings.max_grad_norm,
        }
    return accelerator


def _trainable(model: Any, settings: FinetuneSection) -> Any:
    """The model in training form: adapters on, what is trained in fp32, memory saved where asked."""
    if settings.gradient_checkpointing:
        # Transformers renamed it during 5.x.
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    if settings.lora is not None:
        model = add_lora(model, settings.lora)
    for parameter in model.parameters():
        # A learning rate of 1e-5 is lost in the rounding of bfloat16.
        if parameter.requires_grad or settings.precision == "fp32":
            parameter.data = parameter.data.float()
    return model


@contextmanager
def own_state() -> Iterator[None]:
    """Leave accelerate's global state as it was found: other runs in this process may have other settings."""
    before = [(state, dict(state._shared_state)) for state in (AcceleratorState, GradientState)]
    try:
        for state, _ in before:
            state._reset_state()
        yield
    finally:
        for state, values in before:
            state._reset_state()
            state._shared_state.update(values)
