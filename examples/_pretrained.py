"""GPT-2, Llama and ViT in flax, and the rules by which they have the weights of Hugging Face.

Each module computes what the class of the same name in transformers computes without dropout. A
rule names arrays in the files there, the leaves here, and the order of their axes.
"""

import flax.linen as nn
import functrain as ft
import jax
import jax.numpy as jnp


class GPT2Block(nn.Module):
    heads: int

    @nn.compact
    def __call__(self, x):
        width, heads = x.shape[-1], (*x.shape[:2], self.heads, -1)
        y = nn.LayerNorm(1e-5, name="ln_1")(x)
        qkv = jnp.split(nn.Dense(3 * width, name="attn_c_attn")(y), 3, -1)
        mixed = jax.nn.dot_product_attention(*(z.reshape(heads) for z in qkv), is_causal=True)
        x += nn.Dense(width, name="attn_c_proj")(mixed.reshape(x.shape))
        y = nn.gelu(nn.Dense(4 * width, name="mlp_c_fc")(nn.LayerNorm(1e-5, name="ln_2")(x)))
        return x + nn.Dense(width, name="mlp_c_proj")(y)


class GPT2(nn.Module):
    vocabulary: int = 50_257
    length: int = 1024
    width: int = 768
    blocks: int = 12
    heads: int = 12

    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(self.vocabulary, self.width, name="wte")
        positions = nn.Embed(self.length, self.width, name="wpe")
        x = embed(tokens) + positions(jnp.arange(tokens.shape[1]))
        for i in range(self.blocks):
            x = GPT2Block(self.heads, name=f"h_{i}")(x)
        # The head has the weights of the embedding.
        return embed.attend(nn.LayerNorm(1e-5, name="ln_f")(x))


def gpt2_rules(prefix="transformer."):
    """Returns the rules. Matrices are [inputs, outputs] in the files of GPT-2, as in flax."""
    return [
        ft.Rename(f"{prefix}wte.weight", "params/wte/embedding"),
        ft.Rename(f"{prefix}wpe.weight", "params/wpe/embedding"),
        ft.Rename(f"{prefix}ln_f.weight", "params/ln_f/scale"),
        ft.Rename(f"{prefix}ln_f.bias", "params/ln_f/bias"),
        ft.Rename(f"{prefix}h.*.ln_*.weight", "params/h_*/ln_*/scale"),
        ft.Rename(f"{prefix}h.*.ln_*.bias", "params/h_*/ln_*/bias"),
        ft.Rename(f"{prefix}h.*.*.c_*.weight", "params/h_*/*_c_*/kernel"),
        ft.Rename(f"{prefix}h.*.*.c_*.bias", "params/h_*/*_c_*/bias"),
    ]


