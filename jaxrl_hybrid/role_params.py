"""The parameters of a role: loaded, random, restored, merged, and how they lie."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from jaxrl_hybrid import adapting
from jaxrl_hybrid.models import params as params_lib
from jaxrl_hybrid.models.hf.load import load_params
from jaxrl_hybrid.models.hf.peft import save_adapters
from jaxrl_hybrid.models.params import Params
from jaxrl_hybrid.parallel.adapters import AdapterLayout
from jaxrl_hybrid.parallel.weights import WeightLayout
from jaxrl_hybrid.run_plan import Plan
from jaxrl_hybrid.runtime.checkpoint import Checkpoints
from jaxrl_hybrid.workers.chunks import Chunks
from jaxrl_hybrid.workers.stores import AnyLayout, Offload


def weight_layout(plan: Plan, head: str = params_lib.LM) -> WeightLayout:
  """How the parameters of a model with this head lie on the training mesh."""
  config = plan.config
  return WeightLayout(
    plan.source.spec,
    plan.train_layout,
    jnp.dtype(config.model.dtype),
    zero=config.mesh.zero,
    head=head,
  )


def trained_layout(plan: Plan, head: str = params_lib.LM) -> AnyLayout:
  """How what is trained lies on the mesh: the parameters, or the adapters."""
  lora = plan.lora if head == params_lib.LM else plan.critic_lora
  layout = weight_layout(plan, head)
  return layout if lora is None else AdapterLayout(layout, lora)


def offload_of(config: ConfigDict, *, everything: bool = False) -> Offload:
  """What lives on the host; ``everything``: whatever the switches say."""
  section = config.offload
  return Offload(
    optimizer=section.optimizer or everything,
    params=section.params or everything,
    weights=everything,
    layers_per_chunk=section.layers_per_chunk,
  )


def make_params(
  plan: Plan,
  head: str = params_lib.LM,
  *,
  fresh_head: bool = True,
  rounded: bool = False,
) -> Params:
  """Loaded or random parameters of ``plan.source``, stored as the layout says.

  Args:
    plan: of the model.
    head: ``params.LM`` or ``params.VALUE``.
    fresh_head: a model without a score head gets a value head of zeros.
    rounded: kernels in the compute dtype, for weights that are not trained; fp32 ones
      are never made of a directory.
  """
  layout = weight_layout(plan, head)
  abstract = layout.abstract_params()
  shardings = jax.tree.map(lambda x: x.sharding, abstract)
  if plan.source.path:
    return load_params(
      plan.source.path,
      layout.spec,
      shardings,
      vocab=layout.vocab,
      head=head,
      fresh_head=fresh_head,
      dtype=layout.dtype if rounded else jnp.float32,
      kernels_only=rounded,
    )
  key = jax.random.key(plan.config.seed)

  def init() -> Params:
    params = params_lib.init_params(layout.spec, key, vocab=layout.vocab, head=head)
    if head == params_lib.VALUE and fresh_head:
      params["value_head"] = params_lib.init_value_head(layout.spec)
    return params_lib.compute_copy(params, layout.dtype) if rounded else params

  return jax.jit(init, out_shardings=shardings)()


def starting_params(plan: Plan, head: str = params_lib.LM) -> Params:
  """What a role starts from: fp32 parameters, or what its adapters leave frozen."""
  adapted = isinstance(trained_layout(plan, head), AdapterLayout)
  return make_params(plan, head, rounded=adapted)


def restore_trained(
  plan: Plan, checkpoints: Checkpoints, step: int, head: str = params_lib.LM
) -> Params:
  """What a checkpoint's actor or critic has trained, as one tree.

  Args:
    plan: of this role's model.
    checkpoints: of the run.
    step: of the checkpoint.
    head: ``params.LM`` for the actor, ``params.VALUE`` for the critic.
  """
  critic = head == params_lib.VALUE
  layout = trained_layout(plan, head)
  where = offload_of(plan.config, everything=critic and plan.config.offload.critic)
  path = ("critic" if critic else "actor", "params")
  if not where.streams:
    return checkpoints.restore_part(step, path, layout.abstract_params())
  chunks = Chunks(layout, where.layers_per_chunk)
  return chunks.join(checkpoints.restore_part(step, path, chunks.shapes()))


def full_params(plan: Plan, trained: Params, head: str = params_lib.LM) -> Params:
  """A role's fp32 parameters, adapters merged into those of the base."""
  layout = trained_layout(plan, head)
  if not isinstance(layout, AdapterLayout):
    return trained
  return adapting.merge(layout, make_params(plan, head), trained)


def export_adapters(plan: Plan, trained: Params, out_dir: Path) -> None:
  """Writes the actor's adapters as PEFT does."""
  lora, source = plan.lora, plan.source
  save_adapters(trained, source.spec, lora, out_dir, base=source.path)


def make_weights(
  plan: Plan, head: str = params_lib.LM, *, fresh_head: bool = True
) -> Params:
  """The weights of ``plan.source`` alone, for a model that is not trained.

  Adapters that it would start from are merged.
  """
  path = plan.config.model.lora.path if head == params_lib.LM else ""
  params = make_params(plan, head, fresh_head=fresh_head, rounded=not path)
  if path:
    layout = trained_layout(plan)
    adapters = adapting.fresh(layout, seed=plan.config.seed, path=path)
    params = adapting.merge(layout, params, adapters)
  return jax.jit(weight_layout(plan, head).prepare)(params)
