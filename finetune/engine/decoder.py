"""The forward pass of a decoder stack over packed tokens, through the engine's own functions.

The weights stay in the modules of transformers and PEFT; only the forward pass is replaced. It has no batch dimension
and no padding, and returns hidden states only for the requested tokens. The last layer computes keys and values for all
tokens, and everything else, dropout included, only for the requested ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, TypeGuard

import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from finetune.engine.adapted import read_linear
from finetune.engine.linear import Linear, linear, normed_linear
from finetune.engine.mlp import activated, gated_mlp
from finetune.engine.norm import rms_norm
from finetune.engine.products import wide_type
from finetune.engine.rotary import split_heads

AnyLinear: TypeAlias = Linear | torch.nn.Module
"""The tensors of a layer, or a module to call."""
Angles: TypeAlias = Mapping[str | None, tuple[torch.Tensor, torch.Tensor]]
"""cos and sin of the rotation, each (tokens, rotated features), by type of layer; None: of all types."""


class Attention(Protocol):
    """A function that computes attention."""

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layout: Any,
        *,
        queries: torch.Tensor | None,
        window: int | None,
        scale: float,
    ) -> torch.Tensor:
        """Attend.

        Args:
            q: (queries, heads, head_dim).
            k: (tokens, kv_heads, head_dim); each key head serves heads / kv_heads successive heads.
            v: like k.
            layout: which token sees which, as given to `Decoder`.
            queries: (queries,), the tokens that the rows of q belong to, ascending, each once; None: all tokens.
            window: the number of tokens of its document that a token sees, itself included; None for all before it.
            scale: the factor of the scores.

        Returns:
            (queries, heads, head_dim)
        """


@dataclass(frozen=True)
class Family:
    """What the package knows about one model type: the parts of its decoder, and what other libraries do with it.

    Attributes:
        projections: queries, keys and values: one module with all three side by side, or three.
        output: the output projection of the attention.
        widen: the first projections of the feed-forward part: gate and up in one module or in two, or only up.
        narrow: the last projection of the feed-forward part.
        final_norm: the norm after the last layer.
        attention_norms: the norms before and after the attention, the latter before its result is added; None: no norm.
        mlp_norms: like these, for the feed-forward part.
        norm: whether norms divide by the root mean square, or subtract the mean first.
        norm_offset: what is added to the weight of a norm: 1 if the norm multiplies by 1 + w.
        head_norms: the norms of queries and of keys; empty if the model has none. Each normalizes the heads one by one,
            or, if its weight is as long as the whole projection, all of them at once.
        is_parallel: attention and the feed-forward part read the same input, and both results are added.
        is_gated: whether the feed-forward part has a gate. If not, it calls the model's own activation.
        activation: the key of the configuration that names the activation of the gate.
        embedding_scale: the key with the factor of the embedding's result; None: no factor, or the embedding's own.
        residual_scale: the key with the factor of what a layer adds to the residual stream; None: no factor.
        logit_scale: the key with the factor of the logits; None: no factor.
        logit_divisor: the key with the number that divides the logits; None: no number.
        rotary: the layers that rotate queries and keys. With "by module", attention says so (`use_rope`). With "sliding
            layers if any", all layers do so if the configuration sets no `sliding_window`.
        has_rotary_by_type: whether the angles of the rotation differ between the types of layers (`layer_types`).
        is_interleaved: whether the rotation turns neighbouring features, instead of those half a head apart.
        has_interleaved_angles: whether the model's angles are in the order of neighbours, too.
        scales_queries: whether queries grow with their position, see `_query_scale`.
        window: the layers to which `sliding_window` of the configuration applies; by layer: as `layer_types` says.
        is_computed: whether the engine computes its forward pass. If not, the names of parts are not used.
        why_not: why the engine does not compute it, if a trial has said so (`model/unknown_family.py`).
        uses_long_factors: whether transformers uses the long factors of LongRoPE. If not, the model is correct only up
            to the length from which they apply.
        rope_sizes: keys that `rope_scaling` of the configuration needs besides the factors.
        gguf_name: the name of the model in a GGUF file; None: the model type. llama.cpp strips white space behind
            special tokens if it contains phi-3 or phi3.
        is_longrope_by_context: whether onnxruntime-genai takes a model for one with LongRoPE if
            original_max_position_embeddings differs from max_position_embeddings.
    """

    projections: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    output: str = "self_attn.o_proj"
    widen: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    narrow: str = "mlp.down_proj"
    final_norm: str = "norm"
    attention_norms: tuple[str | None, str | None] = ("input_layernorm", None)
    mlp_norms: tuple[str | None, str | None] = ("post_attention_layernorm", None)
    norm: Literal["root mean square", "mean and variance"] = "root mean square"
    norm_offset: float = 0.0
    head_norms: tuple[str, ...] = ()
    is_parallel: bool = False
    is_gated: bool = True
    activation: str = "hidden_act"
    embedding_scale: str | None = None
    residual_scale: str | None = None
    logit_scale: str | None = None
    logit_divisor: str | None = None
    rotary: Literal["all layers", "by module", "sliding layers", "sliding layers if any"] = "all layers"
    has_rotary_by_type: bool = False
    is_interleaved: bool = False
    has_interleaved_angles: bool = False
    scales_queries: bool = False
    window: Literal["no layer", "all layers", "by layer"] = "no layer"
    is_computed: bool = True
    why_not: str | None = None
    uses_long_factors: bool = True
    rope_sizes: Mapping[str, float] = field(default_factory=dict)
    gguf_name: str | None = None
    is_longrope_by_context: bool = False

    @property
    def groups(self) -> tuple[tuple[str, ...], ...]:
        """The linear layers of a decoder layer, those with the same input together."""
        return self.projections, (self.output,), self.widen, (self.narrow,)

    @property
    def linears(self) -> tuple[str, ...]:
        """All linear layers of a decoder layer."""
        return tuple(chain.from_iterable(self.groups))


_HEAD_NORMS = ("self_attn.q_norm", "self_attn.k_norm")
_normed_after = partial(
    Family,
    attention_norms=(None, "post_attention_layernorm"),
    mlp_norms=(None, "post_feedforward_layernorm"),
    head_norms=_HEAD_NORMS,
)
FAMILIES = {
    "phi3": Family(
        projections=("self_attn.qkv_proj",),
        widen=("mlp.gate_up_proj",),
        window="all layers",
        gguf_name="phi",
        is_longrope_by_context=True,
    ),
    "phi": Family(
        output="self_attn.dense",
        widen=("mlp.fc1",),
        narrow="mlp.fc2",
        final_norm="final_layernorm",
        mlp_norms=(None, None),
        norm="mean and variance",
        is_parallel=True,
        is_gated=False,
    ),
    "llama": Family(),
    "mistral": Family(window="all layers"),
    "qwen2": Family(window="by layer"),
    "qwen3": Family(head_norms=_HEAD_NORMS, window="by layer"),
    "smollm3": Family(rotary="by module", window="by layer"),
    "seed_oss": Family(),
    "ministral": Family(window="by layer"),
    "ministral3": Family(scales_queries=True, window="all layers"),
    "gemma": Family(norm_offset=1.0),
    "gemma3_text": Family(
        attention_norms=("input_layernorm", "post_attention_layernorm"),
        mlp_norms=("pre_feedforward_layernorm", "post_feedforward_layernorm"),
        norm_offset=1.0,
        head_norms=_HEAD_NORMS,
        activation="hidden_activation",
        has_rotary_by_type=True,
        window="by layer",
    ),
    "granite": Family(
        embedding_scale="embedding_multiplier", residual_scale="residual_multiplier", logit_divisor="logits_scaling"
    ),
    "olmo2": _normed_after(),
    "olmo3": _normed_after(has_rotary_by_type=True, window="by layer"),
    "exaone4": _normed_after(rotary="sliding layers if any", window="by layer"),
    "cohere": Family(
        mlp_norms=(None, None),
        norm="mean and variance",
        is_parallel=True,
        logit_scale="logit_scale",
        is_interleaved=True,
        has_interleaved_angles=True,
    ),
    "cohere2": Family(
        mlp_norms=(None, None),
        norm="mean and variance",
        is_parallel=True,
        logit_scale="logit_scale",
        rotary="sliding layers",
        is_interleaved=True,
        has_interleaved_angles=True,
        window="by layer",
    ),
    "phimoe": Family(  # as of transformers 5.23
        is_computed=False, uses_long_factors=False, rope_sizes={"short_mscale": 1.0, "long_mscale": 1.0}
    ),
}
"""By transformers' `model_type`. SmolLM and SmolLM2 are of the type llama, Qwen2.5 of qwen2. To support a type,
add an entry. `model/unsupported.py` has the types that are refused."""


def family_of(model_type: str | None) -> Family:
    """Return the record of a model type. Other types train through transformers' own forward."""
    return FAMILIES.get(model_type or "", Family(is_computed=False))


