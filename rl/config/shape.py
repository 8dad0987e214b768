"""Sizes of a language model, and what follows from them by arithmetic alone. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass

TRAINED_BYTES_PER_PARAM = 16
"""4 of the fp32 master, 4 of its gradient, 8 of AdamW's two moments."""


@dataclass
class VisionShape:
    """Of the tower that makes tokens of images, in the families of Qwen2-VL to Qwen3.5. Its output is as wide as the
    decoder."""

    layers: int
    hidden: int
    ffn: int
    patch_numbers: int
    """Of a patch: colors x frames x rows x columns."""
    merge: int
    """Patches along each side of the square that becomes one token."""
    positions: int = 0
    """Learned; 0: rotary ones alone."""
    patch_bias: bool = False
    deep_mergers: int = 0
    """Qwen3-VL's further ones, of layers in between, whose output is added in the decoder's first layers."""
    gated: bool = False
    """Gated feed-forward layers and RMS norms, as in Qwen2.5-VL; else plain ones, and layer norms."""

    @property
    def layer_params(self) -> int:
        """Of one layer, every projection with a bias."""
        norms = 2 * self._norm_params(self.hidden)
        attention = 4 * self.hidden * (self.hidden + 1)
        ffn = (3 if self.gated else 2) * self.hidden * self.ffn + (2 if self.gated else 1) * self.ffn + self.hidden
        return norms + attention + ffn

    def outer_params(self, width: int) -> int:
        """Outside the layers, for a decoder of that width: projection of patches, positions, mergers."""
        merged = self.hidden * self.merge**2
        projections = merged * (merged + 1) + (merged + 1) * width
        patches = self.hidden * (self.patch_numbers + self.patch_bias + self.positions)
        deep = self.deep_mergers * (projections + self._norm_params(merged))
        return patches + projections + self._norm_params(self.hidden) + deep

    def _norm_params(self, width: int) -> int:
        return width if self.gated else 2 * width


