"""Tiny actors, critics and batches; compiled once per set of options."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from ml_collections import ConfigDict

from jaxrl_hybrid.algorithms.running import RunningMoments
from jaxrl_hybrid.models import params as params_lib
from jaxrl_hybrid.models.decoder import Decoder
from jaxrl_hybrid.models.spec import ModelSpec
from jaxrl_hybrid.parallel import mesh as mesh_lib
from jaxrl_hybrid.parallel import weights as weights_lib
from jaxrl_hybrid.parallel.hybrid import HybridEngine
from jaxrl_hybrid.rollout.engine import Engine
from jaxrl_hybrid.rollout.sampling import Sampling
from jaxrl_hybrid.types import LENGTH, STOP, Batch, Prompt
from jaxrl_hybrid.workers.actor import Actor, ActorSettings
from jaxrl_hybrid.workers.critic import Critic, CriticSettings
from jaxrl_hybrid.workers.generator import Generator, RolloutSettings
from jaxrl_hybrid.workers.optimizer import make_optimizer

SPEC = ModelSpec(
  "qwen3",
  37,
  16,
  24,
  2,
  4,
  2,
  8,
  64,
  qk_norm="head",
  qkv_bias=True,
  initializer_range=0.3,
)
TIED = dataclasses.replace(
  SPEC, family="qwen2", head_dim=4, qk_norm=None, tie_word_embeddings=True
)
VOCAB = 64  # padded, on every mesh alike
EOS = 2
JUNK = 36  # an id behind each row, and (as 1e4) what its columns hold there

# Prompts hold the EOS and id 0 on purpose; response 2 is the EOS alone.
PROMPTS = ([5, EOS, 7], [EOS, 0, 9, EOS, 4], [3], [0, 0, 8, 1, 6, 9, 2])
RESPONSES = ([5, 6, EOS], [7, 0, 2, 9, 11], [EOS], [1, 30, 12, 4])

ACTOR = dict(
  policy_loss="vanilla",
  loss_agg_mode="token-mean",
  loss_scale_factor=4.0,
  clip_ratio_low=0.2,
  clip_ratio_high=0.2,
  clip_ratio_c=3.0,
  entropy_coeff=0.0,
  use_kl_loss=False,
  kl_loss_coef=0.0,
  kl_loss_type="k3",
  router_aux_loss_coef=0.0,
  ppo_epochs=1,
  temperature=0.7,
  logprob_chunk=5,
  mini_rows=4,
  micro_rows=2,
  share_rows=False,
  seed=0,
)
OPTIM = dict(
  lr=0.01,
  weight_decay=0.0,
  betas=(0.9, 0.999),
  eps=1e-8,
  schedule="constant",
  warmup_steps=0,
  min_lr_ratio=0.0,
)
CRITIC = dict(
  cliprange_value=0.5,
  loss_agg_mode="token-mean",
  loss_scale_factor=4.0,
  ppo_epochs=1,
  mini_rows=4,
  micro_rows=2,
  share_rows=False,
  seed=0,
)


def padded(rows, junk, dtype):
  """Ragged rows as ``[N, width]`` with junk behind each."""
  width = max(6, *map(len, rows))
  out = np.full((len(rows), width), junk, dtype)
  for i, row in enumerate(rows):
    out[i, : len(row)] = row
  return out


def per_token(seed, responses=RESPONSES, scale=1.0):
  """Random fp32 ``[N, R]``, junk behind each row."""
  rng = np.random.default_rng(seed)
  return padded([scale * rng.normal(size=len(r)) for r in responses], 1e4, np.float32)


def constant(numbers, responses=RESPONSES):
  """One number per row, on all of its tokens."""
  return padded(
    [[x] * len(r) for x, r in zip(numbers, responses, strict=True)], 1e4, np.float32
  )


def make_batch(prompts=PROMPTS, responses=RESPONSES, **fields) -> Batch:
  """A batch with random advantages unless given."""
  ids = padded(responses, JUNK, np.int32)
  fields = (
    dict(
      rollout_log_probs=np.zeros(ids.shape, np.float32),
      advantages=per_token(0, responses),
    )
    | fields
  )
  return Batch(
    prompts=[
      Prompt(np.array(p, np.int32), "", "", i, i) for i, p in enumerate(prompts)
    ],
    sample_ids=np.zeros(len(ids), np.int32),
    response_ids=ids,
    response_lengths=np.array([len(r) for r in responses], np.int32),
    finish_reasons=[STOP if r[-1] == EOS else LENGTH for r in responses],
    **fields,
  )


def host_params(spec=SPEC, head=params_lib.LM):
  """Random numbers in every leaf: no bias is 0, no scale is 1."""
  rng = np.random.default_rng(0)

  def draw(path, leaf):
    mean, std = dict(kernel=(0, 0.3), bias=(0, 0.1), scale=(1, 0.1))[path[-1].key]
    return rng.normal(mean, std, leaf.shape).astype(np.float32)

  return jax.tree.map_with_path(
    draw, params_lib.abstract_params(spec, vocab=VOCAB, head=head)
  )


def weight_layout(mesh=(1, 1, 1), spec=SPEC, head=params_lib.LM):
  """fp32 weights on a mesh (pp, tp, dp)."""
  train = weights_lib.train_layout(
    spec, mesh_lib.train_mesh(mesh), sequence_parallel=False
  )
  return weights_lib.WeightLayout(spec, train, jnp.dtype(jnp.float32), head=head)


def make_decoder(mesh=(1, 1, 1), spec=SPEC, remat="none", head=params_lib.LM):
  layout = weight_layout(mesh, spec, head)
  return Decoder(
    spec,
    jnp.float32,
    "xla",
    layout.train.constrain,
    remat,
    heads=layout.heads,
    use=layout.use,
    stages=layout.stages,
  )


def place_params(host, layout):
  """A fresh copy on the mesh: the update donates it."""
  shardings = layout.stored.shardings(layout.axes, host)
  return jax.device_put(host, shardings, may_alias=False)


def make_generator(layout, spec, n, max_new, eos, mask_truncated):
  target = weights_lib.generation_layout(
    spec, mesh_lib.generation_mesh(layout.train.mesh, (1, 1))
  )
  decoder = Decoder(spec, jnp.float32, "xla", target.constrain)
  return Generator(
    HybridEngine(layout, target),
    Engine(decoder, target, eos_ids=eos, max_rows=64, seed=0),
    RolloutSettings(
      n, max_new, Sampling(temperature=ACTOR["temperature"]), mask_truncated
    ),
  )


def adamw(**changes):
  """The package's optimizer at a constant rate."""
  section = ConfigDict(OPTIM | changes)
  return make_optimizer(section, optax.constant_schedule(section.lr))


