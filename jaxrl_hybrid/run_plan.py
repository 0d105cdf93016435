"""What is known of a run before weights load."""

from __future__ import annotations

import dataclasses
import math

from jax.sharding import Mesh
from ml_collections import ConfigDict

from jaxrl_hybrid import adapting, model_source
from jaxrl_hybrid import config as config_lib
from jaxrl_hybrid.data import prompts as prompts_lib
from jaxrl_hybrid.data.dynamic_stream import DynamicStream
from jaxrl_hybrid.data.ptx import AnsweredStream
from jaxrl_hybrid.data.stream import PromptStream
from jaxrl_hybrid.models import params as params_lib
from jaxrl_hybrid.models.adapters import LoraSpec
from jaxrl_hybrid.models.params import num_params
from jaxrl_hybrid.models.spec import ModelSpec
from jaxrl_hybrid.parallel import mesh as mesh_lib
from jaxrl_hybrid.parallel import weights
from jaxrl_hybrid.parallel.rules import Layout
from jaxrl_hybrid.types import Prompt
from jaxrl_hybrid.workers.reward import RewardWorker


@dataclasses.dataclass(frozen=True)
class Plan:
  """What is known before weights load.

  Attributes:
    source: the model that this is the plan of: the actor's.
    critic: what the critic starts from.
    reward_model: None: there is none. It reads the actor's token ids if it has the
      actor's tokenizer object.
    reward: None in the plan of a model by itself.
    ptx: of answers that the actor learns as they are; None: there are none.
    cost: the same plan with the cost's config, critic, model and functions in the
      place of the reward's; None: the algorithm has no cost.
    style_tokens: that ``actor.style`` adds to a prompt.
  """

  config: ConfigDict
  sizes: config_lib.Sizes
  source: model_source.ModelSource
  critic: model_source.ModelSource
  reward_model: model_source.ModelSource | None
  eos_ids: tuple[int, ...]
  train_data: prompts_lib.PromptDataset | None  # None: for evaluation only
  stream: PromptStream | DynamicStream | None  # of train_data
  eval_prompts: list[Prompt]
  eval_total: int  # rows of which eval_prompts are a part
  reward: RewardWorker | None
  train_layout: Layout
  generation_layout: Layout
  lora: LoraSpec | None = None  # of the actor
  critic_lora: LoraSpec | None = None
  ptx: AnsweredStream | None = None
  cost: Plan | None = None
  style_tokens: int = 0

  def of_model(self, source: model_source.ModelSource) -> Plan:
    """The same plan with another model in the actor's place."""
    if source is self.source:
      return self
    layouts = layouts_of(self.config, source.spec, self.train_layout.mesh)
    return dataclasses.replace(
      self, source=source, train_layout=layouts[0], generation_layout=layouts[1]
    )

  @property
  def of_critic(self) -> Plan:
    """The plan of the critic's model."""
    return self.of_model(self.critic)

  @property
  def of_reward_model(self) -> Plan:
    """The plan of the reward model, which has no adapters."""
    own = self.of_model(self.reward_model)
    return dataclasses.replace(own, lora=None, critic_lora=None)

  @property
  def longest_row(self) -> float:
    """Most tokens that the model of ``source`` reads."""
    return most_positions(self.source.spec)

  @property
  def reward_model_length(self) -> int:
    """Most tokens that the reward model reads."""
    spec = self.reward_model.spec
    most = spec.rope.length or spec.max_positions
    return min(self.config.reward_model.max_length or most, most)

  @property
  def re_encodes(self) -> bool:
    """Whether the reward model gets texts in its own tokens, not the actor's ids."""
    return self.reward_model.tokenizer is not self.source.tokenizer

  def describe(self) -> str:
    """What the user should see before anything expensive starts."""
    spec = self.source.spec
    lines = [
      mesh_lib.describe(self.train_layout.mesh, self.generation_layout.mesh),
      f"model: {spec.family}, {num_params(spec):,} parameters, "
      f"{self.config.model.dtype}, from {self.source.describe()}",
      self.sizes.describe(self.config.trainer.total_steps),
      f"eos ids: {list(self.eos_ids)} (union of tokenizer, config and "
      "generation_config)",
      *self.source.describe_rope(),
      *adapting.describe("actor", self.lora, spec),
      *self._describe_critic(),
      *adapting.describe("critic", self.critic_lora, self.critic.spec),
      *self.source.ignored_sampling(),
      *self._describe_reward_model(),
      *self._describe_cost(),
      *([self.train_data.describe()] if self.train_data else []),
      f"evaluation: {len(self.eval_prompts)} of {self.eval_total} prompts, greedy",
    ]
    return "\n".join(lines)

  def _describe_critic(self) -> list[str]:
    if self.critic is self.source:
      return []
    size = num_params(self.critic.spec, head=params_lib.VALUE)
    return [
      f"critic: {self.critic.spec.family}, {size:,} parameters, from "
      f"{self.critic.describe()}"
    ]

  def _describe_cost(self) -> list[str]:
    if self.cost is None:
      return []
    section = self.config.cost
    terms = [*section.functions, *(["a cost model"] if self.cost.reward_model else [])]
    lines = [f"cost: {', '.join(terms)}; at most {section.limit:g} on average"]
    own = [*self.cost._describe_critic(), *self.cost._describe_reward_model()]
    return lines + [f"cost: {line}" for line in own]

  def _describe_reward_model(self) -> list[str]:
    if self.reward_model is None:
      return []
    spec, section = self.reward_model.spec, self.config.reward_model
    reads = (
      "another tokenizer than the actor's, so it reads texts by its own chat template"
      if self.re_encodes
      else "the actor's tokenizer, so it reads the actor's token ids"
    )
    size = num_params(spec, head=params_lib.VALUE)
    return [
      f"reward model: {spec.family}, {size:,} parameters, from "
      f"{self.reward_model.describe()}, weight {section.weight:g}, at most "
      f"{self.reward_model_length} tokens; {reads}"
    ]


def most_positions(spec: ModelSpec) -> float:
  """The longest sequence that a model reads, in tokens."""
  return math.inf if spec.rope.kind == "dynamic" else spec.max_positions


def layouts_of(
  config: ConfigDict, spec: ModelSpec, train_mesh: Mesh
) -> tuple[Layout, Layout]:
  """Of a model's training and of its generation programs."""
  generation_mesh = mesh_lib.generation_mesh(train_mesh, config.mesh.generation)
  return (
    weights.train_layout(
      spec, train_mesh, sequence_parallel=config.mesh.sequence_parallel
    ),
    weights.generation_layout(spec, generation_mesh),
  )
