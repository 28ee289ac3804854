"""Where Transformers meets the engine: the registered attention, and the planning that happens once per forward pass.

``patch`` puts a :class:`Planner` before the decoder of one model. From positions, padding and cache it works out what
every layer has to do, and sends that along as the keyword ``ctxext``, which Transformers hands to the attention
function of every layer. What is kept between two passes is kept in the cache that it belongs to: a record of what the
cache was filled with, and rotated keys.
"""

from __future__ import annotations

import inspect
import itertools
import weakref
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache

from ctxext.attention import engine, naive
from ctxext.attention.partition import Block, Partition, moved
from ctxext.attention.streaming import StreamingCache
from ctxext.errors import PatchError, UnsupportedModelError

NAME = "ctxext"
"""Under which the attention function is registered, and which the config of a patched model names."""

_STORE = "_ctxext_rotated_keys"
_RECORD = "_ctxext_record"
_SPARE = 512


class Row(NamedTuple):
    """Tokens that attend to each other and to nothing else: a row of the batch, all of them, or a packed document.

    Attributes:
        batch: rows of the batch.
        keys: columns of the key states; a slice, or an index where padding stands between them.
        queries: columns of the query states that belong to the last columns of ``keys``.
        positions: int64 ``[S]`` on the CPU, strictly ascending, of the columns in ``keys``.
        blocks: what the partition makes of them.
    """

    batch: slice
    keys: slice | Tensor
    queries: slice | Tensor
    positions: Tensor
    blocks: list[Block]


class _Store(dict[tuple[int, int], "RotatedKeys"]):
    """Rotated keys by layer and first row of the batch; a copy of the cache, or a file, starts without any."""

    def __reduce__(self) -> tuple[type[_Store], tuple[()]]:
        return _Store, ()


class RotatedKeys(NamedTuple):
    """Keys of one layer and row as they were rotated for the last block, with room for more tokens.

    Attributes:
        source: the cache's own tensor that they were made from.
        version: how often that had been written to.
        step: of the block that they were rotated for.
        start: first column of the row.
        length: columns that ``buffer`` holds so far.
        buffer: ``[B, K, room, d]``.
    """

    source: weakref.ref[Tensor]
    version: int
    step: int
    start: int
    length: int
    buffer: Tensor


class Record:
    """What a cache was filled with, kept in its first layer, so that nothing else goes on with it.

    Attributes:
        settings: of the patch: the method and the rotary embedding that it extends.
        valid: bool ``[B, S]`` on the CPU, which columns are no padding, or None if all are.
        keys: the first layer's cached keys as they were left, while they are.
    """

    def __init__(self, settings: Any, valid: Tensor | None) -> None:
        self.settings = settings
        self.valid = valid
        self.keys: weakref.ref[Tensor] | None = None

    def pads(self, past: int) -> bool:
        """Whether there is padding in the first ``past`` columns of any row."""
        return self.valid is not None and not bool(self.valid[:, :past].all())

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "keys": None}


@dataclass
class Plan:
    """One forward pass.

    Attributes:
        partition: of the patch.
        naive: use the dense reference.
        rows: disjoint in batch and queries; what they leave out is padding.
        shape: of the input ids, ``(B, T)``.
        columns: of the key states, at least.
        cache: the key-value cache.
        record: what the cache is filled with after this pass.
        kept: rotated keys that still belong to what is in the cache, by layer and first row of the batch.
    """

    partition: Partition
    naive: bool
    rows: list[Row]
    shape: tuple[int, int]
    columns: int
    cache: Any = None
    record: Record | None = None
    kept: dict[tuple[int, int], RotatedKeys] = field(default_factory=dict)


