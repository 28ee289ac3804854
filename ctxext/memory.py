"""Memory that a supported model takes, worked out from its sizes: weights, key-value cache, activations, logits.

Counted is what the forward and backward passes of Transformers hold at once, tensor by tensor, where attention runs on
a fused kernel. Not counted are the scratch space of kernels, what allocators waste, and the libraries themselves.
Everything is in bytes. What a plan makes of it is in ``planning``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from ctxext.families import FAMILIES, window_layers
from ctxext.loss import SLICE_LOGITS

_FLOAT32 = 4
_INDICES = 6 * 8  # int64 numbers that say which token goes to which expert


@dataclass(frozen=True)
class Sizes:
    """Widths and counts of a model, in elements unless it says otherwise.

    Attributes:
        hidden: hidden states (D below).
        query: all query heads together, H * d.
        key: all key heads together, K * d; as many as there are values.
        heads: query heads (H).
        head_dim: d.
        vocabulary: logits of a token.
        layers: decoder layers, of which ``sparse_layers`` are mixtures of experts and ``window_layers`` attend to the
            last ``window`` tokens only.
        intermediate: inner width of a dense layer's MLP.
        experts_per_token: experts that a token is sent to, each of inner width ``expert_intermediate``.
        shared_intermediate: inner width of an expert that sees all tokens, 0 without one.
        normalizes_queries: whether queries and keys have a norm of their own.
        parameters: all of them; tied embeddings count once.
        active_parameters: those that one token uses.
        linear_parameters: those of linear layers, the output head among them; experts are none.
        adapter_rows: inputs and outputs of the attention's linear layers, by which the rank of adapters is multiplied.
        tied: whether the output head is the embedding.
    """

    hidden: int
    query: int
    key: int
    heads: int
    head_dim: int
    vocabulary: int
    layers: int
    sparse_layers: int
    window_layers: int
    window: int
    intermediate: int
    experts_per_token: int
    expert_intermediate: int
    shared_intermediate: int
    normalizes_queries: bool
    parameters: int
    active_parameters: int
    linear_parameters: int
    adapter_rows: int
    tied: bool


def sizes(model: Any) -> Sizes:
    """Read the sizes of a supported causal language model, which may be on the meta device."""
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    parameters = dict(model.named_parameters())
    experts = {name: p for name, p in parameters.items() if ".experts." in name}
    idle = sum(p.numel() - p.numel() // p.shape[0] * config.num_experts_per_tok for p in experts.values())
    layers = getattr(model.base_model, FAMILIES[config.model_type].layers)
    linear = {name: m for name, m in layers.named_modules() if isinstance(m, nn.Linear)}
    adapted = [m for name, m in linear.items() if f".{FAMILIES[config.model_type].attention}." in name]
    windows, window = window_layers(config) or (0, 0)
    return Sizes(
        hidden=config.hidden_size,
        query=config.num_attention_heads * head_dim,
        key=config.num_key_value_heads * head_dim,
        heads=config.num_attention_heads,
        head_dim=head_dim,
        vocabulary=config.vocab_size,
        layers=config.num_hidden_layers,
        sparse_layers=len({name.split(".experts.")[0] for name in experts}),
        window_layers=windows,
        window=window,
        intermediate=config.intermediate_size,
        experts_per_token=config.num_experts_per_tok if experts else 0,
        expert_intermediate=max((p.shape[-1] for name, p in experts.items() if "down_proj" in name), default=0),
        shared_intermediate=max(
            (m.in_features for name, m in linear.items() if "shared_expert.down" in name), default=0
        ),
        normalizes_queries=any(name.endswith("q_norm.weight") for name in parameters),
        parameters=sum(p.numel() for p in parameters.values()),
        active_parameters=sum(p.numel() for p in parameters.values()) - idle,
        linear_parameters=sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear)),
        adapter_rows=sum(m.in_features + m.out_features for m in adapted),
        tied=model.get_input_embeddings().weight is model.get_output_embeddings().weight,
    )


@dataclass(frozen=True)
class Input:
    """``batch`` rows of ``length`` tokens, for weights in a dtype of ``width`` bytes."""

    length: int
    batch: int
    width: int

    @property
    def tokens(self) -> int:
        """Tokens of all rows."""
        return self.length * self.batch


@dataclass(frozen=True)
class Memory:
    """What one pass holds at its peak, in bytes.

    Attributes:
        weights: all parameters.
        states: gradients and the optimiser's two moments.
        cache: keys and values.
        activations: hidden states of all kinds.
        logits: logits, what the loss makes of them, and the output head's gradient.
    """

    weights: int
    states: int = 0
    cache: int = 0
    activations: int = 0
    logits: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.states + self.cache + self.activations + self.logits


def cache_bytes(model: Sizes, given: Input, *, filling: bool = False) -> int:
    """Keys and values of all layers.

    Layers with a sliding window keep no more than the window, but while a pass is ``filling`` the cache, slices of what
    they computed, which keep all of it alive.
    """
    bounded = given.length if filling else min(given.length, model.window - 1)
    columns = (model.layers - model.window_layers) * given.length + model.window_layers * bounded
    return 2 * model.key * given.width * given.batch * columns


def prefill(model: Sizes, given: Input) -> Memory:
    """One pass that fills the cache and gives the last token's logits, as ``generate`` begins."""
    return Memory(
        weights=model.parameters * given.width,
        cache=cache_bytes(model, given, filling=True),
        activations=forward_activations(model, given),
        logits=given.batch * model.vocabulary * given.width,
    )


