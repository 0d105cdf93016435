"""What a decoder is, as data: a frozen ``ModelSpec``.

``models.families`` reads it from an HF config. Families differ by these fields,
not by a subclass.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

# Options that each kind cannot do without.
ROPE_OPTIONS = {
  "default": (),
  "linear": ("factor",),
  "dynamic": ("factor",),
  "yarn": (),
  "longrope": ("short_factor", "long_factor"),
  "llama3": (
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
  ),
}
VOCAB_MULTIPLE = 64
ROPE_KINDS = tuple(ROPE_OPTIONS)
LENGTH_ROPES = ("dynamic", "longrope")  # frequencies depend on the length
ACTIVATIONS = ("silu", "gelu", "gelu_tanh")
PRE_NORM, POST_NORM, SANDWICH = "pre", "post", "sandwich"
PER_HEAD, WHOLE = "head", "whole"  # what qk_norm normalises
SOFTMAX, SIGMOID = "softmax", "sigmoid"


@dataclasses.dataclass(frozen=True)
class RopeSpec:
  """Rotary position embedding; see ``models.rope`` for the formulas.

  Attributes:
    theta: base of the frequencies.
    kind: one of ``ROPE_KINDS``.
    options: the scaling's own numbers, as (name, value) pairs.
    fraction: of each head that rotates; the rest has no position.
    interleaved: pairs are (0, 1), (2, 3), ... instead of (0, A/2), ...
    length: the longest sequence that will be seen. ``dynamic`` and ``longrope``
      choose their frequencies by it; None: by the sequences at hand.
  """

  theta: float = 10_000.0
  kind: str = "default"
  options: tuple[tuple[str, Any], ...] = ()
  fraction: float = 1.0
  interleaved: bool = False
  length: int | None = None

  def option(self, name: str, default: Any = None) -> Any:
    """Returns a scaling option, or the default."""
    value = dict(self.options).get(name)
    return default if value is None else value


@dataclasses.dataclass(frozen=True)
class LatentSpec:
  """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434).

  Attributes:
    q_rank: width of the compressed queries; None: queries are not compressed.
    kv_rank: width of the compressed keys and values, which is what is cached.
    nope_dim: of each head's query and key, the part without positions.
    rope_dim: the rotated part; its keys are shared by all heads.
    v_dim: of each head's value.
  """

  q_rank: int | None
  kv_rank: int
  nope_dim: int
  rope_dim: int
  v_dim: int


@dataclasses.dataclass(frozen=True)
class ExpertSpec:
  """A mixture of experts in place of the MLP.

  Attributes:
    count: E, routed experts.
    top_k: experts of a token.
    intermediate_size: of each expert.
    shared_size: of the MLP that every token goes through; 0: there is none.
    scores: of the router's logits, ``softmax`` or ``sigmoid``.
    normalize: divide the chosen scores by their sum.
    scale: factor on the chosen scores.
    groups, top_groups: experts are chosen from the best ``top_groups`` of
      ``groups`` groups of neighbours (1 of 1: from all).
    group_score_of: how many of a group's best scores make the group's score.
    corrected: a learned-by-balance bias is added to the scores for the choice
      alone (arXiv:2408.15664); it is kept, not trained.
  """

  count: int
  top_k: int
  intermediate_size: int
  shared_size: int = 0
  scores: str = SOFTMAX
  normalize: bool = True
  scale: float = 1.0
  groups: int = 1
  top_groups: int = 1
  group_score_of: int = 1
  corrected: bool = False


@dataclasses.dataclass(frozen=True)
class ModelSpec:
  """Sizes and switches of one decoder (names as in HF configs).

  Attributes:
    norms: ``pre``: before attention and MLP; ``post``: after them, before the
      residual is added; ``sandwich``: both.
    norm_offset: added to every norm's scale (Gemma stores scale - 1).
    qk_norm: None, ``head`` (each head by itself) or ``whole`` (all heads at once).
    embed_scale: factor on embeddings.
    attention_scale: on query-key products; None: 1 / sqrt(their width).
    attention_softcap, logit_softcap: c in ``c tanh(x / c)``; None: no cap.
    window: tokens that a local layer sees, its own included.
    local_layers: for each layer whether it is local; empty: none is.
    local_rope: of local layers, where it differs from ``rope``.
    latent: latent attention instead of grouped-query attention.
    experts: mixture of experts instead of an MLP, but in the first
      ``dense_layers`` layers.
  """

  family: str
  vocab_size: int
  hidden_size: int
  intermediate_size: int
  num_layers: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  max_positions: int
  rms_norm_eps: float = 1e-6
  rope: RopeSpec = RopeSpec()
  tie_word_embeddings: bool = False
  qkv_bias: bool = False
  out_bias: bool = False
  mlp_bias: bool = False
  qk_norm: str | None = None
  initializer_range: float = 0.02
  activation: str = "silu"
  norms: str = PRE_NORM
  norm_offset: float = 0.0
  embed_scale: float = 1.0
  attention_scale: float | None = None
  attention_softcap: float | None = None
  logit_softcap: float | None = None
  window: int | None = None
  local_layers: tuple[bool, ...] = ()
  local_rope: RopeSpec | None = None
  latent: LatentSpec | None = None
  experts: ExpertSpec | None = None
  dense_layers: int = 0

  def padded_vocab(self, tp: int) -> int:
    """Vocabulary size rounded up so that tp divides it.

    The same for every tp up to 64, so that a checkpoint fits another mesh.
    """
    multiple = math.lcm(VOCAB_MULTIPLE, tp)
    return -(-self.vocab_size // multiple) * multiple

  @property
  def stacked_layers(self) -> int:
    """Layers that are alike and stacked: all but the leading dense ones."""
    return self.num_layers - self.dense_layers

  @property
  def rope_dim(self) -> int:
    """Rotated width of a head."""
    width = self.latent.rope_dim if self.latent else self.head_dim
    return int(width * self.rope.fraction)

  def is_local(self, layer: int) -> bool:
    """Whether a layer sees only its window."""
    return bool(self.local_layers) and self.local_layers[layer]

  def local_stack(self, count: int) -> np.ndarray:
    """bool ``[count]`` of the stacked layers; layers of padding are not local."""
    local = [self.is_local(i) for i in range(self.dense_layers, self.num_layers)]
    return np.array(local + [False] * (count - len(local)))

  def local_entries(self, entries: int, stages: int) -> list[bool] | np.ndarray:
    """Of a list of layers: a bool each; of stacks of one layer of every stage bool
    ``[entries, stages]``."""
    local_L = self.local_stack(entries * stages)
    return local_L.tolist() if stages == 1 else local_L.reshape(stages, entries).T

  @property
  def mixes_windows(self) -> bool:
    """Whether some layers are local and others are not."""
    return len(set(self.local_layers)) > 1

  @property
  def knows_length(self) -> bool:
    """Whether no rope still has to choose its frequencies by the sequences."""
    ropes = (self.rope, self.local_rope or self.rope)
    return all(r.kind not in LENGTH_ROPES or r.length is not None for r in ropes)

  def for_length(self, length: int) -> ModelSpec:
    """The same model for sequences of at most ``length`` tokens."""
    at = lambda rope: rope and dataclasses.replace(rope, length=length)
    return dataclasses.replace(self, rope=at(self.rope), local_rope=at(self.local_rope))