class Planner:
    """A forward pre-hook of the decoder: checks the input, fills in positions, and adds the plan."""

    def __init__(self, partition: Partition, method: str, settings: Any, *, naive: bool) -> None:
        self.partition = partition
        self.method = method
        self.settings = settings
        self.naive = naive

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Positional arguments are turned into keywords, so that the plan can join them."""
        config: Any = decoder.config
        if config._attn_implementation != NAME:
            raise PatchError(
                f"attn_implementation was set to {config._attn_implementation!r} on a model patched with "
                f"{self.method}, which needs its own attention; call ctxext.unpatch(model) first"
            )
        given = _by_name(decoder, args, kwargs)
        self._refuse(given, config)
        plan = self.plan(decoder, given)
        return (), {**given, "ctxext": plan}

    def plan(self, decoder: nn.Module, given: dict[str, Any]) -> Plan:
        """What the layers have to do; ``position_ids`` and a cache, if missing, are added to ``given``."""
        inputs = given.get("input_ids")
        inputs = given.get("inputs_embeds") if inputs is None else inputs
        if inputs is None:
            raise UnsupportedModelError(f"method {self.method}: give input_ids or inputs_embeds")
        batch, length = inputs.shape[:2]
        cache = _cache(decoder, given)
        past = _past(cache, given.get("cache_position"))
        valid = _valid(given.get("attention_mask"), batch, past, past + length, self.method)
        positions = given.get("position_ids")
        if positions is not None and positions.shape[-1] != length:
            raise UnsupportedModelError(
                f"method {self.method}: position_ids has shape {tuple(positions.shape)}, but there are {length} tokens"
            )
        # Before a cache evicts anything, so that what is refused has changed nothing.
        with_mask = given.get("attention_mask") is not None
        record = None if cache is None else self._record(cache, valid, batch, past, with_mask=with_mask)
        if isinstance(cache, StreamingCache):
            held = cache.begin(self.partition, past, length, valid)
        else:
            held = torch.arange(past + length, device="cpu")[None]
        if valid is None and len(held) == 1 and (positions is None or _counts(positions, past)):
            if positions is None:
                given["position_ids"] = torch.arange(past, past + length, device=inputs.device)[None]
            columns = held.shape[1]
            rows = [self._row(slice(0, batch), slice(0, columns), slice(0, length), held[0], columns - length)]
        else:
            rows = self._ragged_rows(
                given, valid, positions, batch, held, length, inputs.device, cached=cache is not None
            )
        rows = [row._replace(blocks=moved(row.blocks, inputs.device)) for row in rows]
        plan = Plan(self.partition, self.naive, rows, (batch, length), held.shape[1], cache)
        if cache is not None:
            plan.kept = _kept(cache)
            plan.record = record
        return plan

    def _record(self, cache: Any, valid: Tensor | None, batch: int, past: int, *, with_mask: bool) -> Record:
        """What the cache holds after this pass, once it is clear that it holds what this pass takes it for."""
        layers: Any = getattr(cache, "layers", ())
        before: Record | None = vars(layers[0]).get(_RECORD) if layers else None
        if past and (before is None or before.settings != self.settings):
            raise UnsupportedModelError(
                f"method {self.method}: the cache holds {past} tokens that were not read under this patch, and their "
                "keys mean something else here; start with an empty cache"
            )
        forgotten = not with_mask and before is not None and before.pads(past)
        if past and before is not None and (forgotten or not _same_padding(before, valid, batch, past, layers[0])):
            raise UnsupportedModelError(
                f"method {self.method}: the attention_mask of the {past} cached tokens isn't the one that they were "
                "read with, which gave them their positions; pass it again, with the new tokens' appended"
            )
        return Record(self.settings, valid)

    def _ragged_rows(
        self,
        given: dict[str, Any],
        valid: Tensor | None,
        positions: Tensor | None,
        batch: int,
        held: Tensor,
        length: int,
        device: torch.device,
        *,
        cached: bool,
    ) -> list[Row]:
        """Rows of a batch with padding, with packed documents, or with positions of the caller's own.

        ``held`` says which of all tokens so far each column of the keys holds: int64 ``[1 or B, S]``.
        """
        past = int(held[0, -1]) + 1 - length
        if valid is None:
            valid = torch.ones(batch, past + length, dtype=torch.bool, device="cpu")
        rank = (valid.cumsum(1) - 1).clamp(min=0)
        held = held.expand(batch, -1)
        held_valid, held_rank = valid.gather(1, held), rank.gather(1, held)
        if positions is None:
            given["position_ids"] = rank[:, past:].to(device)
            own = rank[:, past:]
        else:
            own = positions.detach().cpu().expand(batch, -1)
        rows = []
        for i in range(batch):
            columns = held_valid[i].nonzero()[:, 0]
            queries = valid[i, past:].nonzero()[:, 0]
            if len(queries) == 0:
                continue
            given_here = own[i, queries]
            counts = bool((given_here == rank[i, past:][queries]).all())
            if counts:
                first = len(columns) - len(queries)
                rows.append(self._row(slice(i, i + 1), _slice(columns), _slice(queries), held_rank[i, columns], first))
                continue
            if cached:
                raise UnsupportedModelError(
                    f"method {self.method}: with a key-value cache, position_ids must count each row's tokens from 0, "
                    f"padding left out (row {i} has {given_here[:4].tolist()}...); leave position_ids out, or pass "
                    "use_cache=False for packed documents and positions of your own"
                )
            if int(given_here.min()) < 0:
                raise UnsupportedModelError(f"method {self.method}: position_ids of row {i} are negative")
            for start, end in itertools.pairwise([*_starts(given_here), len(queries)]):
                part = _slice(queries[start:end])
                rows.append(self._row(slice(i, i + 1), part, part, given_here[start:end], 0))
        return rows

    def _row(self, batch: slice, keys: Any, queries: Any, positions: Tensor, first: int) -> Row:
        return Row(batch, keys, queries, positions, self.partition.blocks(positions, first))

    def _refuse(self, given: dict[str, Any], config: Any) -> None:
        weights = given.get("output_attentions")
        if (weights or (weights is None and getattr(config, "output_attentions", False))) and not self.naive:
            raise UnsupportedModelError(
                f"output_attentions: method {self.method} never holds attention weights; patch with "
                "attention='naive' to get them (memory grows with the square of the length)"
            )
        if given.get("is_causal") is False:
            raise UnsupportedModelError(f"is_causal=False: method {self.method} reads from left to right only")
        positions = given.get("position_ids")
        starts = [] if positions is None else _starts(positions.detach().cpu().flatten())
        for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
            borders = given.get(name)
            if borders is not None and sorted({*borders[:-1].tolist()}) != starts:
                raise UnsupportedModelError(
                    f"{name}: method {self.method} tells packed documents apart by position_ids that restart where a "
                    "document begins; give position_ids that agree with it"
                )


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    ctxext: Plan | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The attention function that patched models name in their config.

    Args:
        module: the layer's attention.
        query: ``[B, H, T, d]``.
        key: ``[B, K, S, d]``; a static cache may be longer than what it holds.
        value: ``[B, K, S, d]``.
        attention_mask: not looked at; the plan knows the padding.
        dropout: must be 0.
        scaling: factor on the scores; default ``d ** -0.5``.
        ctxext: what this pass has to do.
        kwargs: what Transformers hands to every attention function.

    Returns:
        ``[B, T, H, d]``, zero where the query is padding, and attention weights ``[B, H, T, S]`` if they were computed.

    Raises:
        PatchError: the pass didn't come through the patched decoder.
        UnsupportedModelError: dropout is on.
    """
    if ctxext is None:
        raise PatchError(
            "the attention of a patched model was called without its decoder, or the config of a patched model was "
            "given to another one; patch that model itself"
        )
    if dropout:
        raise UnsupportedModelError(
            f"attention_dropout {dropout:g}: methods that change attention don't support it; set "
            "model.config.attention_dropout and every layer's attention_dropout to 0 before training"
        )
    kind, dtype = query.device.type, query.dtype
    if torch.is_autocast_enabled(kind) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(kind)
    with torch.autocast(kind, enabled=False):  # what it would do to stock attention is done here
        result: tuple[Tensor, Tensor | None] = _run(module, query.to(dtype), key, value, scaling, ctxext)
    return result


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _run(
    module: Any, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, plan: Plan
) -> tuple[Tensor, Tensor | None]:
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    cached, key, value = key, key.to(query.dtype), value.to(query.dtype)
    if key.shape[2] < plan.columns:
        raise UnsupportedModelError(
            f"the layers got the keys of {key.shape[2]} tokens where there are {plan.columns}: Transformers leaves the "
            "cache out where gradient checkpointing trains, or an earlier pass broke off; start with an empty cache"
        )
    if plan.record is not None and module.layer_idx == 0 and plan.cache.layers:
        plan.record.keys = weakref.ref(cached)
        setattr(plan.cache.layers[0], _RECORD, plan.record)
    if plan.shape != (query.shape[0], query.shape[2]):
        raise PatchError(
            f"the layers got {query.shape[0]} x {query.shape[2]} tokens, but the decoder {plan.shape[0]} x "
            f"{plan.shape[1]}: something between them cuts the input, which this method can't follow"
        )
    whole = len(plan.rows) == 1 and plan.rows[0].batch == slice(0, query.shape[0])
    if whole and plan.rows[0].queries == slice(0, query.shape[2]):
        row = plan.rows[0]
        out, weights = _attend(module, query, key[:, :, row.keys], value[:, :, row.keys], row, scale, plan, cached)
        if weights is not None:
            weights = torch.nn.functional.pad(weights, (0, key.shape[2] - weights.shape[-1]))
        return out.transpose(1, 2).contiguous(), weights
    out = query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[3])
    weights = query.new_zeros(*query.shape[:3], key.shape[2]) if plan.naive else None
    for row in plan.rows:
        states = (query[row.batch, :, row.queries], key[row.batch, :, row.keys], value[row.batch, :, row.keys])
        part, part_weights = _attend(module, *states, row, scale, plan, cached)
        out[row.batch, row.queries] = part.transpose(1, 2)
        if weights is not None and part_weights is not None:
            queries, keys = (_index(x, size) for x, size in ((row.queries, query.shape[2]), (row.keys, key.shape[2])))
            weights[row.batch.start, :, queries[:, None], keys] = part_weights[0]
    return out, weights


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, row: Row, scale: float, plan: Plan, cached: Tensor
) -> tuple[Tensor, Tensor | None]:
    if plan.naive:
        return naive.attend(query, key, value, row.positions, plan.partition, scale)
    turned = None
    if len(row.blocks) == 1 and not torch.is_grad_enabled():
        turn = row.blocks[0].key_turn
        if turn is not None and len(turn) == key.shape[2]:
            turned = _rotated(module, key, row, plan, cached)
    return engine.attend(query, key, value, row.blocks, scale, turned), None


