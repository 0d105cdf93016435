"""``HFModelWrapper``: a Hugging Face model in one role of the controller."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from jaxrl_hybrid import build, inspection, role_params, styling
from jaxrl_hybrid import config as config_lib
from jaxrl_hybrid.algorithms.estimate import compute_advantages
from jaxrl_hybrid.algorithms.presets import Algorithm
from jaxrl_hybrid.api import arguments
from jaxrl_hybrid.api.dialogues import DialogueReader
from jaxrl_hybrid.api.learning import check_needs, with_advantages, with_rewards
from jaxrl_hybrid.api.sequences import PromptReader, Sequences, limited
from jaxrl_hybrid.errors import ConfigError, DataError, RewardError
from jaxrl_hybrid.models import params as params_lib
from jaxrl_hybrid.models.hf.classifier import CLASSIFIER, LM, as_classifier
from jaxrl_hybrid.models.hf.export import export_hf
from jaxrl_hybrid.models.params import Params
from jaxrl_hybrid.parallel import multihost
from jaxrl_hybrid.runtime import launch
from jaxrl_hybrid.types import Batch
from jaxrl_hybrid.workers.actor import Actor
from jaxrl_hybrid.workers.critic import Critic
from jaxrl_hybrid.workers.reward import decode_responses
from jaxrl_hybrid.workers.reward_model import RewardModel
from jaxrl_hybrid.workers.style import StyleTeacher
from jaxrl_hybrid.workers.style_loss import ActorOutputs

_ROLES = {
  Actor: f"an actor, of AutoModel{LM}",
  Critic: f"a critic, of AutoModel{CLASSIFIER}",
  RewardModel: f"a reward model, of AutoModel{CLASSIFIER}",
}


class HFModelWrapper:
  """A transformers model as actor, critic or reward model, on a mesh.

  A causal LM is an actor. A sequence classifier is a critic or a reward model,
  whichever is asked of it first; a critic may also start from a causal LM, with a
  fresh head. Optimizer and programs are made when they are first used. One step of
  PPO:

      sequences = actor.generate_sequences(prompts)
      rewards = reward_model.get_reward(sequences)
      advantages = critic.compute_advantages(sequences, rewards)
      actor.update_policy(sequences, advantages)
      critic.update(advantages)
  """

  def __init__(
    self,
    model: Any = None,
    *,
    model_class: Any = None,
    model_name_or_path: str | Path | None = None,
    parallel_config: Mapping[str, int] | None = None,
    dtype: Any = None,
    use_flash_attn: bool | None = None,
    num_labels: int = 1,
    tokenizer: Any = None,
    config: Mapping[str, Any] | None = None,
  ):
    """Loads the weights onto the mesh.

    Args:
      model: of transformers, in memory; it is saved into a temporary directory,
        loaded from there, and not changed.
      model_class: ``AutoModelForCausalLM`` or ``AutoModelForSequenceClassification``,
        the name or the class; None: as ``model`` or the directory says.
      model_name_or_path: HF directory, or a hub name that is in the local cache.
      parallel_config: sizes of the mesh axes, ``{"tp": 4, "dp": 2, "pp": 1}``.
      dtype: of products, torch's, JAX's or a name; None: as ``model.dtype`` of the
        config. Parameters that are trained are fp32.
      use_flash_attn: True: cuDNN's, with a warning where there is none; False: XLA's;
        None: the faster one.
      num_labels: of a classifier, 1.
      tokenizer: of transformers, or its directory; None: the model's own.
      config: keys of ``jaxrl_hybrid.config.base``, dotted or nested:
        ``{"actor.optim.lr": 1e-6, "rollout.n": 4}``.

    Raises:
      ConfigError: an argument is wrong, or the mesh does not fit the devices.
      ModelError: the model is not supported, or not there.
    """
    if num_labels != 1:
      raise ConfigError(f"num_labels: expected 1, a score or value, got {num_labels}")
    kind = arguments.kind_of(model, model_class)
    with arguments.directory_of(model, model_name_or_path) as path:
      tokenizer = arguments.find_tokenizer(tokenizer, path, model)
      kind, source = arguments.open_source(path, kind, tokenizer)
      asked = arguments.make_config(
        arguments.mesh_of(parallel_config),
        dtype=arguments.dtype_name(dtype),
        longest=source.spec.max_positions,
        overrides={} if config is None else config,
      )
      settings = config_lib.resolve(asked)
      arguments.check_lora(settings, kind, in_memory=model is not None)
      launch.setup(settings)
      arguments.check_devices(settings.mesh.train)
      asked.model.attention = arguments.attention_for(
        use_flash_attn, source.spec, asked.model.dtype
      )
      self._asked, settings = asked, config_lib.resolve(asked)
      arguments.warn_of_run_only(settings)
      generates = kind == LM
      self._plan = inspection.inspect_model(settings, source, generates=generates)
      head = params_lib.LM if generates else params_lib.VALUE
      self._params: Params | None = role_params.starting_params(self._plan, head)
    self._kind = kind
    self._source_dir = path if model is None else None
    self._encoder = None
    if tokenizer is not None:
      self._encoder = inspection.make_encoder(settings, tokenizer)
    self._reader = PromptReader(
      self._encoder,
      string_prompts=settings.data.string_prompts,
      max_length=settings.data.max_prompt_length,
      vocab_size=source.spec.vocab_size,
    )
    self._judge = DialogueReader(
      tokenizer, self._encoder, vocab_size=source.spec.vocab_size
    )
    self._role: Actor | Critic | RewardModel | None = None

  @property
  def config(self) -> ConfigDict:
    """All settings, resolved; ``configure`` changes them."""
    return self._plan.config.copy_and_resolve_references()

  @property
  def algorithm(self) -> Algorithm:
    """How this model's config estimates advantages."""
    return inspection.make_algorithm(self._plan.config)

  def configure(self, changes: Mapping[str, Any]) -> None:
    """Changes config keys of training: ``actor.*``, ``critic.*``, ``algorithm.*``.

    A model that has been used keeps its parameters, starts with new optimizer
    moments, and is compiled anew.

    Raises:
      ConfigError: an unknown key, a wrong value, or a key that is fixed by now.
    """
    config = arguments.changed_config(self._asked, changes)
    sizes = config_lib.validate(config, training=False)
    if config == self._plan.config:
      return
    self._plan = dataclasses.replace(self._plan, config=config, sizes=sizes)
    if isinstance(self._role, Actor | Critic):
      store, make, teacher = self._role.state.store, build.make_critic, None
      if isinstance(self._role, Actor):
        make, teacher = build.make_actor, self._role.teacher
      self._role = None  # its moments go before there are new ones
      params, frozen = store.whole_params(), getattr(store, "frozen", None)
      del store
      self._role = make(self._plan, params, frozen)
      self._teach(teacher)

  # An actor.

  def generate_sequences(
    self,
    prompts: Sequence[Any],
    *,
    greedy: bool = False,
    n: int | None = None,
    max_seq_len: int | None = None,
  ) -> Sequences:
    """Samples completions of each prompt, or one greedy one.

    Args:
      prompts: strings, lists of messages, or lists of token ids.
      greedy: temperature 0 and one completion.
      n: samples per prompt; None: ``rollout.n``.
      max_seq_len: most tokens of prompt and completion together; None: they have
        ``data.max_prompt_length`` and ``data.max_response_length``.

    Returns:
      A batch of all sequences, prompt by prompt; ``texts`` if there is a tokenizer.

    Raises:
      ConfigError: the model does not read so many tokens, or ``n`` < 1.
      DataError: a prompt is too long, or no prompt.
    """
    actor = self._as(Actor)
    most = self._plan.source.spec.rope.length or self._plan.longest_row
    settings = limited(actor.generator.settings, n, max_seq_len, most=most)
    read = self._reader.read(prompts, max_length=max_seq_len and max_seq_len - 1)
    batch = actor.generate_sequences(read, greedy=greedy, settings=settings)
    actor.release_generation_weights()
    fields = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch)}
    tokenizer = self._plan.source.tokenizer
    if tokenizer is not None:
      fields["texts"] = decode_responses(batch, tokenizer, skip_special_tokens=True)
    return Sequences(**fields, tokenizer=tokenizer)

  def compute_log_probs(self, batch: Batch) -> Batch:
    """Adds ``old_log_probs`` and how far the engine's are from them."""
    return self._as(Actor).compute_log_probs(batch)

  def compute_ref_log_probs(self, batch: Batch) -> Batch:
    """Adds ``ref_log_probs``: of this model as the reference of another one."""
    actor = self._as(Actor)
    return batch.with_fields(ref_log_probs=actor.log_probs(actor.state.weights, batch))

  def update_policy(
    self, batch: Batch, advantages: Batch | np.ndarray | None = None
  ) -> dict[str, float]:
    """Learns from a batch; returns ``actor/*`` metrics.

    Args:
      batch: of this actor's sequences.
      advantages: what ``compute_advantages`` of the critic returned, or an array
        ``[N]`` or ``[N, R]``; None: the batch has them.

    Raises:
      DataError: there are none, or of other sequences.
      ConfigError: ``actor.use_kl_loss`` without ``ref_log_probs``.
    """
    actor, batch = self._as(Actor), with_advantages(batch, advantages)
    if self._plan.config.actor.use_kl_loss and batch.ref_log_probs is None:
      raise ConfigError(
        "actor.use_kl_loss: expected a batch with ref_log_probs, got none; add them by "
        "compute_ref_log_probs of a wrapper of the reference model"
      )
    if batch.old_log_probs is None:
      batch = actor.compute_old_log_probs(batch, self.algorithm)
    return actor.update_policy(batch)

  def outputs(self, batch: Batch) -> ActorOutputs:
    """What ``StyleConstraint.compute`` takes: of the style that the actor is given.

    Raises:
      ConfigError: the actor has no style (``Trainer(style=...)``).
    """
    actor = self._as(Actor)
    if actor.teacher is None:
      raise ConfigError(
        "outputs: expected an actor with a style, by Trainer(actor, style=...) or "
        "actor.style of its config, got one without"
      )
    return actor.outputs(batch)

  # A critic.

  def compute_values(self, batch: Batch) -> Batch:
    """Adds ``values``: index t is the value before response token t."""
    return self._as(Critic).compute_values(batch)

  def compute_advantages(self, batch: Batch, rewards: Any) -> Batch:
    """Adds rewards, ``advantages`` and ``returns``, and a critic's values.

    An actor whose ``algorithm.name`` does without a critic can be asked too.

    Args:
      batch: N sequences.
      rewards: ``[N]``, for the last token of each sequence, or ``[N, R]``, per token.

    Raises:
      DataError: rewards of another shape, or not finite; or the algorithm needs
        greedy baselines, which ``DataCollector`` adds, or the scores of each reward
        function, and there are none.
    """
    batch = with_rewards(batch, rewards)
    if self.algorithm.needs_old_log_probs:
      batch = self._as(Actor).compute_old_log_probs(batch, self.algorithm)
    if self.algorithm.needs_collision:
      batch = self._as(Actor).compute_collision(batch)
    if self.algorithm.needs_critic:
      batch = self.compute_values(batch)
    return self.estimate_advantages(batch)

  def estimate_advantages(self, batch: Batch, *, critic_share: float = 1.0) -> Batch:
    """``compute_advantages`` of a batch with rewards and, with a critic, values.

    Args:
      batch: N sequences.
      critic_share: of the critic in the advantages (``warmup.take_over``).
    """
    algorithm = self.algorithm
    check_needs(batch, algorithm, self._plan.config.algorithm.name)
    controller = build.make_kl_controller(self._plan.config)
    return compute_advantages(batch, algorithm, controller, critic_share=critic_share)

  def update(self, batch: Batch) -> dict[str, float]:
    """Learns the returns of ``compute_advantages``; returns ``critic/*`` metrics."""
    critic = self._as(Critic)
    if batch.returns is None or batch.values is None:
      raise DataError(
        "expected a batch with values and returns, as compute_advantages returns it"
      )
    return critic.update(batch)

  # A reward model.

  def get_reward(self, sequences: Batch | Sequence[Any]) -> np.ndarray:
    """fp32 ``[N]``: the score of each sequence.

    Args:
      sequences: of an actor. If its tokenizer gives other ids than this model's, the
        texts are read by this model's chat template; the ids of a plain ``Batch``
        are taken as they are. Or N dialogues: texts, (prompt, answer) pairs, message
        lists that end with the assistant's, or token ids.

    Raises:
      RewardError: a dialogue is too long, or the model has no score head.
      DataError: no list of dialogues.
    """
    model, most = self._as(RewardModel), self._plan.reward_model_length
    dialogues = self._judge.read(sequences)
    longest = max(map(len, dialogues), default=0)
    if not 0 < min(map(len, dialogues), default=0) <= longest <= most:
      raise RewardError(
        f"expected dialogues of 1 to {most} tokens (reward_model.max_length), got "
        f"{len(dialogues)} of up to {longest}"
      )
    return model.score_ids(dialogues)

  def save_pretrained(self, directory: str | Path) -> Path:
    """Writes an HF directory: of a critic, a sequence classifier's.

    Raises:
      ConfigError: a reward model; it is as it came.
    """
    if isinstance(self._role, RewardModel):
      raise ConfigError("save_pretrained: a reward model is frozen, copy its directory")
    source = self._plan.source
    hf_config, head, params = source.hf_config, params_lib.LM, self._params
    if self._kind == CLASSIFIER:
      head = params_lib.VALUE
      hf_config = as_classifier(hf_config, pad_token_id=source.pad_token_id)
    if self._role is not None:
      trained = self._role.state.store.whole_params()
      params = role_params.full_params(self._plan, trained, head)
    return export_hf(
      params,
      source.spec,
      directory,
      hf_config=hf_config,
      tokenizer=source.tokenizer,
      source_dir=self._source_dir,
    )

  def _as(self, role: type) -> Any:
    """The worker of this role; a classifier takes the role that is asked first."""
    if self._role is None and role is Actor and self._kind == LM:
      self._role = build.actor_from(self._plan, self._take_params())
      self._teach(None)
    elif self._role is None and role is not Actor and self._kind == LM:
      raise ConfigError(f"expected {_ROLES[role]}; this wrapper is {_ROLES[Actor]}")
    elif self._role is None and role is Critic:
      self._role = build.critic_from(self._plan, self._take_params())
    elif self._role is None and role is RewardModel:
      self._role = self._make_reward_model()
    if not isinstance(self._role, role):
      what = _ROLES.get(type(self._role), "a sequence classifier")
      raise ConfigError(f"expected {_ROLES[role]}; this wrapper is {what}")
    return self._role

  def _teach(self, teacher: StyleTeacher | None) -> None:
    """Has an actor compare with itself as it is now, unless its style is known."""
    if isinstance(self._role, Actor):
      asked = styling.constraint_of(self._plan.config)
      if asked is None or teacher is None or teacher.constraint != asked:
        teacher = build.make_teacher(self._plan, self._role)
      self._role.teacher = teacher

  def _make_reward_model(self) -> RewardModel:
    params, head = self._params, self._params["value_head"]["kernel"]
    if not multihost.gather(head).any():
      raise RewardError(
        "get_reward: the model has no score head, so it can only be a critic; expected "
        "a sequence classifier that was trained as a reward model"
      )
    layout = role_params.weight_layout(self._plan, params_lib.VALUE)
    weights = jax.jit(layout.prepare)(params)
    self._take_params()
    self._plan = dataclasses.replace(self._plan, reward_model=self._plan.source)
    return build.make_reward_model(self._plan, weights)

  def _take_params(self) -> Params:
    """The loaded parameters; the role that takes them is their only owner."""
    params, self._params = self._params, None
    return params