def all_logits(model: Sizes, given: Input) -> Memory:
    """``model(input_ids)``: every token's logits, and the cache that Transformers fills unless told otherwise."""
    states = given.tokens * model.hidden * given.width  # the last layer's, which the logits are made of
    return Memory(
        weights=model.parameters * given.width,
        cache=cache_bytes(model, given, filling=True),
        activations=max(forward_activations(model, given) - given.tokens * model.vocabulary * given.width, states),
        logits=given.tokens * model.vocabulary * given.width,
    )


def decode(model: Sizes, given: Input, *, rotated_keys: bool = False) -> Memory:
    """One more token with a cache of ``given.length`` tokens.

    ``DynamicCache`` appends by copying, so one layer's keys exist twice for a moment. ``rotated_keys``: a method keeps
    a second set of keys beside the cache.
    """
    cache = cache_bytes(model, given)
    copied = model.key * given.width * given.tokens
    return Memory(
        weights=model.parameters * given.width,
        cache=cache + (cache // 2 if rotated_keys else 0),
        activations=copied,
        logits=given.batch * model.vocabulary * given.width,
    )


def forward_activations(model: Sizes, given: Input) -> int:
    """The peak within one layer of a pass without gradients, and what is held beside it."""
    width, tokens = given.width, given.tokens
    # The embeddings, which the decoder holds to its end, the layer's input, the residual stream, and it normalised.
    held = 4 * model.hidden * width
    norm = 2 * _FLOAT32 * model.hidden
    rotary = width * max(4 * model.query + 2 * model.key, 2 * model.query + 5 * model.key)
    if model.normalizes_queries:
        rotary = max(rotary, (width + 2 * _FLOAT32) * model.query)
    dense = 3 * width * model.intermediate if model.layers > model.sparse_layers else 0
    per_token = held + max(norm, rotary, dense, _experts_forward(model, width))
    return tokens * per_token + _rotary_tables(model, given) + _window_costs(model, given, given.width, layers=1)


def _experts_forward(model: Sizes, width: int) -> int:
    """Peak of a mixture of experts: inputs by expert, gate and up, activation, product; or outputs being reordered.

    As in Transformers 5.24; earlier releases hold up to two thirds more while they sort tokens by expert.
    """
    routed = model.experts_per_token * max(model.hidden + 4 * model.expert_intermediate, 4 * model.hidden)
    shared = 3 * model.shared_intermediate + model.hidden if model.shared_intermediate else 0
    return width * (routed + shared) + model.experts_per_token * _INDICES


def _rotary_tables(model: Sizes, given: Input) -> int:
    return 2 * model.head_dim * given.width * given.length


def _window_costs(model: Sizes, given: Input, width: int, layers: int) -> int:
    """What a sliding window given to SDPA as a mask costs: the mask, and in each of ``layers`` what is made for it.

    That is a mask of floats, and keys and values repeated for every query head.
    """
    if not model.window_layers or given.length < model.window:
        return 0
    repeated = 2 * (model.query - model.key) * given.tokens
    return given.length**2 + width * (given.length**2 + repeated) * min(layers, model.window_layers)


def training(
    model: Sizes,
    given: Input,
    *,
    bf16: bool = True,
    lora_rank: int = 0,
    checkpointing: bool = True,
    sliced_loss: bool = True,
) -> Memory:
    """Forward and backward of one step as ``ctxext finetune`` runs it, gradients of an earlier one in place.

    What trains is float32, with float32 gradients and moments of AdamW; with ``bf16`` autocast computes in bfloat16.

    Args:
        model: its sizes.
        given: the batch of one forward pass, and with ``bf16`` the dtype of weights that don't train; accumulating
            takes no more.
        bf16: autocast to bfloat16; otherwise everything is float32.
        lora_rank: of adapters on the attention's four linear layers; 0 trains all parameters.
        checkpointing: keep only the layers' inputs, and compute each layer again in the backward pass.
        sliced_loss: head and loss run over slices of ``SLICE_LOGITS`` logits, again in the backward pass, as in
            ``loss.summed_loss``; otherwise it is ``model(labels=...).loss``, which holds three float32 copies of all
            logits.
    """
    tokens, hidden = given.tokens, model.hidden
    flow = _Flow.of(given.width, bf16=bf16, lora_rank=lora_rank)
    adapters = lora_rank * model.adapter_rows
    trained = _FLOAT32 * (adapters if lora_rank else model.parameters)
    dense = _saved(model, flow, sparse=False) if model.layers > model.sparse_layers else 0
    sparse = _saved(model, flow, sparse=True) if model.sparse_layers else 0
    per_layer = (model.layers - model.sparse_layers) * dense + model.sparse_layers * sparse
    kept = model.layers * hidden * flow.residual if checkpointing else per_layer + hidden * flow.residual
    held = tokens * kept + 2 * _FLOAT32 * model.head_dim * given.length
    held += _window_costs(model, given, flow.compute, layers=1 if checkpointing else model.layers)
    # Autocast keeps what it makes of the weights to the end of the forward pass; linear layers, beyond it.
    copies = 2 * model.linear_parameters if flow.casts and flow.trains else 0
    held += 0 if checkpointing else copies

    gradient = hidden * flow.residual
    norm = (_FLOAT32 + flow.residual * flow.trains) * hidden
    head = 0 if lora_rank else _FLOAT32 * hidden * model.vocabulary
    loss = _loss(model, given, flow, sliced=sliced_loss) + head * (2 if sliced_loss else 0)
    loss = max(loss, (copies if checkpointing else 0) + _loss_forward(model, given, flow, sliced=sliced_loss))
    after = head if model.tied else 0  # the embedding's gradient waits for its other half
    again = max(dense, sparse) if checkpointing else 0
    phases = [
        held + tokens * (norm + hidden * flow.residual) + loss,
        held + tokens * (gradient + norm + hidden * (flow.residual + 4 * _FLOAT32)) + after,
        held + tokens * (gradient + again + _layer_backward(model, flow)) + after,
    ]
    peak = max(phases)
    logits = loss if peak == phases[0] else after
    # After the backward pass AdamW, which may take all parameters at once, needs as much as they do.
    activations = max(peak, trained) - logits
    weights = model.parameters * flow.residual + adapters * _FLOAT32
    return Memory(weights=weights, states=3 * trained, activations=activations, logits=logits)


@dataclass(frozen=True)
class _Flow:
    """Bytes of an element in the residual stream and in matrix products, and whether the base weights train."""

    residual: int
    compute: int
    trains: bool

    @classmethod
    def of(cls, width: int, *, bf16: bool, lora_rank: int) -> _Flow:
        residual = width if lora_rank and bf16 else _FLOAT32
        return cls(residual, 2 if bf16 else _FLOAT32, not lora_rank)

    @property
    def casts(self) -> bool:
        """Whether linear layers read copies of what they are given."""
        return self.compute != self.residual or (not self.trains and self.compute < _FLOAT32)


def _loss(model: Sizes, given: Input, flow: _Flow, *, sliced: bool) -> int:
    """Log-probabilities and two gradients, in float32; in slices also gradients of the states, of parts and joined."""
    logits = given.tokens * model.vocabulary
    if sliced:
        return 3 * _FLOAT32 * min(SLICE_LOGITS, logits) + 2 * given.tokens * model.hidden * flow.residual
    return 3 * _FLOAT32 * logits


def _loss_forward(model: Sizes, given: Input, flow: _Flow, *, sliced: bool) -> int:
    """Logits as computed, in float32, and log-probabilities."""
    logits = given.tokens * model.vocabulary
    widths = 2 * _FLOAT32 + (flow.compute if flow.compute < _FLOAT32 else 0)
    return widths * (min(SLICE_LOGITS, logits) if sliced else logits)


def _saved(model: Sizes, flow: _Flow, *, sparse: bool) -> int:
    """What one layer keeps of each token for the backward pass."""
    hidden, query, key, compute = model.hidden, model.query, model.key, flow.compute
    norms = 2 * (_FLOAT32 + flow.residual * flow.trains) * hidden
    if model.normalizes_queries:
        norms += (_FLOAT32 + compute * flow.trains) * (query + key)
    read = compute * (3 * hidden + (0 if flow.trains else query)) if flow.casts else compute * hidden
    attention = read + 2 * compute * (query + key) + _FLOAT32 * model.heads
    if sparse:
        return norms + attention + _experts_saved(model, flow)
    return norms + attention + _mlp_saved(model, flow, model.intermediate)


def _mlp_saved(model: Sizes, flow: _Flow, inner: int) -> int:
    """Gate, activation, up; and where the weights train, their product and the input, once for each copy."""
    read = (inner + model.hidden * (2 if flow.casts else 1)) if flow.trains else 0
    return flow.compute * (3 * inner + read)


def _experts_saved(model: Sizes, flow: _Flow) -> int:
    """The same for each of a token's experts, and their outputs; experts that don't train need no input for it."""
    hidden, inner = model.hidden, model.expert_intermediate
    routed = 2 * hidden + 4 * inner if flow.trains else hidden + 3 * inner
    # Autocast leaves the grouped products of experts alone.
    saved = model.experts_per_token * (flow.residual * routed + _INDICES) + flow.residual * hidden * flow.trains
    if model.shared_intermediate:
        saved += flow.compute * hidden + _mlp_saved(model, flow, model.shared_intermediate)
    return saved


def _layer_backward(model: Sizes, flow: _Flow) -> int:
    """Gradients that are alive at once in the layer's MLP, where most are."""
    dense = 2 * model.intermediate if model.layers > model.sparse_layers else 0
    routed = model.experts_per_token * max(3 * model.hidden, model.hidden + 2 * model.expert_intermediate)
    return max(flow.compute * dense, flow.residual * routed)