def _rotated(module: Any, key: Tensor, row: Row, plan: Plan, cached: Tensor) -> Tensor | None:
    """The row's keys rotated for its only block, of which only the new ones have to be computed while the block lasts.

    They are kept in the cache object itself, and used again only if its keys are the very tensor that was left there:
    cropping, reordering or replacing them makes another one. None where the cache isn't one that grows by appending.
    """
    layers = getattr(plan.cache, "layers", None)
    index = getattr(module, "layer_idx", None)
    if layers is None or index is None or index >= len(layers) or getattr(layers[index], "keys", None) is not cached:
        return None
    if type(layers[index]).__name__ != "DynamicLayer" or not isinstance(row.keys, slice):
        return None
    # An offloaded cache is one that saves memory. In inference mode torch doesn't count what is written to a tensor, so
    # there is no telling whether cached keys are still the same.
    if getattr(plan.cache, "offloading", False) or cached.is_inference():
        return None
    block, length = row.blocks[0], key.shape[2]
    positions = block.key_turn
    assert positions is not None
    kept = plan.kept.get((index, row.batch.start))
    new = block.queries.stop - block.queries.start
    if (
        kept is not None
        and (kept.step, kept.start, kept.length) == (block.step, row.keys.start, length - new)
        and (kept.buffer.shape[0], kept.buffer.dtype) == (key.shape[0], key.dtype)
    ):
        buffer = kept.buffer
        if buffer.shape[2] < length:
            buffer = torch.cat((buffer[:, :, : kept.length], buffer.new_empty(_with_spare(key, new))), dim=2)
        buffer[:, :, kept.length : length] = engine.rotate(
            key[:, :, -new:], positions[-new:], block.inv_freq, exact=block.exact
        )
    else:
        buffer = key.new_empty(_with_spare(key, length))
        buffer[:, :, :length] = engine.rotate(key, positions, block.inv_freq, exact=block.exact)
    store = vars(plan.cache).setdefault(_STORE, _Store())
    store[index, row.batch.start] = RotatedKeys(
        weakref.ref(cached), cached._version, block.step, row.keys.start, length, buffer
    )
    return buffer[:, :, :length]