FULL, SLIDING = "full_attention", "sliding_attention"
"""The types in `layer_types` that the engine computes: without a sliding window, and with one."""
ENTER = "enter_layer"
"""The name of an optional method of a layer, from (compute, h) to compute(h). The engine never calls layers, so hooks
do not run. This method does what a hook would do around a call, for example all-gather the layer's weights."""
OFFLOADS = "offloads_inputs"
"""The name of an attribute of a decoder: whether inputs of layers that are checkpointed are kept in main memory."""
Prepare = Callable[[Sequence[Linear], torch.dtype], Sequence[Linear]]
"""Returns layers with one input, or one layer with the outputs of all, in a form that is faster to call."""
Keep = Callable[[], AbstractContextManager[Any]]
"""Makes a block in which autograd keeps tensors in a place of its own."""


@dataclass(frozen=True, kw_only=True)
class _Tokens:
    """The inputs of the layers besides hidden states."""

    angles: Angles
    query_scale: torch.Tensor | None
    """(tokens, 1, 1)."""
    layout: Any
    at: torch.Tensor | None
    num_padding: int

    def chosen(self, x: torch.Tensor) -> torch.Tensor:
        """Select the requested tokens: (tokens, features) to (n, features)."""
        return x if self.at is None else x.index_select(0, self.at)