@functools.lru_cache(maxsize=None)
def _actor(mesh, spec, optimizer, remat, n, max_new, eos, mask_truncated, settings):
  """(actor, host copy of its optimizer state)."""
  layout = weight_layout(mesh, spec)
  actor = Actor(
    make_decoder(mesh, spec, remat),
    place_params(host_params(spec), layout),
    layout,
    make_generator(layout, spec, n, max_new, eos, mask_truncated),
    ActorSettings(**{**ACTOR, **dict(settings)}),
    adamw() if optimizer == "adamw" else optax.sgd(1.0),
    optax.constant_schedule(1.0),
  )
  return actor, jax.device_get(actor.state.store.opt_state)


def make_actor(
  mesh=(1, 1, 1),
  spec=SPEC,
  optimizer="sgd",
  remat="none",
  n=2,
  max_new=6,
  eos=(EOS,),
  mask_truncated=False,
  **settings,
) -> Actor:
  """An actor at ``host_params``; plain SGD of rate 1, or ``adamw``.

  Equal options give the same object, as good as new but compiled.
  """
  actor, opt_state = _actor(
    mesh,
    spec,
    optimizer,
    remat,
    n,
    max_new,
    eos,
    mask_truncated,
    tuple(sorted(settings.items())),
  )
  state = actor.state
  state.store.params = place_params(host_params(spec), weight_layout(mesh, spec))
  state.store.opt_state = jax.tree.map(
    lambda host, x: jax.device_put(host, x.sharding, may_alias=False),
    opt_state,
    state.store.opt_state,
  )
  state.updates = 0
  actor.generator.drop_weights()
  return actor


@functools.lru_cache(maxsize=None)
def _critic(mesh, settings):
  head = params_lib.VALUE
  layout = weight_layout(mesh, head=head)
  return Critic(
    make_decoder(mesh, head=head),
    place_params(host_params(head=head), layout),
    layout,
    CriticSettings(**{**CRITIC, **dict(settings)}),
    optax.sgd(0.01),
    optax.constant_schedule(0.01),
  )


def make_critic(mesh=(1, 1, 1), **settings) -> Critic:
  """A critic with a random value head, and SGD of rate .01; as ``make_actor``."""
  critic = _critic(mesh, tuple(sorted(settings.items())))
  head = params_lib.VALUE
  critic.state.store.params = place_params(
    host_params(head=head), weight_layout(mesh, head=head)
  )
  critic.state.updates = 0
  critic.moments = RunningMoments()
  return critic


def update(batch, answered=None, **options):
  """(metrics, gradient) of one ``update_policy`` from the initial parameters.

  With SGD of rate 1 the gradient is what the update subtracted.
  """
  actor = make_actor(**options)
  before = jax.device_get(actor.state.store.params)
  metrics = actor.update_policy(batch, answered=answered)
  after = jax.device_get(actor.state.store.params)
  return metrics, jax.tree.map(lambda a, b: a - b, before, after)


def largest(tree):
  """The largest absolute number of a tree."""
  return max(np.abs(np.asarray(x)).max() for x in jax.tree.leaves(tree))


def assert_same_update(a, b, rel=1e-6):
  """Two results of ``update`` agree in loss and in every parameter."""
  np.testing.assert_allclose(a[0]["actor/loss"], b[0]["actor/loss"], rtol=rel, atol=rel)
  scale = max(1.0, largest(b[1]))
  worst = largest(jax.tree.map(lambda x, y: x - y, a[1], b[1]))
  assert worst <= rel * scale, (worst, scale)


def each_row_alone(params, batch):
  """Yields (hidden states before each response token, response ids) without padding.

  Traceable in params; nothing of packing, chunks or masks is used.
  """
  decoder = make_decoder()
  for i, prompt in enumerate(batch.prompts):
    ids = np.concatenate([prompt.ids, batch.response(i)])
    yield (
      decoder.hidden(params, jnp.asarray(ids[None]))[0, len(prompt.ids) - 1 : -1],
      (batch.response(i)),
    )
