"""The decoder of Llama, Mistral, Qwen2 and Qwen3: layers unrolled, each with its own arrays."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from lorajax.apply import add_lora, lora_embed
from lorajax.errors import SpecError
from lorajax.families import EMBEDDING, HEAD
from lorajax.kernels_pallas import Routing, embedded
from lorajax.models import rope
from lorajax.models.cache import KVCache, attend, write
from lorajax.models.config import ModelConfig
from lorajax.sharding import Shard
from lorajax.sharding.local import lora_linear
from lorajax.state import LoraState

#: What adapters may change, by the names in a state: the products of a layer, and the two outside.
PRODUCTS = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
TARGETS = (*PRODUCTS, EMBEDDING, HEAD)


@dataclass(frozen=True)
class Leaf:
    """One array of a decoder, and the tensors of a checkpoint that it is made of.

    Attributes:
        names: Tensors, side by side along the last axis.
        widths: Width of each.
        rows: Leading size, or None for a vector.
        transposed: Whether the tensors are stored `[width, rows]`, as torch's linear weights are.
        cut: The axis that tensor parallelism cuts, if any.
        heads: Heads of each tensor, if it is made of heads (see `lorajax.columns.Columns`).
    """

    names: tuple[str, ...]
    widths: tuple[int, ...]
    rows: int | None = None
    transposed: bool = False
    cut: Literal["rows", "columns"] | None = None
    heads: tuple[int, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array."""
        lead = () if self.rows is None else (self.rows,)
        return (*lead, sum(self.widths))


#: Makes the array of a leaf: reads it, draws it, or gives its abstract shape. On a mesh the array
#: is cut and its columns are laid out for the shards (`lorajax.models.placement`).
MakeLeaf = Callable[[Leaf], jax.Array]


class Linear(nnx.Module):
    """A product `x w` with w `[d_in, d_out]`, that adapters may change, and its bias."""

    def __init__(
        self,
        make: MakeLeaf,
        target: str,
        layer: int,
        *,
        parts: dict[str, int],
        d_in: int,
        bias: bool,
        row: bool = False,
        heads: tuple[int, ...] = (),
        shard: Shard,
        implementation: str | None,
    ):
        base = f"model.layers.{layer}.{target.split('.')[0]}"
        names, widths = [f"{base}.{p}" for p in parts], tuple(parts.values())
        self.target, self.layer, self.row, self.shard = target, layer, row, shard
        self.implementation = implementation
        weights, biases = (tuple(f"{n}.{kind}" for n in names) for kind in ("weight", "bias"))
        cut = "rows" if row else "columns"
        self.weight = nnx.Param(
            make(Leaf(weights, widths, d_in, transposed=True, cut=cut, heads=heads))
        )
        vector = Leaf(biases, widths, cut=None if row else "columns", heads=heads)
        self.bias = nnx.Param(make(vector)) if bias else None

    def __call__(
        self, x: Float[Array, "N Q d_in"], lora: LoraState | None, routing: Routing | None
    ) -> Float[Array, "N Q d_out"]:
        """Tokens are flattened to T = N * Q, as the slots' routing counts them."""
        N, Q, d_in = x.shape
        flat = _apart(x.reshape(N * Q, d_in))
        w = self.shard.whole(self.weight[...], axis=1 if self.row else 0)
        if lora is None or routing is None or self.target not in lora.targets:
            y = jnp.dot(flat, w)
        else:
            y = lora_linear(
                flat,
                w,
                lora[self.target],
                routing,
                layer=self.layer,
                shard=self.shard,
                implementation=self.implementation,
            )
        y = _apart(y)
        y = self.shard.sum(y) if self.row else y  # the delta is part of the partial sum
        y = y if self.bias is None else y + self.bias[...][None, :]
        return y.reshape(N, Q, -1)


def _apart(x: jax.Array) -> jax.Array:
    """Keeps a CPU's compiler from fusing a product with its neighbours.

    With slots and without it would do so in different ways, and base rows would differ by bits.
    """
    return jax.lax.platform_dependent(x, cpu=jax.lax.optimization_barrier, default=lambda x: x)


class RMSNorm(nnx.Module):
    """Root-mean-square norm over the last axis, in float32."""

    def __init__(self, make: MakeLeaf, name: str, width: int, eps: float):
        self.weight = nnx.Param(make(Leaf((name,), (width,))))
        self.eps = eps

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        """`x / sqrt(mean(x²) + eps) * weight`, in x's dtype."""
        x32 = x.astype(jnp.float32)
        scale = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + self.eps)
        weight = self.weight[...].astype(jnp.float32)
        return (x32 * scale * jnp.expand_dims(weight, range(x.ndim - 1))).astype(x.dtype)