class Decoder:
    """The decoder of a causal language model for which `unsupported_reason` returns None.

    Args:
        model: a transformers causal language model, or a PEFT model around one.
        attention: see `Attention`.
        checkpoint_layers: recompute each layer in the backward pass instead of keeping its activations.
        keep_inputs: how the inputs of these layers are kept until then.
        mlp_chunk_rows: see `gated_mlp`.
        prepare: called with the layers of one input and the type of this input, in the first call only; later calls
            use what it returned. The model is in evaluation mode and does not change. None: layers are read each time.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        attention: Attention,
        *,
        checkpoint_layers: bool = False,
        keep_inputs: Keep = nullcontext,
        mlp_chunk_rows: int | None = None,
        prepare: Prepare | None = None,
    ) -> None:
        bare = bare_model(model)
        self._modules = bare.get_decoder()
        self._config = bare.config
        self._family = FAMILIES[bare.config.model_type]
        self._attention = attention
        self._windows = layer_windows(bare)
        self._rotates = _rotated_layers(bare, self._windows)
        self._residual_scale = _factor(self._config, self._family.residual_scale)
        self._logit_scale = logit_scale(self._config)
        self._checkpoint_layers = checkpoint_layers
        self._keep_inputs = keep_inputs
        self._mlp_chunk_rows = mlp_chunk_rows
        self._read: dict[tuple[int, tuple[str, ...]], list[AnyLinear]] = {}
        self.prepare = prepare

    def angles(self, position_ids: torch.Tensor, like: torch.Tensor) -> Angles:
        """Return cos and sin of the rotation at some positions, in the type of `like`.

        The factors of LongRoPE follow from the largest position. Some versions of transformers wait for the device to
        read it.
        """
        positions, rotary = position_ids.unsqueeze(0), self._modules.rotary_emb
        if self._family.has_rotary_by_type:
            of_types = {name: rotary(like, positions, name) for name in dict.fromkeys(self._config.layer_types)}
            return {name: (cos.squeeze(0), sin.squeeze(0)) for name, (cos, sin) in of_types.items()}
        cos, sin = (angle.squeeze(0) for angle in rotary(like, positions))
        if self._family.has_interleaved_angles:  # see `_split_heads`
            cos, sin = (torch.cat([angle[:, ::2], angle[:, ::2]], dim=1) for angle in (cos, sin))
        return {None: (cos, sin)}

    def hidden_states(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        layout: Any,
        at: torch.Tensor | None = None,
        *,
        angles: Angles | None = None,
        num_padding: int = 0,
    ) -> torch.Tensor:
        """Compute the input of the head for some tokens, in the type of the embedding or of a surrounding autocast.

        If the model scales its logits, the factor is in this input: the head alone then computes the logits.

        Args:
            input_ids: (tokens,), documents one after the other.
            position_ids: (tokens,), each token's position in its own document.
            layout: passed on to the attention.
            at: (n,), indices of tokens, ascending, each once; None: all.
            angles: see the method of this name; None: they are computed.
            num_padding: the number of tokens at the end that are padding, none of them in `at`.

        Returns:
            (n, hidden)
        """
        device = input_ids.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        with torch.autocast(device, enabled=False):
            h = self._modules.embed_tokens.forward(input_ids)
            if self._family.embedding_scale is not None:
                h = h * _factor(self._config, self._family.embedding_scale)
            h = h if dtype is None else h.to(dtype)
            if not self._family.is_gated:
                h = self._modules.embed_dropout(h)
            of_tokens = partial(
                _Tokens,
                angles=self.angles(position_ids, h) if angles is None else angles,
                query_scale=_query_scale(self._config, position_ids, h) if self._family.scales_queries else None,
                layout=layout,
                num_padding=num_padding,
            )
            everywhere, there = (of_tokens(at=where) for where in (None, at))
            last = self._modules.layers[-1]
            for modules in self._modules.layers:
                layer = partial(self._layer, modules, tokens=there if modules is last else everywhere)
                layer = partial(getattr(modules, ENTER), layer) if hasattr(modules, ENTER) else layer
                h = self._checkpointed(layer, h) if self._checkpoint_layers else layer(h)
            norm = _read_norm(self._modules, self._family.final_norm, self._family)
            assert norm is not None
            h = norm.apply(h)
            return h if self._logit_scale == 1 else h * self._logit_scale

    def _checkpointed(self, layer: Callable[[torch.Tensor], torch.Tensor], h: torch.Tensor) -> torch.Tensor:
        with self._keep_inputs():
            result: torch.Tensor = checkpoint(layer, h, use_reentrant=False)
        return result

    def _layer(self, modules: Any, h: torch.Tensor, tokens: _Tokens) -> torch.Tensor:
        """Apply a layer: (tokens, hidden) to (tokens, hidden), or to (n, hidden) for n requested tokens."""
        family = self._family
        before, after = (_read_norm(modules, name, family) for name in family.attention_norms)
        projections = self._linears(modules, [family.projections], h, tokens.num_padding)
        x, project = h, lambda x, *layers: (_side_by_side(x, *layers), x)
        if before is not None and family.is_parallel:
            x = before.apply(h)
        elif before is not None:
            project = partial(_normed_side_by_side, norm=before)
        x, q, k, v = self._project(modules, project, x, projections, tokens)
        scale, window = modules.self_attn.scaling, self._windows[modules.self_attn.layer_idx]
        attended = self._attention(q, k, v, tokens.layout, queries=tokens.at, window=window, scale=scale).flatten(1)

        h = tokens.chosen(h if family.is_parallel else x)
        num_padding = tokens.num_padding if tokens.at is None else 0
        output, *widen, narrow = self._linears(modules, family.groups[1:], h, num_padding)
        feed = partial(_gated_mlp, activation=getattr(self._config, family.activation), rows=self._mlp_chunk_rows)
        if not family.is_parallel:
            if self._adds_at_once(after):
                h = _side_by_side(attended, output, residual=h)
            else:
                h = self._added(h, _side_by_side(attended, output), after)
            before, after = (_read_norm(modules, name, family) for name in family.mlp_norms)
            if self._adds_at_once(after):
                return feed(h, before, widen, narrow)
            return self._added(h, feed(h, before, widen, narrow, adds_input=False), after)
        x = tokens.chosen(x)
        if family.is_gated:
            h = _side_by_side(attended, output, residual=h)
            return h + feed(x, None, widen, narrow, adds_input=False)
        fed_forward = _side_by_side(modules.mlp.activation_fn(_side_by_side(x, *widen)), narrow)
        attended = modules.resid_dropout(_side_by_side(attended, output))
        result: torch.Tensor = h + attended + modules.resid_dropout(fed_forward)
        return result

    def _adds_at_once(self, norm: _Norm | None) -> bool:
        """Return whether a product adds the residual itself: nothing changes its result before."""
        return norm is None and self._residual_scale == 1

    def _added(self, h: torch.Tensor, x: torch.Tensor, norm: _Norm | None) -> torch.Tensor:
        return torch.add(h, x if norm is None else norm.apply(x), alpha=self._residual_scale)

    def _project(
        self,
        modules: Any,
        project: Callable[..., tuple[torch.Tensor, torch.Tensor]],
        x: torch.Tensor,
        projections: list[AnyLinear],
        tokens: _Tokens,
    ) -> tuple[torch.Tensor, ...]:
        """Return x for further use, queries of the requested tokens, and keys and values of all tokens."""
        family, index, at = self._family, modules.self_attn.layer_idx, tokens.at
        heads, kv_heads = self._config.num_attention_heads, self._config.num_key_value_heads
        cos, sin = tokens.angles[self._config.layer_types[index] if family.has_rotary_by_type else None]
        q_norm, k_norm = [_read_norm(modules, name, family) for name in family.head_norms] or (None, None)
        split = partial(_split_heads, rotates=self._rotates[index], is_interleaved=family.is_interleaved)
        queries, *keys_values = projections
        is_whole = not keys_values and (not isinstance(queries, Linear) or queries.is_packed)
        if at is None or is_whole:
            projected, x = project(x, *projections)
            q, k, v = split(projected, cos, sin, [heads, kv_heads, kv_heads], [q_norm, k_norm])
            return x, tokens.chosen(q if tokens.query_scale is None else q * tokens.query_scale), k, v
        if isinstance(queries, Linear):
            if not keys_values:
                width = queries.width * heads // (heads + 2 * kv_heads)
                queries, keys_values = queries.columns(0, width), [queries.columns(width, queries.width)]
            queries = queries.at_rows(at)
        (q,) = split(project(tokens.chosen(x), queries)[0], cos[at], sin[at], [heads], [q_norm])
        q = q if tokens.query_scale is None else q * tokens.query_scale[at]
        return x, q, *split(project(x, *keys_values)[0], cos, sin, [kv_heads, kv_heads], [k_norm])

    def _linears(
        self, modules: Any, groups: Sequence[tuple[str, ...]], like: torch.Tensor, num_padding: int
    ) -> list[AnyLinear]:
        key = modules.self_attn.layer_idx, groups[0]
        if key in self._read:
            return self._read[key]
        linears: list[AnyLinear] = []
        for group in read_groups(modules, groups, like, num_padding):
            linears += self.prepare(group, like.dtype) if self.prepare and are_read(group) else group
        if self.prepare:
            self._read[key] = linears
        return linears


def read_groups(
    modules: Any, groups: Sequence[tuple[str, ...]], like: torch.Tensor, num_padding: int = 0
) -> Iterator[list[AnyLinear]]:
    """Read the linear layers of a decoder layer by the names of its groups, see `read_linear`."""
    for names in groups:
        yield [read_linear(modules.get_submodule(name), like, num_padding=num_padding) for name in names]


class _Norm(NamedTuple):
    """A norm as `Family.norm` says."""

    weight: torch.Tensor
    """As it is multiplied, see `Family.norm_offset`."""
    bias: torch.Tensor | None
    eps: float
    has_mean: bool

    def apply(self, h: torch.Tensor) -> torch.Tensor:
        """Normalize the last dimension of h."""
        if not self.has_mean:
            return rms_norm(h, self.weight, self.eps)
        bias = None if self.bias is None else self.bias.to(h.dtype)
        result: torch.Tensor = functional.layer_norm(h, self.weight.shape, self.weight.to(h.dtype), bias, self.eps)
        return result


def _read_norm(modules: Any, name: str | None, family: Family) -> _Norm | None:
    """Return a norm inside a module; None if there is no name."""
    if name is None:
        return None
    norm = modules.get_submodule(name)
    weight = norm.weight
    if family.norm_offset:  # in 16 bits, the sum would lose most of a small weight
        weight = weight.to(wide_type(weight)) + family.norm_offset
    eps = norm.eps if hasattr(norm, "eps") else norm.variance_epsilon
    return _Norm(weight, getattr(norm, "bias", None), eps, family.norm == "mean and variance")


def _split_heads(
    projected: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    heads: list[int],
    norms: list[_Norm | None],
    *,
    rotates: bool,
    is_interleaved: bool,
) -> tuple[torch.Tensor, ...]:
    """Apply `split_heads`, after the norms of queries and keys where the family has some.

    `norms` has an entry for each of the first groups, which are rotated if `rotates` is true. None: no norm. If the
    rotation is interleaved, the even ones of the rotated features come first in the result, then the odd ones: the
    scores of attention do not change if queries and keys have their features in another order.
    """
    if norms[0] is None and not (is_interleaved and rotates):
        return split_heads(projected, cos, sin, heads, num_rotated=len(norms) if rotates else 0)
    size = projected.shape[1] // sum(heads)
    groups = torch.split(projected.view(len(projected), sum(heads), size), heads, dim=1)
    turned: list[torch.Tensor] = []
    for norm, group, count in zip(norms, groups, heads, strict=False):
        x = group
        if norm is not None:
            x = norm.apply(group if len(norm.weight) == size else group.flatten(1))
        if is_interleaved and rotates:
            x, rest = x.reshape(len(x), count, size).tensor_split([cos.shape[1]], dim=-1)
            x = torch.cat([x[..., ::2], x[..., 1::2], rest], dim=-1)
        turned += split_heads(x.flatten(1), cos, sin, [count], num_rotated=int(rotates))
    return *turned, *groups[len(norms) :]


def _side_by_side(x: torch.Tensor, *layers: AnyLinear, residual: torch.Tensor | None = None) -> torch.Tensor:
    """Apply `linear`, calling those layers that are modules."""
    if are_read(layers):
        return linear(x, *layers, residual=residual)
    outputs = [linear(x, layer) if isinstance(layer, Linear) else layer(x) for layer in layers]
    y = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)
    return y if residual is None else residual + y


def _normed_side_by_side(h: torch.Tensor, *layers: AnyLinear, norm: _Norm) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply `normed_linear`, calling those layers that are modules. It has no mean, so such a norm comes before it."""
    if are_read(layers) and not norm.has_mean:
        return normed_linear(h, *layers, weight=norm.weight, eps=norm.eps)
    return _side_by_side(norm.apply(h), *layers), h