def rotate(x, base):
    """Turns pairs of features by angles that grow with the position (RoPE, Su et al., 2021)."""
    half = x.shape[-1] // 2
    speeds = base ** (-jnp.arange(half) / half)
    angles = jnp.arange(x.shape[1])[:, None, None] * speeds
    first, second = jnp.split(x, 2, -1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


class LlamaBlock(nn.Module):
    hidden: int
    heads: int
    key_heads: int
    base: float
    epsilon: float

    @nn.compact
    def __call__(self, x):
        width, size = x.shape[-1], x.shape[-1] // self.heads
        y = nn.RMSNorm(self.epsilon, name="input_layernorm")(x)
        query, key, value = (
            nn.DenseGeneral((heads, size), use_bias=False, name=f"{part}_proj")(y)
            for part, heads in zip("qkv", (self.heads, self.key_heads, self.key_heads), strict=True)
        )
        query, key = rotate(query, self.base), rotate(key, self.base)
        mixed = jax.nn.dot_product_attention(query, key, value, is_causal=True)
        x += nn.DenseGeneral(width, (-2, -1), use_bias=False, name="o_proj")(mixed)
        y = nn.RMSNorm(self.epsilon, name="post_attention_layernorm")(x)
        gate = nn.silu(nn.Dense(self.hidden, use_bias=False, name="gate_proj")(y))
        y = gate * nn.Dense(self.hidden, use_bias=False, name="up_proj")(y)
        return x + nn.Dense(width, use_bias=False, name="down_proj")(y)


class Llama(nn.Module):
    vocabulary: int
    width: int
    hidden: int
    blocks: int
    heads: int
    key_heads: int
    base: float = 10_000.0
    epsilon: float = 1e-6

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(self.vocabulary, self.width, name="embed_tokens")(tokens)
        sizes = self.hidden, self.heads, self.key_heads, self.base, self.epsilon
        for i in range(self.blocks):
            x = LlamaBlock(*sizes, name=f"layers_{i}")(x)
        x = nn.RMSNorm(self.epsilon, name="norm")(x)
        return nn.Dense(self.vocabulary, use_bias=False, name="lm_head")(x)


_LAYER, _LAYERS = "model.layers.*", "params/layers_*"
LLAMA_RULES = [
    ft.Rename("model.embed_tokens.weight", "params/embed_tokens/embedding"),
    ft.Rename("model.norm.weight", "params/norm/scale"),
    ft.Rename("lm_head.weight", "params/lm_head/kernel", "o i -> i o"),
    ft.Rename(f"{_LAYER}.*_layernorm.weight", f"{_LAYERS}/*_layernorm/scale"),
    *(
        ft.Rename(f"{_LAYER}.mlp.{part}_proj.weight", f"{_LAYERS}/{part}_proj/kernel", "o i -> i o")
        for part in ("gate", "up", "down")
    ),
    *(
        ft.Rename(
            f"{_LAYER}.self_attn.{part}_proj.weight",
            f"{_LAYERS}/{part}_proj/kernel",
            "(h d) i -> i h d",
        )
        for part in "qkv"
    ),
    ft.Rename(f"{_LAYER}.self_attn.o_proj.weight", f"{_LAYERS}/o_proj/kernel", "o (h d) -> h d o"),
]


class ViTBlock(nn.Module):
    hidden: int
    heads: int

    @nn.compact
    def __call__(self, x):
        width = x.shape[-1]
        # One product for queries, keys and values, which are three in the files.
        project = nn.DenseGeneral((3, self.heads, width // self.heads), name="qkv")
        qkv = jnp.moveaxis(project(nn.LayerNorm(1e-12, name="layernorm_before")(x)), 2, 0)
        mixed = jax.nn.dot_product_attention(*qkv)
        x += nn.DenseGeneral(width, (-2, -1), name="attention")(mixed)
        y = nn.Dense(self.hidden, name="intermediate")(
            nn.LayerNorm(1e-12, name="layernorm_after")(x)
        )
        return x + nn.Dense(width, name="output")(nn.gelu(y, approximate=False))


class ViT(nn.Module):
    classes: int
    patch: int = 16
    width: int = 768
    hidden: int = 3072
    blocks: int = 12
    heads: int = 12

    @nn.compact
    def __call__(self, images):
        patch, zeros = (self.patch, self.patch), nn.initializers.zeros
        x = nn.Conv(self.width, patch, patch, "VALID", name="projection")(images)
        x = x.reshape(len(x), -1, self.width)
        token = jnp.broadcast_to(self.param("token", zeros, (self.width,)), x[:, :1].shape)
        x = jnp.concatenate([token, x], 1)
        x += self.param("positions", zeros, x.shape[1:])
        for i in range(self.blocks):
            x = ViTBlock(self.hidden, self.heads, name=f"layer_{i}")(x)
        x = nn.LayerNorm(1e-12, name="layernorm")(x)
        return nn.Dense(self.classes, name="classifier")(x[:, 0])


_LAYER, _LAYERS = "vit.encoder.layer.*", "params/layer_*"
_QKV = [f"{_LAYER}.attention.attention.{part}" for part in ("query", "key", "value")]
VIT_RULES = [
    ft.Rename("vit.embeddings.cls_token", "params/token", "1 1 d -> d"),
    ft.Rename("vit.embeddings.position_embeddings", "params/positions", "1 n d -> n d"),
    ft.Rename(
        "vit.embeddings.patch_embeddings.projection.weight",
        "params/projection/kernel",
        "o i h w -> h w i o",
    ),
    ft.Rename("vit.embeddings.patch_embeddings.projection.bias", "params/projection/bias"),
    ft.Rename(f"{_LAYER}.layernorm_*.weight", f"{_LAYERS}/layernorm_*/scale"),
    ft.Rename(f"{_LAYER}.layernorm_*.bias", f"{_LAYERS}/layernorm_*/bias"),
    ft.Rename(
        [f"{name}.weight" for name in _QKV],
        f"{_LAYERS}/qkv/kernel",
        "(h d) i -> i 1 h d",
        axis=1,
    ),
    ft.Rename([f"{name}.bias" for name in _QKV], f"{_LAYERS}/qkv/bias", "(h d) -> 1 h d"),
    ft.Rename(
        f"{_LAYER}.attention.output.dense.weight",
        f"{_LAYERS}/attention/kernel",
        "o (h d) -> h d o",
    ),
    ft.Rename(f"{_LAYER}.attention.output.dense.bias", f"{_LAYERS}/attention/bias"),
    *(
        rule
        for part in ("intermediate", "output")
        for rule in (
            ft.Rename(f"{_LAYER}.{part}.dense.weight", f"{_LAYERS}/{part}/kernel", "o i -> i o"),
            ft.Rename(f"{_LAYER}.{part}.dense.bias", f"{_LAYERS}/{part}/bias"),
        )
    ),
    ft.Rename("vit.layernorm.weight", "params/layernorm/scale"),
    ft.Rename("vit.layernorm.bias", "params/layernorm/bias"),
    ft.Rename("classifier.weight", "params/classifier/kernel", "o i -> i o"),
    ft.Rename("classifier.bias", "params/classifier/bias"),
]