class DecoderLayer(nnx.Module):
    """Attention and MLP, each after a norm and added to the residual stream."""

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        make: MakeLeaf,
        *,
        shard: Shard,
        implementation: str | None,
    ):
        c, base = config, f"model.layers.{layer}"
        q, kv, inner = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim, c.intermediate_size
        self.config, self.layer = config.local(shard.tensor_shards), layer
        linear = functools.partial(
            Linear, make, layer=layer, shard=shard, implementation=implementation
        )

        def norm(name: str, width: int) -> RMSNorm:
            return RMSNorm(make, f"{base}.{name}.weight", width, c.norm_eps)

        self.input_norm = norm("input_layernorm", c.hidden_size)
        self.qkv_proj = linear(
            target=PRODUCTS[0],
            parts={"q_proj": q, "k_proj": kv, "v_proj": kv},
            d_in=c.hidden_size,
            bias=c.qkv_bias,
            heads=(c.num_heads, c.num_kv_heads, c.num_kv_heads),
        )
        self.q_norm = norm("self_attn.q_norm", c.head_dim) if c.qk_norm else None
        self.k_norm = norm("self_attn.k_norm", c.head_dim) if c.qk_norm else None
        self.o_proj = linear(
            target=PRODUCTS[1], parts={"o_proj": c.hidden_size}, d_in=q, bias=c.o_bias, row=True
        )
        self.mlp_norm = norm("post_attention_layernorm", c.hidden_size)
        self.gate_up_proj = linear(
            target=PRODUCTS[2],
            parts={"gate_proj": inner, "up_proj": inner},
            d_in=c.hidden_size,
            bias=c.mlp_bias,
        )
        self.down_proj = linear(
            target=PRODUCTS[3],
            parts={"down_proj": c.hidden_size},
            d_in=inner,
            bias=c.mlp_bias,
            row=True,
        )

    @property
    def products(self) -> tuple[Linear, ...]:
        """The products that adapters may change, in the order of `PRODUCTS`."""
        return self.qkv_proj, self.o_proj, self.gate_up_proj, self.down_proj

    def __call__(
        self,
        x: Float[Array, "N Q D"],
        positions: Int[Array, "N Q"],
        angles: tuple[Float[Array, "N Q 1 half"], Float[Array, "N Q 1 half"]],
        kv: tuple[Float[Array, "N C Hkv hd"], Float[Array, "N C Hkv hd"]],
        lora: LoraState | None,
        routing: Routing | None,
    ) -> tuple[
        Float[Array, "N Q D"], tuple[Float[Array, "N C Hkv hd"], Float[Array, "N C Hkv hd"]]
    ]:
        """The residual stream after this layer, and the layer's keys and values."""
        c, (N, Q, _) = self.config, x.shape
        qkv = self.qkv_proj(self.input_norm(x), lora, routing)
        heads = (c.num_heads, c.num_kv_heads, c.num_kv_heads)
        cuts = [c.head_dim * heads[0], c.head_dim * (heads[0] + heads[1])]
        q, k, v = (
            part.reshape(N, Q, count, c.head_dim)
            for part, count in zip(jnp.split(qkv, cuts, axis=-1), heads, strict=True)
        )
        q = q if self.q_norm is None else self.q_norm(q)
        k = k if self.k_norm is None else self.k_norm(k)
        keys = write(kv[0], rope.rotate(k, *angles), positions)
        values = write(kv[1], v, positions)
        out = attend(rope.rotate(q, *angles), keys, values, positions, c.windows[self.layer])
        x = x + self.o_proj(out.reshape(N, Q, -1), lora, routing)

        gate, up = jnp.split(
            self.gate_up_proj(self.mlp_norm(x), lora, routing).astype(jnp.float32), 2, axis=-1
        )
        inner = (jax.nn.silu(gate) * up).astype(x.dtype)
        return x + self.down_proj(inner, lora, routing), (keys, values)


