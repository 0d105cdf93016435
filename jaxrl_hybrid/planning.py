"""What a run will hold on each GPU, phase by phase, before any GPU is rented.

The roles of the run are built on shapes for the real mesh; what is resident
follows from shapes and shardings. The programs that a step will run are compiled
ahead of time, and XLA's own analysis says what each needs beyond that; without a
compiler for the GPU ``plan_model`` estimates it. Nothing is computed and no weight
is read.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_hybrid import build, plan_model, role_params
from jaxrl_hybrid.algorithms.registry import POLICY_LOSSES
from jaxrl_hybrid.inspection import make_algorithm
from jaxrl_hybrid.models.adapters import is_adapted
from jaxrl_hybrid.models.params import VALUE
from jaxrl_hybrid.parallel import abstract, offload, topology
from jaxrl_hybrid.rollout.engine import Sizes
from jaxrl_hybrid.rollout.sampling import Sampling
from jaxrl_hybrid.run_plan import Plan
from jaxrl_hybrid.shapes import bucket, round_up
from jaxrl_hybrid.workers.actor import Actor
from jaxrl_hybrid.workers.critic import Critic
from jaxrl_hybrid.workers.generator import GREEDY
from jaxrl_hybrid.workers.reference import Reference
from jaxrl_hybrid.workers.reward_model import RewardModel
from jaxrl_hybrid.workers.style import StyleTeacher
from jaxrl_hybrid.workers.training import TrainState, abstract_batch, shared_columns

CRITIC_COLUMNS = ("returns", "old_values")
BUFFERS, CACHE = "activations and buffers", "KV cache"  # components
GEN, REWARD = "gen", "reward"  # phases
COST = ("cost_critic", "cost")  # a role and a phase
VALUES = {"critic": "values", "cost_critic": "cost_values"}  # phases of the critics
Bytes = dict[str, int]  # component -> bytes per GPU


@dataclasses.dataclass(frozen=True)
class Phase:
  """One part of a step.

  Attributes:
    name: as in ``timing_s/*``.
    components: bytes per GPU of everything that is there at its peak.
  """

  name: str
  components: Bytes

  @property
  def bytes(self) -> int:
    """Peak of the phase per GPU."""
    return sum(self.components.values())


@dataclasses.dataclass(frozen=True)
class Report:
  """The phases of a step and what follows from them.

  Attributes:
    phases: in the order of a step.
    switch_bytes: received by each GPU per switch.
    host_bytes: pinned memory per GPU.
    kv_row_bytes: KV cache of one row of the longest length, per GPU.
    rows: rows that decode together on each GPU.
  """

  phases: list[Phase]
  switch_bytes: int
  host_bytes: int
  kv_row_bytes: int
  rows: int

  @property
  def peak(self) -> Phase:
    """The phase that needs most."""
    return max(self.phases, key=lambda phase: phase.bytes)

  def kv_rows_that_fit(self, usable: int) -> int:
    """Rows per GPU whose KV cache fits beside the rest of the generation phase."""
    generation = next(p for p in self.phases if p.name == GEN)
    rest = generation.bytes - generation.components[CACHE]
    return max(0, (usable - rest) // self.kv_row_bytes)


class Planner:
  """Compiles the programs of a step for ``plan``'s devices.

  Args:
    plan: an inspected config whose mesh may be of devices that are not there.
    estimate: nothing is compiled, what programs allocate is an estimate.
  """

  def __init__(self, plan: Plan, *, estimate: bool = False):
    self._plan = plan
    self._models = _estimates(plan) if estimate else {}
    config = plan.config
    self._length = config.data.max_prompt_length + config.data.max_response_length
    self._algorithm = make_algorithm(config)
    self.actor: Actor = build.planned_actor(plan)
    self.reference: Reference | None = build.make_reference(plan, self.actor)
    self.style = build.make_teacher(plan, self.actor, self.reference)
    self.actor.teacher = self.style
    self.critics: dict[str, Critic] = {}
    self.judges: dict[str, RewardModel] = {}  # by their phase
    for side, critic, judge in ((plan, "critic", REWARD), (plan.cost, *COST)):
      if side and self._algorithm.needs_critic:
        self.critics[critic] = build.planned_critic(side.of_critic, self.actor)
      if side and side.reward_model:
        layout = role_params.weight_layout(side.of_reward_model, VALUE)
        weights = layout.abstract_weights()
        self.judges[judge] = build.make_reward_model(side, weights)
    self._plain = self.actor.generator.plain(self.actor.state.weights)
    self._generation = self.actor.generator.switch.copy(self._plain)

  def report(self) -> Report:
    """Compiles everything; minutes for a large model."""
    config, engine = self._plan.config, self.actor.generator.engine
    sizes = self._rollout_sizes(config.data.train_batch_size, config.rollout.n)
    return Report(
      phases=list(self._phases()),
      switch_bytes=self._switch_bytes(),
      host_bytes=self._host_bytes(),
      kv_row_bytes=engine.programs.slot_bytes(self._generation, sizes.length),
      rows=sizes.slots // self._plan.generation_layout.batch_shards,
    )

  def _phases(self) -> Iterator[Phase]:
    copy = {"generation weights": self._generation_bytes()}
    switched = abstract.device_bytes(self._slot_of_generation())
    beyond = self._buffers("switch", self._lower_switch, switched)
    merged = {"merged weights": self._merged_bytes()}
    yield self._phase("switch", copy | merged | beyond)
    yield from self._generation_phases(copy)
    for name, judge in self.judges.items():
      side = self._plan if name == REWARD else self._plan.cost
      length = side.config.reward_model.max_length if side.re_encodes else None
      weights = offload.to_device(judge.weights)
      yield self._scoring(name, judge.scores, weights, length)
    if self._needs_old_log_probs():
      yield self._scoring(
        "old_log_prob", self.actor.log_probs, self.actor.state.weights
      )
    if self.reference:
      on_device = offload.to_device(self.reference.weights)
      yield self._scoring("ref", self.reference.log_probs, on_device)
    for name, critic in self.critics.items():
      weights = offload.to_device(critic.state.weights)
      yield self._scoring(VALUES[name], critic.values, weights)
      columns = dict.fromkeys(CRITIC_COLUMNS, np.float32)
      yield from self._update(f"update_{name}", critic.state, columns)
      critic.state.store.rest()
    yield from self._update(
      "update_actor", self.actor.state, self._actor_columns(), self.style
    )

  @property
  def _frozen(self) -> Reference | None:
    """What the KL or the style loss compares with."""
    return self.reference or (self.style and self.style.reference)

  def _phase(self, name: str, beyond: Bytes) -> Phase:
    """What is resident in every phase, and what this one adds."""
    found = self._resident()
    for component, size in beyond.items():
      found[component] = found.get(component, 0) + size
    return Phase(name, {k: v for k, v in found.items() if v})

  def _resident(self) -> Bytes:
    found = {}
    for name, role in self._trained().items():
      store = role.state.store
      found[f"{name} fp32 parameters"] = abstract.device_bytes(store.params)
      found[f"{name} moments"] = abstract.device_bytes(store.opt_state)
      found[f"{name} weights"] = abstract.device_bytes(store.held_weights)
    if self._frozen and not self._frozen.shared:
      found["reference weights"] = abstract.device_bytes(self._frozen.weights)
    for name, judge in self.judges.items():
      found[f"{name} weights"] = abstract.device_bytes(judge.weights)
    return found

  def _trained(self) -> dict[str, Actor | Critic]:
    return {"actor": self.actor, **self.critics}

  def _generation_phases(self, copy: Bytes) -> Iterator[Phase]:
    """Of training, and of greedy completions if they need more."""
    settings, batch = (
      self.actor.generator.settings,
      self._plan.config.data.train_batch_size,
    )
    runs = {GEN: (batch, settings.n, settings.sampling)}
    if self._algorithm.needs_greedy_baseline:
      runs["gen_baseline"] = (batch, 1, GREEDY)
    if self._plan.eval_prompts:
      runs["testing"] = (len(self._plan.eval_prompts), 1, GREEDY)
    slots = places = 0
    for name, (prompts, n, sampling) in runs.items():
      sizes = self._rollout_sizes(prompts, n)
      if sizes.slots > slots or sizes.places > places:
        slots, places = max(slots, sizes.slots), max(places, sizes.places)
        yield self._generation_phase(name, copy, sizes, sampling)

  def _generation_phase(
    self, name: str, copy: Bytes, sizes: Sizes, sampling: Sampling
  ) -> Phase:
    """Prompts that are prefilled stay while the slots that they filled decode."""
    programs, weights = self.actor.generator.engine.programs, self._generation
    shards = self._plan.generation_layout.batch_shards
    rows, prompts = sizes.slots // shards, sizes.places // shards
    prefilled = prompts * programs.slot_bytes(weights, sizes.width)
    program = functools.partial(
      programs.lower_prefill, weights, sizes.places, sizes.width
    )
    tokens = prompts * min(sizes.width, self._plan.config.rollout.prefill_tokens)
    prefill = self._buffers(name, program, prefilled, tokens=tokens)
    program = functools.partial(
      programs.lower_decode, weights, sizes.slots, sizes.length, sampling
    )
    decode = self._buffers(name, program, rows=rows)
    cache = {CACHE: rows * programs.slot_bytes(weights, sizes.length)}
    held = {
      "prefilled prompts": prefilled,
      BUFFERS: max(prefill[BUFFERS], decode[BUFFERS]),
    }
    return self._phase(name, copy | cache | held)

  def _rollout_sizes(self, prompts: int, n: int) -> Sizes:
    """With the longest prompts and responses that the data may have."""
    data = self._plan.config.data
    return self.actor.generator.engine.sizes(
      [data.max_prompt_length] * prompts, n, [data.max_response_length] * prompts * n
    )

  def _scoring(
    self, name: str, scorer: Any, weights: Any, length: int | None = None
  ) -> Phase:
    """Of rows of ``length`` tokens, or of the longest that the actor makes."""
    lower = functools.partial(
      scorer.lower, weights, self._plan.sizes.sequences, length or self._length
    )
    beyond = self._buffers(name, lower)
    return self._phase(name, beyond | self._visiting(name))

  def _visiting(self, name: str) -> Bytes:
    """Weights that are on the device for this phase only."""
    if name == "ref":
      return {"reference weights": abstract.host_bytes(self.reference.weights)}
    if name in self.judges:
      return {f"{name} weights": abstract.host_bytes(self.judges[name].weights)}
    return {}

  def _update(
    self,
    name: str,
    state: TrainState,
    columns: dict,
    style: StyleTeacher | None = None,
  ) -> Iterator[Phase]:
    role = name.removeprefix("update_")
    sizes, plan = self._plan.sizes, self._plan
    given = 0
    if role == "actor" and plan.config.actor.ptx_coef:
      given = round_up(plan.config.actor.ptx_batch_size, sizes.micro_sequences)
      columns = columns | {"ptx": np.float32}
    shape = (
      (sizes.mini_sequences + given) // sizes.micro_sequences,
      sizes.micro_sequences,
      bucket(self._length),
    )
    packs = plan.config.trainer.pack_sequences
    shares = self.actor.shares_rows if role == "actor" else packs
    shared = dict.fromkeys(shared_columns(shares), np.int32)
    columns = {"tokens": np.int32, "mask": bool} | shared | columns
    batch = abstract_batch(columns, shape, plan.train_layout)
    beside = ()
    if style is not None:
      longer = (*shape[:2], bucket(self._length + plan.style_tokens))
      batch |= style.abstract(shape, longer, plan.train_layout)
      beside = (style.given(),)
    grads, metrics = state.gradient_shapes(batch, *beside)
    size = {"gradients": abstract.device_bytes(grads)}
    part = f"{name}: gradients"
    lower = functools.partial(state.lower, batch, *beside)
    beyond = self._buffers(part, lower, size["gradients"])
    yield self._phase(part, size | beyond)
    chunks = {"optimizer chunks": state.store.visiting_bytes()}
    size |= {f"{role} weights": -abstract.device_bytes(state.store.renewed_weights)}
    part = f"{name}: optimizer"
    lower = functools.partial(state.store.lower_update, grads, metrics)
    yield self._phase(part, size | chunks | self._buffers(part, lower))

  def _buffers(
    self,
    phase: str,
    lower: Callable[[], jax.stages.Lowered],
    counted: int = 0,
    **sizes: int,
  ) -> Bytes:
    """What a program allocates; its arguments are resident, but for the batch.

    Args:
      phase: that it runs in.
      lower: makes the program.
      counted: what of it is a component of its own.
      **sizes: of a generation program.
    """
    if self._models:
      model = self._models.get(phase.split(":")[0], self._models[GEN])
      return {BUFFERS: model.buffers(phase, **sizes)}
    memory = topology.memory(_compile(phase, lower()))
    return {BUFFERS: memory["temp"] + memory["output"] - memory["alias"] - counted}

  def _lower_switch(self) -> jax.stages.Lowered:
    switch, layers = self.actor.generator.switch, self._plain["layers"]
    return switch.switch_slot.lower(layers, jnp.int32(0))

  def _slot_of_generation(self) -> Any:
    """What one call of the switch's program makes, a part of the copy."""
    switch, layers = self.actor.generator.switch, self._plain["layers"]
    return abstract.call(switch.switch_slot, layers, jnp.int32(0))

  def _generation_bytes(self) -> int:
    return abstract.device_bytes(self._generation)

  def _switch_bytes(self) -> int:
    return self._generation_bytes() - abstract.device_bytes(self._plain)

  def _merged_bytes(self) -> int:
    """Weights that exist for the switch only: kernels with their adapters."""
    weights = jax.tree.leaves(self.actor.state.weights, is_leaf=is_adapted)
    kernels = [x.value for x in weights if is_adapted(x)]
    return abstract.device_bytes(kernels)

  def _host_bytes(self) -> int:
    frozen = (self._frozen, *self.judges.values())
    trees = [role.weights for role in frozen if role]
    for role in self._trained().values():
      store = role.state.store
      trees += [store.params, store.opt_state, store.held_weights]
    return sum(abstract.host_bytes(tree) for tree in trees)

  def _needs_old_log_probs(self) -> bool:
    updates = self.actor.updates_per_batch(self._plan.sizes.sequences)
    return self._algorithm.recomputes_old_log_probs(updates)

  def _actor_columns(self) -> dict[str, Any]:
    known, correction = self._needs_old_log_probs(), self._algorithm.correction
    wanted = {
      "advantages": True,
      "old_log_probs": known or correction.bypass,
      "rollout_log_probs": not known,
      "ref_log_probs": self.reference is not None,
      "is_weights": correction.rollout_is != "off",
    }
    names = [name for name, is_there in wanted.items() if is_there]
    found: dict[str, Any] = dict.fromkeys(names, np.float32)
    if self._plan.config.actor.router_aux_loss_coef:
      found["real"] = np.bool_
    if POLICY_LOSSES[self._plan.config.actor.policy_loss].select:
      found["selected"] = np.bool_
    return found


def _estimates(plan: Plan) -> dict[str, plan_model.Model]:
  """By phase: those of critics and of reward and cost models, and ``GEN``, the rest."""
  models = {GEN: plan_model.Model(plan)}
  for side, critic, judge in ((plan, "critic", REWARD), (plan.cost, *COST)):
    if side:
      phases = (VALUES[critic], f"update_{critic}")
      models |= dict.fromkeys(phases, plan_model.Model(side.of_critic))
    if side and side.reward_model:
      models[judge] = plan_model.Model(plan.of_model(side.reward_model))
  return models


def _compile(phase: str, lowered: jax.stages.Lowered) -> jax.stages.Compiled:
  try:
    return lowered.compile()
  except jax.errors.JaxRuntimeError as error:
    raise topology.TopologyError(
      f"XLA cannot compile the program of phase {phase!r} for this GPU: "
      f"{str(error).splitlines()[0]}"
    ) from error