def _gated_mlp(
    h: torch.Tensor,
    norm: _Norm | None,
    widen: Sequence[AnyLinear],
    narrow: AnyLinear,
    *,
    activation: str,
    rows: int | None,
    adds_input: bool = True,
) -> torch.Tensor:
    if norm is not None and norm.has_mean:
        fed = _gated_mlp(norm.apply(h), None, widen, narrow, activation=activation, rows=rows, adds_input=False)
        return h + fed if adds_input else fed
    if are_read(widen) and isinstance(narrow, Linear):
        weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
        return gated_mlp(h, weight, eps, widen, narrow, rows, activation=activation, adds_input=adds_input)
    gate, up = _side_by_side(h if norm is None else norm.apply(h), *widen).chunk(2, dim=-1)
    return _side_by_side(activated(gate, activation) * up, narrow, residual=h if adds_input else None)


def are_read(layers: Sequence[AnyLinear]) -> TypeGuard[Sequence[Linear]]:
    """Return whether the tensors of all layers were read, so that none of them is to be called."""
    return all(isinstance(layer, Linear) for layer in layers)


def bare_model(model: Any) -> Any:
    """Return the transformers model inside a PEFT model."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def layer_windows(model: Any) -> list[int | None]:
    """Return for each layer the number of tokens of its row that a token sees, itself included; None: all before it."""
    config = bare_model(model).config
    holds_for = FAMILIES[config.model_type].window
    if holds_for == "by layer":
        return [config.sliding_window if kind == SLIDING else None for kind in config.layer_types]
    return [config.sliding_window if holds_for == "all layers" else None] * config.num_hidden_layers


def _rotated_layers(bare: Any, windows: Sequence[int | None]) -> list[bool]:
    """Return for each layer whether it rotates queries and keys."""
    rotary, config = FAMILIES[bare.config.model_type].rotary, bare.config
    if rotary == "by module":
        rotates = {layer.self_attn.layer_idx: layer.self_attn.use_rope for layer in bare.get_decoder().layers}
        return [bool(rotates.get(index, True)) for index in range(len(windows))]
    if rotary == "all layers" or (rotary == "sliding layers if any" and config.sliding_window is None):
        return [True] * len(windows)
    return [window is not None for window in windows]


def _query_scale(config: Any, position_ids: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return Llama 4's factor of queries, (tokens, 1, 1): it grows with each multiple of the original context."""
    rope = config.rope_parameters
    multiple = torch.floor(position_ids / rope["original_max_position_embeddings"])
    factor: torch.Tensor = 1 + rope["llama_4_scaling_beta"] * torch.log(1 + multiple)
    return factor.to(like.dtype)[:, None, None]


def logit_scale(config: Any) -> float:
    """Return the factor by which a model multiplies its logits."""
    family = family_of(config.model_type)
    return _factor(config, family.logit_scale) / _factor(config, family.logit_divisor)


def _factor(config: Any, key: str | None) -> float:
    return 1.0 if key is None else float(getattr(config, key))