class Decoder(nnx.Module):
    """A decoder-only language model whose linear layers, embedding and head take any adapters.

    On a mesh it runs inside `shard_map`: its arrays, cache and slots are one device's share, and
    `config` has that device's heads. Collectives are those of `Shard`, the same with slots as
    without unless the slots are fully sharded.

    Args:
        config: Sizes and layout of the whole model.
        make: Gives the array of each leaf; `load_model` and `from_tensors` read checkpoints.
        shard: Place on a mesh; by default there is none.
        implementation: Of `lora_linear`: name of a kernel, or None for the best one of the platform
            that traces, which is not that of a program compiled ahead of time.

    Attributes:
        config: Sizes on one device.
    """

    def __init__(
        self,
        config: ModelConfig,
        make: MakeLeaf,
        shard: Shard | None = None,
        *,
        implementation: str | None = None,
    ):
        self.shard = shard = Shard() if shard is None else shard
        self.config = config.local(shard.tensor_shards)
        D, V = config.hidden_size, config.vocab_size
        self.cut_vocab = shard.cuts_vocabulary(V)
        rows, columns = ("rows", "columns") if self.cut_vocab else (None, None)
        self.embed = nnx.Param(make(Leaf(("model.embed_tokens.weight",), (D,), V, cut=rows)))
        self.layers = nnx.List(
            [
                DecoderLayer(config, i, make, shard=shard, implementation=implementation)
                for i in range(config.num_layers)
            ]
        )
        self.norm = RMSNorm(make, "model.norm.weight", D, config.norm_eps)
        head = Leaf(("lm_head.weight",), (V,), D, transposed=True, cut=columns)
        self.head = None if config.tied else nnx.Param(make(head))

    def __call__(
        self,
        tokens: Int[Array, "N Q"],
        positions: Int[Array, "N Q"],
        cache: KVCache,
        lora: LoraState | None = None,
        routing: Routing | None = None,
    ) -> tuple[Float[Array, "N Q D"], KVCache]:
        """Runs Q tokens of each row after what the row's cache holds.

        Args:
            tokens: Ids. An id outside [0, V) gives its row NaN.
            positions: Position of each token in its row, -1 for padding; each row's tokens must
                follow what was written to its cache from position 0 on.
            cache: Rows of earlier tokens.
            lora: The slots, or None for the plain model.
            routing: From `make_routing` for T = N * Q tokens, row by row; needed with `lora`.

        Returns:
            Hidden states after the last norm, for `logits`, and the cache with the new tokens.

        Raises:
            SpecError: `lora` has targets that this model has not, or comes without `routing`.
        """
        _check_lora(lora, routing)
        ids = jnp.where(positions >= 0, tokens, 0)
        inside = (ids >= 0) & (ids < self.config.vocab_size)
        x = jnp.where(inside[..., None], self._embedded(ids, lora, routing), jnp.nan)
        frequencies = self.config.rope.frequencies(self.config.head_dim)
        angles = rope.angles(frequencies, positions)
        keys, values = [], []
        for layer, *kv in zip(self.layers, cache.keys, cache.values, strict=True):
            x, (k, v) = layer(x, positions, angles, tuple(kv), lora, routing)
            keys.append(k)
            values.append(v)
        return self.norm(x), KVCache(tuple(keys), tuple(values))

    def logits(
        self,
        hidden: Float[Array, "K D"],
        lora: LoraState | None = None,
        routing: Routing | None = None,
    ) -> Float[Array, "K V"]:
        """Scores of the next token, of the whole vocabulary on every device.

        Args:
            hidden: Hidden states of K tokens.
            lora: The slots, or None for the plain model.
            routing: From `make_routing` for these K tokens; needed with `lora`.

        Returns:
            `f32[K, V]`.

        Raises:
            SpecError: `lora` has targets that this model has not, or comes without `routing`.
        """
        _check_lora(lora, routing)
        if self.head is not None:
            head = self.shard.whole(self.head[...], axis=0)
            scores = jnp.dot(hidden, head, preferred_element_type=jnp.float32)
        else:
            embed = self.shard.whole(self.embed[...], axis=1)
            scores = jnp.einsum("kd,vd->kv", hidden, embed, preferred_element_type=jnp.float32)
        if lora is not None and routing is not None and HEAD in lora.targets:
            scores = add_lora(scores, hidden, lora[HEAD], routing, layer=0)
        return self.shard.gather_features(scores) if self.cut_vocab else scores

    def _embedded(
        self, ids: Int[Array, "N Q"], lora: LoraState | None, routing: Routing | None
    ) -> Float[Array, "N Q D"]:
        """Rows of the embedding, each from the device that has it."""
        embed, flat = self.shard.whole(self.embed[...], axis=1), ids.reshape(-1)
        first = self.shard.tensor_index() * embed.shape[0] if self.cut_vocab else 0
        if lora is None or routing is None or EMBEDDING not in lora.targets:
            rows = embedded(flat - first, embed)
        else:
            rows = lora_embed(flat, embed, lora[EMBEDDING], routing, first=first)
        rows = self.shard.sum(rows) if self.cut_vocab else rows
        return rows.reshape(*ids.shape, -1)


def _check_lora(lora: LoraState | None, routing: Routing | None) -> None:
    if lora is None:
        return
    unknown = set(lora.targets) - set(TARGETS)
    if unknown:
        raise SpecError(
            f"targets of this model are {list(TARGETS)}; got {sorted(unknown)} in the state; "
            "build the spec with LoraSpec.from_hf_config(..., merged=True)"
        )
    if routing is None:
        raise SpecError(
            "a state needs the routing of the step; got None; pass make_routing(row_weights, "
            "token_row), or no state for the plain model"
        )