def _with_spare(key: Tensor, length: int) -> tuple[int, ...]:
    return (*key.shape[:2], length + _SPARE, key.shape[3])


def _kept(cache: Any) -> dict[tuple[int, int], RotatedKeys]:
    """Those rotated keys whose source is still what the cache holds."""
    store: _Store = vars(cache).get(_STORE, _Store())
    layers = getattr(cache, "layers", ())
    kept = {}
    for (index, row), rotated in store.items():
        source = rotated.source()
        if source is None or rotated.version != source._version:
            continue
        if index < len(layers) and getattr(layers[index], "keys", None) is source:
            kept[index, row] = rotated
    return kept


def _by_name(decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments of the decoder's forward by name."""
    if not args:
        return dict(kwargs)
    names = list(inspect.signature(decoder.forward).parameters)
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _past(cache: Any, cache_position: Tensor | None) -> int:
    """Tokens that are in the cache already.

    The first releases of Transformers 5 count a static cache by its keys that aren't zero, and say the truth in
    ``cache_position``; for other caches it is that which may be off.
    """
    if cache is None:
        return 0
    if cache_position is not None and getattr(cache, "is_compileable", False):
        return int(cache_position[0])
    return int(cache.get_seq_length())


def _cache(decoder: Any, given: dict[str, Any]) -> Any:
    """The cache of this call; where the decoder would make one itself, it is made here, so that it can be marked."""
    for name in ("cache", "past_key_values"):
        if given.get(name) is not None:
            return given[name]
    use_cache = given.get("use_cache")
    if not (decoder.config.use_cache if use_cache is None else use_cache):
        return None
    if decoder.training and getattr(decoder, "gradient_checkpointing", False) and torch.is_grad_enabled():
        return None  # Transformers goes without a cache then
    # Transformers renamed the argument during 5.x.
    name = "cache" if "cache" in inspect.signature(decoder.forward).parameters else "past_key_values"
    given[name] = DynamicCache(config=decoder.config)
    return given[name]


def _same_padding(before: Record, valid: Tensor | None, batch: int, past: int, layer: Any) -> bool:
    """Whether padding stands where it stood; in reordered, selected or repeated rows, where it stood in some row."""
    if before.valid is None and valid is None:
        return True
    now = torch.ones(batch, past, dtype=torch.bool, device="cpu") if valid is None else valid[:, :past]
    then = torch.ones_like(now) if before.valid is None else before.valid[:, :past]
    if then.shape == now.shape and torch.equal(then, now):
        return True
    untouched = before.keys is not None and before.keys() is layer.keys
    return not untouched and all(bool((then == row).all(dim=1).any()) for row in now)


def _valid(mask: Any, batch: int, past: int, total: int, method: str) -> Tensor | None:
    """Which of the columns so far are no padding, bool ``[B, S]`` on the CPU, or None if all are.

    Raises:
        UnsupportedModelError: the mask says more than that.
    """
    if isinstance(mask, dict):  # one for each type of layer, and these models have but one
        mask = mask.get("full_attention", mask)
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or mask.dim() not in (2, 4) or (mask.dim() == 4 and _says_more(mask)):
        shape = tuple(mask.shape) if hasattr(mask, "shape") else type(mask).__name__
        raise UnsupportedModelError(
            f"method {method}: attention_mask of shape {shape} is not supported; give a two-dimensional one, 1 for "
            "tokens and 0 for padding (packed documents are told apart by position_ids that restart)"
        )
    if mask.dim() == 4:
        mask = mask[:, 0, 0]
    if mask.dtype != torch.bool and not bool(((mask == 0) | (mask == 1)).all()):
        raise UnsupportedModelError(
            f"method {method}: attention_mask has values other than 0 and 1; give 1 for tokens and 0 for padding"
        )
    if mask.shape[0] != batch or mask.shape[1] < total:
        raise UnsupportedModelError(
            f"method {method}: attention_mask has shape {tuple(mask.shape)}, but there are {batch} rows of {total} "
            f"tokens ({past} of them in the cache)"
        )
    valid = mask[:, :total].detach().to("cpu", torch.bool)
    return None if bool(valid.all()) else valid


def _says_more(mask: Tensor) -> bool:
    """Whether a four-dimensional mask is anything but ``key_mask``'s."""
    return mask.shape[1:3] != (1, 1) or mask.dtype != torch.bool


def _counts(positions: Tensor, past: int) -> bool:
    """Whether positions simply go on counting from the cache's length in every row."""
    counted = torch.arange(past, past + positions.shape[-1], device=positions.device)
    return bool((positions == counted).all())


def _starts(positions: Tensor) -> list[int]:
    """Where packed documents begin: at the first of positions ``[T]``, and wherever they don't go up."""
    return [0, *((positions.diff() <= 0).nonzero()[:, 0] + 1).tolist()]


def _slice(columns: Tensor) -> slice | Tensor:
    """Columns as a slice if there is no gap in them."""
    first, last = int(columns[0]), int(columns[-1])
    return slice(first, last + 1) if last - first + 1 == len(columns) else columns


def _index(columns: slice | Tensor, size: int) -> Tensor:
    return torch.arange(size, device="cpu")[columns] if isinstance(columns, slice) else columns


def key_mask(kv_length: int, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor | None:
    """The mask that Transformers builds for the attention function: ``[B, 1, 1, S]``, False for padding, or None.

    Causality is the engine's business, so it is never as large as the scores. It exists because ``generate`` prepares
    masks for static caches itself, and hands them to the decoder in place of the two-dimensional one.
    """
    if attention_mask is None:
        return None
    mask = torch.nn.functional.pad(attention_mask, (0, max(0, kv_length - attention_mask.shape[-1])))
    return mask[:, None, None, :kv_length]


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, key_mask)


def positions_to_probe(partition: Partition, trained: int) -> list[int]:
    """Positions within, around and far beyond the range in which the partition changes nothing, and the trained one."""
    marks = {partition.identity_length, trained}
    near = {position for n in marks for position in (n // 2, n - 1, n, n + n // 3 + 1, 2 * n + 5, 4 * n - 1, 4 * n)}
    return sorted(near | {0, 1})