@dataclass
class ModelShape:
    """Of a decoder with gated feed-forward layers and RMS norms, and of its vision tower where it has one. The work of
    a tower on images is in no count of operations.

    Where a model's config.json is here, the shape is read from it. `model.shape` carries the same for a model that is
    not, so that a plan needs no download, and is compared with config.json as soon as there is one.
    """

    layers: int
    hidden: int
    heads: int
    """Of queries."""
    kv_heads: int
    head_dim: int
    ffn: int
    """Of a dense layer; 0 where every layer has experts."""
    vocab: int
    tied_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    """Of the projection after attention."""
    ffn_bias: bool = False
    qk_norm: bool = False
    """Queries and keys are normalized, per head."""
    gated_attention: bool = False
    """The query projection is twice as wide: its other half gates the output of attention."""
    attention_layers: int | None = None
    """Layers with full attention and a cache of keys and values; the others have a Gated DeltaNet. None: all."""
    linear_key_heads: int = 0
    linear_value_heads: int = 0
    linear_key_dim: int = 0
    """Of one head."""
    linear_value_dim: int = 0
    linear_conv_kernel: int = 0
    experts: int = 0
    """Of each layer; 0: the layers are dense."""
    experts_per_token: int = 0
    expert_ffn: int = 0
    shared_expert_ffn: int = 0
    """0: no expert that every token goes through."""
    vision: VisionShape | None = None
    """None: the model takes text alone, or has a tower of another kind, which `num_params` then counts."""
    num_params: int | None = None
    """Parameters of the decoder; None: nobody said, and the sizes above do not account for all of them."""
    max_positions: int | None = None
    """Tokens of prompt and answer together that the model takes at most; None: not known here."""

    @property
    def full_attention_layers(self) -> int:
        return self.layers if self.attention_layers is None else self.attention_layers

    @property
    def linear_layers(self) -> int:
        return self.layers - self.full_attention_layers

    @property
    def attention_params(self) -> int:
        """Of one layer with full attention."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        count = self.hidden * ((3 if self.gated_attention else 2) * queries + 2 * keys)
        count += (queries + 2 * keys) * self.qkv_bias + self.hidden * self.output_bias
        return count + 2 * self.head_dim * self.qk_norm

    @property
    def linear_attention_params(self) -> int:
        """Of one Gated DeltaNet: projections of queries, keys, values and gate, of two numbers a head, a convolution,
        decay, norm and output."""
        keys, values = self.linear_key_heads * self.linear_key_dim, self.linear_value_heads * self.linear_value_dim
        projected = self.hidden * (2 * keys + 2 * values + 2 * self.linear_value_heads)
        convolved = (2 * keys + values) * self.linear_conv_kernel
        return projected + convolved + 2 * self.linear_value_heads + self.linear_value_dim + values * self.hidden

    @property
    def expert_params(self) -> int:
        """Of one expert."""
        return 3 * self.hidden * self.expert_ffn

    @property
    def all_expert_params(self) -> int:
        """Of all experts of all layers, without shared ones: what expert parallelism divides."""
        return self.layers * self.experts * self.expert_params

    @property
    def ffn_params(self) -> int:
        """Of one layer, all experts included."""
        if not self.experts:
            return 3 * self.hidden * self.ffn + (2 * self.ffn + self.hidden) * self.ffn_bias
        shared = 3 * self.hidden * self.shared_expert_ffn + (self.hidden if self.shared_expert_ffn else 0)
        return self.experts * (self.expert_params + self.hidden) + shared

    @property
    def embedding_params(self) -> int:
        """Of the input embeddings; an untied output head has as many."""
        return self.vocab * self.hidden

    @property
    def root_params(self) -> int:
        """Outside the layers: embeddings, output head, last norm."""
        return self.embedding_params * (1 if self.tied_embeddings else 2) + self.hidden

    @property
    def largest_layer_params(self) -> int:
        attention = self.attention_params if self.full_attention_layers else 0
        linear = self.linear_attention_params if self.linear_layers else 0
        return max(attention, linear) + self.ffn_params + 2 * self.hidden

    @property
    def vision_params(self) -> int:
        """Of the tower; 0 without one."""
        if self.vision is None:
            return 0
        return self.vision.layers * self.vision.layer_params + self.vision.outer_params(self.hidden)

    def counted_params(self) -> int:
        """Of the decoder, from the sizes."""
        mixing = self.full_attention_layers * self.attention_params + self.linear_layers * self.linear_attention_params
        return mixing + self.layers * (self.ffn_params + 2 * self.hidden) + self.root_params

    @property
    def active_params(self) -> int:
        """That one token is multiplied with: the head but not the input embeddings, and of experts those it visits."""
        assert self.num_params is not None, "the model's parameters are not known"
        idle = self.layers * (self.experts - self.experts_per_token) * self.expert_params
        return self.num_params - idle - (0 if self.tied_embeddings else self.embedding_params)

    def kv_bytes_per_token(self, *, bytes_per_element: int) -> int:
        """Keys and values of one token in all layers that keep them."""
        return 2 * self.full_attention_layers * self.kv_heads * self.head_dim * bytes_per_element

    def state_bytes_per_sequence(self, *, bytes_per_element: int) -> int:
        """What Gated DeltaNets keep of a sequence whatever its length: fp32 states, and inputs of the convolution."""
        keys, values = self.linear_key_heads * self.linear_key_dim, self.linear_value_heads * self.linear_value_dim
        state = 4 * self.linear_value_heads * self.linear_key_dim * self.linear_value_dim
        convolution = (2 * keys + values) * max(self.linear_conv_kernel - 1, 0) * bytes_per_element
        return self.linear_layers * (state + convolution)

    def forward_flops(self, tokens: float, context: float) -> float:
        """Of `tokens` that each see `context` positions on average (half their sequence, with a causal mask)."""
        attention = 4 * self.full_attention_layers * self.heads * self.head_dim * context
        # A token reads and writes the state, each a multiply-add per element.
        state = 4 * self.linear_layers * self.linear_value_heads * self.linear_key_dim * self.linear_value_dim
        return tokens * (2 * self.active_params + attention + state)
