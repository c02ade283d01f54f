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
from typing import Any, Literal, Protocol, TypeAlias, TypeGuard

import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from finetune.engine.adapted import read_linear
from finetune.engine.linear import Linear, linear, normed_linear
from finetune.engine.mlp import gated_mlp
from finetune.engine.norm import rms_norm
from finetune.engine.rotary import split_heads

AnyLinear: TypeAlias = Linear | torch.nn.Module
"""The tensors of a layer, or a module to call."""


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
    ) -> torch.Tensor:
        """Attend, with scores scaled by head_dim ** -0.5.

        Args:
            q: (queries, heads, head_dim).
            k: (tokens, kv_heads, head_dim); each key head serves heads / kv_heads successive heads.
            v: like k.
            layout: which token sees which, as given to `Decoder`.
            queries: (queries,), the tokens that the rows of q belong to, ascending, each once; None: all tokens.
            window: the number of tokens of its document that a token sees, itself included; None for all before it.

        Returns:
            (queries, heads, head_dim)
        """
        ...


@dataclass(frozen=True)
class Family:
    """What the package knows about one model type: the parts of its decoder, and what other libraries do with it.

    Attributes:
        projections: queries, keys and values: one module with all three side by side, or three.
        output: the output projection of the attention.
        widen: the first projections of the feed-forward part: gate and up in one module or in two, or only up.
        narrow: the last projection of the feed-forward part.
        final_norm: the norm after the last layer.
        is_parallel: attention and the feed-forward part read the same LayerNorm, and there is no gate.
        head_norms: the norms of each query head and of each key head; empty if the model has none.
        window: the layers to which `sliding_window` of the configuration applies; by layer: as `layer_types` says.
        is_computed: whether the engine computes its forward pass. If not, the names of parts are not used.
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
    is_parallel: bool = False
    head_norms: tuple[str, ...] = ()
    window: Literal["no layer", "all layers", "by layer"] = "no layer"
    is_computed: bool = True
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


FAMILIES = {
    "phi3": Family(
        projections=("self_attn.qkv_proj",),
        widen=("mlp.gate_up_proj",),
        window="all layers",
        gguf_name="phi",
        is_longrope_by_context=True,
    ),
    "phi": Family(
        output="self_attn.dense", widen=("mlp.fc1",), narrow="mlp.fc2", final_norm="final_layernorm", is_parallel=True
    ),
    "llama": Family(),
    "mistral": Family(window="all layers"),
    "qwen2": Family(window="by layer"),
    "qwen3": Family(head_norms=("self_attn.q_norm", "self_attn.k_norm"), window="by layer"),
    "smollm3": Family(window="by layer"),
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

    cos: torch.Tensor
    sin: torch.Tensor
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
        self._checkpoint_layers = checkpoint_layers
        self._keep_inputs = keep_inputs
        self._mlp_chunk_rows = mlp_chunk_rows
        self._read: dict[tuple[int, tuple[str, ...]], list[AnyLinear]] = {}
        self.prepare = prepare

    def angles(self, position_ids: torch.Tensor, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin of the rotation at some positions, each (tokens, rotated features), in the type of `like`.

        The factors of LongRoPE follow from the largest position. Some versions of transformers wait for the device to
        read it.
        """
        cos, sin = self._modules.rotary_emb(like, position_ids.unsqueeze(0))
        return cos.squeeze(0), sin.squeeze(0)

    def hidden_states(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        layout: Any,
        at: torch.Tensor | None = None,
        *,
        angles: tuple[torch.Tensor, torch.Tensor] | None = None,
        num_padding: int = 0,
    ) -> torch.Tensor:
        """Compute the input of the head for some tokens, in the type of the embedding or of a surrounding autocast.

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
            h = h if dtype is None else h.to(dtype)
            if self._family.is_parallel:
                h = self._modules.embed_dropout(h)
            cos, sin = self.angles(position_ids, h) if angles is None else angles
            of_tokens = partial(_Tokens, cos=cos, sin=sin, layout=layout, num_padding=num_padding)
            everywhere, there = (of_tokens(at=where) for where in (None, at))
            last = self._modules.layers[-1]
            for modules in self._modules.layers:
                layer = partial(self._layer, modules, tokens=there if modules is last else everywhere)
                layer = partial(getattr(modules, ENTER), layer) if hasattr(modules, ENTER) else layer
                h = self._checkpointed(layer, h) if self._checkpoint_layers else layer(h)
            return _normalize(self._modules.get_submodule(self._family.final_norm), h)

    def _checkpointed(self, layer: Callable[[torch.Tensor], torch.Tensor], h: torch.Tensor) -> torch.Tensor:
        with self._keep_inputs():
            result: torch.Tensor = checkpoint(layer, h, use_reentrant=False)
        return result

    def _layer(self, modules: Any, h: torch.Tensor, tokens: _Tokens) -> torch.Tensor:
        """Apply a layer: (tokens, hidden) to (tokens, hidden), or to (n, hidden) for n requested tokens."""
        family, norm = self._family, modules.input_layernorm
        projections = self._linears(modules, [family.projections], h, tokens.num_padding)
        if family.is_parallel:
            x, project = _normalize(norm, h), _with_input
        else:
            x, project = h, partial(_normed_side_by_side, norm=norm)
        x, q, k, v = self._project(modules, project, x, projections, tokens)
        window = self._windows[modules.self_attn.layer_idx]
        attended = self._attention(q, k, v, tokens.layout, queries=tokens.at, window=window).flatten(1)

        h = tokens.chosen(h if family.is_parallel else x)
        num_padding = tokens.num_padding if tokens.at is None else 0
        output, *widen, narrow = self._linears(modules, family.groups[1:], h, num_padding)
        if not family.is_parallel:
            h = _side_by_side(attended, output, residual=h)
            return _gated_mlp(h, modules.post_attention_layernorm, widen, narrow, self._mlp_chunk_rows)
        fed_forward = _side_by_side(modules.mlp.activation_fn(_side_by_side(tokens.chosen(x), *widen)), narrow)
        attended = modules.resid_dropout(_side_by_side(attended, output))
        result: torch.Tensor = h + attended + modules.resid_dropout(fed_forward)
        return result

    def _project(
        self,
        modules: Any,
        project: Callable[..., tuple[torch.Tensor, torch.Tensor]],
        x: torch.Tensor,
        projections: list[AnyLinear],
        tokens: _Tokens,
    ) -> tuple[torch.Tensor, ...]:
        """Return x for further use, queries of the requested tokens, and keys and values of all tokens."""
        heads, kv_heads = self._config.num_attention_heads, self._config.num_key_value_heads
        cos, sin, at = tokens.cos, tokens.sin, tokens.at
        q_norm, k_norm = [modules.get_submodule(name) for name in self._family.head_norms] or (None, None)
        split = partial(_split_heads, rotates=getattr(modules.self_attn, "use_rope", True))  # SmolLM3 says so by layer
        queries, *keys_values = projections
        is_whole = not keys_values and (not isinstance(queries, Linear) or queries.is_packed)
        if at is None or is_whole:
            projected, x = project(x, *projections)
            q, k, v = split(projected, cos, sin, [heads, kv_heads, kv_heads], [q_norm, k_norm])
            return x, tokens.chosen(q), k, v
        if isinstance(queries, Linear):
            if not keys_values:
                width = queries.width * heads // (heads + 2 * kv_heads)
                queries, keys_values = queries.columns(0, width), [queries.columns(width, queries.width)]
            queries = queries.at_rows(at)
        (q,) = split(project(tokens.chosen(x), queries)[0], cos[at], sin[at], [heads], [q_norm])
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


def _split_heads(
    projected: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, heads: list[int], norms: list[Any], *, rotates: bool
) -> tuple[torch.Tensor, ...]:
    """Apply `split_heads`, after a norm of each head where the family has one.

    `norms` has an entry for each of the first groups, which are rotated if `rotates` is true. None: no norm.
    """
    if norms[0] is None:
        return split_heads(projected, cos, sin, heads, num_rotated=len(norms) if rotates else 0)
    x = projected.view(len(projected), sum(heads), projected.shape[1] // sum(heads))
    groups = torch.split(x, heads, dim=1)
    normed = [_normalize(norm, group).flatten(1) for norm, group in zip(norms, groups, strict=False)]
    counts = zip(normed, heads, strict=False)
    turned = [split_heads(group, cos, sin, [count], num_rotated=int(rotates))[0] for group, count in counts]
    return *turned, *groups[len(norms) :]


def _side_by_side(x: torch.Tensor, *layers: AnyLinear, residual: torch.Tensor | None = None) -> torch.Tensor:
    """Apply `linear`, calling those layers that are modules."""
    if are_read(layers):
        return linear(x, *layers, residual=residual)
    outputs = [linear(x, layer) if isinstance(layer, Linear) else layer(x) for layer in layers]
    y = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)
    return y if residual is None else residual + y


def _with_input(x: torch.Tensor, *layers: AnyLinear) -> tuple[torch.Tensor, torch.Tensor]:
    return _side_by_side(x, *layers), x


def _normed_side_by_side(h: torch.Tensor, *layers: AnyLinear, norm: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply `normed_linear`, calling those layers that are modules."""
    if are_read(layers):
        return normed_linear(h, *layers, weight=norm.weight, eps=norm.variance_epsilon)
    return _side_by_side(_normalize(norm, h), *layers), h


def _gated_mlp(
    h: torch.Tensor, norm: Any, widen: Sequence[AnyLinear], narrow: AnyLinear, chunk_rows: int | None
) -> torch.Tensor:
    if are_read(widen) and isinstance(narrow, Linear):
        return gated_mlp(h, norm.weight, norm.variance_epsilon, widen, narrow, chunk_rows)
    gate, up = _side_by_side(_normalize(norm, h), *widen).chunk(2, dim=-1)
    return _side_by_side(functional.silu(gate) * up, narrow, residual=h)


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


def _normalize(norm: Any, h: torch.Tensor) -> torch.Tensor:
    if isinstance(norm, torch.nn.LayerNorm):
        weight, bias = norm.weight.to(h.dtype), norm.bias.to(h.dtype)
        return functional.layer_norm(h, norm.normalized_shape, weight, bias, norm.eps)
    return rms_norm(h, norm.weight, norm.variance_epsilon)
