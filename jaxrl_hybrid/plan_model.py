"""What programs allocate beyond their arguments, without a compiler for the GPU.

Everything else in a plan follows from shapes and shardings and is exact. What XLA
allocates for activations does not; these formulas stand in for it. In bytes per
GPU, with fp32 activations (4 bytes) as the decoder has them:

    stream   = 4 R T/sp D        residual stream of all rows of a micro-batch
    hidden   = 4 R T D           the same in front of the head, whole along T
    saved    = 4 b T/sp D n      inputs kept for the backward pass; n is layers x
                                 ticks (remat full) or layers + ticks (remat stage)
    inner    = 4 b T ((3 F + 2 Q + 2 K) / tp + 4 D/sp)   inside of one layer
    logits   = 4 C V/(tp pp)     one chunk of the head
    table    = 4 V D/(tp pp)     gradient of the embedding
    gathered = w V D/(tp pp)     with zero 3, for the embedding and for the head

    gradients   1.25 hidden + 3 stream + saved + the larger of inner and 1.75 logits
                + table + gathered (remat none: 1.5 inner for every layer and tick,
                and a copy of the layers' weights, instead of saved)
    scoring     1.25 hidden + 1.5 stream (pp > 1) + the larger of inner and logits
                + gathered
    generation  the larger of 4 U ((2.5 F + 2 Q + 4 K) / t_g + D), the prefill of
                U prompt tokens (float16: a quarter more), and 4 N V (1 + 1/t_g),
                the logits of N rows
    switch      gate and up of a layer of every stage, as training spreads them
    optimizer   nothing

R rows of T tokens are a micro-batch on one device and b = R / M of them pass a
stage at a time, in M + pp - 1 ticks; D, F, Q, K, V are the widths of the model, the
MLP, all queries, all keys and the vocabulary; w is the size of a weight and C is
model.logprob_chunk. Critics and reward models have no hidden, no logits, no head.
"""

from __future__ import annotations

import jax.numpy as jnp

from jaxrl_hybrid.parallel import weights as weights_lib
from jaxrl_hybrid.run_plan import Plan
from jaxrl_hybrid.shapes import bucket, round_up

NOTE = (
  "activations and buffers are estimates by the formulas of "
  "jaxrl_hybrid/plan_model.py, all other sizes are exact"
)
FP32 = 4
# Beginnings of the phases whose programs have no language model head.
HEADLESS = ("values", "reward", "cost", "update_critic", "update_cost_critic")


class Model:
  """Estimates for one plan; the letters are those of the module's formulas."""

  def __init__(self, plan: Plan):
    config, spec, sizes = plan.config, plan.source.spec, plan.sizes
    mesh, target = plan.train_layout.mesh, plan.generation_layout.mesh
    self.pp, self.tp, dp = (mesh.shape[axis] for axis in ("pp", "tp", "dp"))
    self.sp = self.tp if config.mesh.sequence_parallel else 1
    self.spread = config.mesh.zero == 3 and dp > 1
    self.spread_over = dp if self.spread else 1
    self.tied = spec.tie_word_embeddings
    self.t_g = target.shape["tp"]
    self.remat, self.dtype = config.model.remat, jnp.dtype(config.model.dtype)
    self.item = self.dtype.itemsize
    self.D, self.F = spec.hidden_size, spec.intermediate_size
    self.V = weights_lib.padded_vocab(spec, mesh)
    self.Q, self.K = _widths(spec, mesh)
    self.Q_g, self.K_g = _widths(spec, target)
    self.layers = round_up(spec.num_layers, self.pp) // self.pp
    data = config.data
    self.T = bucket(data.max_prompt_length + data.max_response_length)
    self.R = sizes.micro_sequences // dp
    self.C = min(config.model.logprob_chunk, self.R * self.T)
    self.b = self.R // sizes.pipeline_microbatches
    self.ticks = sizes.pipeline_microbatches + self.pp - 1

  def buffers(self, phase: str, *, tokens: int = 0, rows: int = 0) -> int:
    """Bytes of one program.

    Args:
      phase: as in ``planning``.
      tokens: U, on each device, of a prefill program.
      rows: N, of a decode program.
    """
    critic = phase.startswith(HEADLESS)
    if tokens:
      size = self._prefill(tokens)
    elif rows:
      size = self._decode(rows)
    elif phase == "switch":
      size = 2 * self.pp * self.D * self.F / (self.tp * self.spread_over) * self.item
    elif phase.endswith(": optimizer"):
      size = 0
    elif phase.endswith(": gradients"):
      size = self._gradients(critic)
    else:
      size = self._scoring(critic)
    return int(size)

  def _gradients(self, critic: bool) -> float:
    table = FP32 * self.V * self.D / (self.tp * self.pp)
    size = 3 * self._stream + self._kept + table + self._gathered(critic)
    if critic:
      return size + self._inner
    return size + 1.25 * self._hidden + max(self._inner, 1.75 * self._logits)

  def _scoring(self, critic: bool) -> float:
    size = self._gathered(critic) + (1.5 * self._stream if self.pp > 1 else 0)
    if critic:
      return size + self._inner
    return size + 1.25 * self._hidden + max(self._inner, self._logits)

  def _gathered(self, critic: bool) -> float:
    if not self.spread:
      return 0
    tables = 1 if critic or self.tied else 2
    return tables * self.item * self.V * self.D / (self.tp * self.pp)

  def _prefill(self, tokens: int) -> float:
    width = (2.5 * self.F + 2 * self.Q_g + 4 * self.K_g) / self.t_g + self.D
    scaled = 1.25 if self.dtype == jnp.float16 else 1  # rows of products
    return FP32 * tokens * width * scaled

  def _decode(self, rows: int) -> float:
    gathered = 1 / self.t_g if self.t_g > 1 else 0
    return FP32 * rows * self.V * (1 + gathered)

  @property
  def _kept(self) -> float:
    if self.remat == "none":
      weights = 3 * self.D * self.F + 2 * self.D * (self.Q + self.K)
      copy = self.layers * weights * self.item / self.tp
      return copy + 1.5 * self.layers * self.ticks * self._inner
    saved = FP32 * self.b * self.T / self.sp * self.D
    if self.remat == "stage" and self.pp > 1:
      return saved * (self.layers + self.ticks)
    return saved * self.layers * self.ticks

  @property
  def _stream(self) -> float:
    return FP32 * self.R * self.T / self.sp * self.D

  @property
  def _hidden(self) -> float:
    return FP32 * self.R * self.T * self.D

  @property
  def _inner(self) -> float:
    width = (3 * self.F + 2 * self.Q + 2 * self.K) / self.tp + 4 * self.D / self.sp
    return FP32 * self.b * self.T * width

  @property
  def _logits(self) -> float:
    return FP32 * self.C * self.V / (self.tp * self.pp)


def _widths(spec, mesh) -> tuple[int, int]:
  heads = weights_lib.plan_heads(spec, mesh)
  return heads.slots * heads.group * spec.head_dim, heads.slots * spec.head_dim
