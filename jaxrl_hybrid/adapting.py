"""Adapters of a run: what they are, what they start from and what becomes of them."""

from __future__ import annotations

import jax
from ml_collections import ConfigDict

from jaxrl_hybrid import config as config_lib
from jaxrl_hybrid import config_checks as checks
from jaxrl_hybrid.errors import ConfigError
from jaxrl_hybrid.models import adapters as adapters_lib
from jaxrl_hybrid.models import params as params_lib
from jaxrl_hybrid.models.adapters import HEAD, LoraSpec
from jaxrl_hybrid.models.hf import peft
from jaxrl_hybrid.models.params import Params
from jaxrl_hybrid.models.spec import ModelSpec
from jaxrl_hybrid.parallel.adapters import AdapterLayout
from jaxrl_hybrid.workers.stores import shardings_of

SECTIONS = {params_lib.LM: "model.lora", params_lib.VALUE: "critic.lora"}


def lora_spec(config: ConfigDict, head: str, spec: ModelSpec) -> LoraSpec | None:
  """The adapters of actor (``params.LM``) or critic; None: it is trained whole.

  Raises:
    ConfigError: a target that the model does not have, or a knob that a directory
      of adapters contradicts.
    ModelError: ``path`` is no such directory, or does not fit the model.
  """
  key = SECTIONS[head]
  section = checks.get(config, key)
  if not checks.has_lora(section):
    _check_unused(key, section)
    return None
  if section.path:
    lora = peft.read_spec(section.path)
    _check_agrees(key, section, lora)
  else:
    lora = LoraSpec(
      section.rank, section.alpha, targets=section.targets, rslora=section.rslora
    )
  adapters_lib.targets(spec, lora)  # named before anything loads
  if section.path:
    peft.check_fits(section.path, spec, lora, head=head == params_lib.VALUE)
  return LoraSpec(
    lora.rank, lora.alpha, section.dropout, tuple(lora.targets), lora.rslora
  )


def _check_unused(key: str, section: ConfigDict) -> None:
  default = checks.get(config_lib.base(), key)
  for name, value in section.items():
    if value != default[name]:
      raise ConfigError(
        f"{key}.{name}={value!r}: expected {key}.rank > 0 with it, or {key}.path; "
        "without there are no adapters and the whole model is trained"
      )


def _check_agrees(key: str, section: ConfigDict, lora: LoraSpec) -> None:
  default = checks.get(config_lib.base(), key)
  for name in ("rank", "alpha", "targets", "rslora"):
    value, found = section[name], getattr(lora, name)
    same = set(value) == set(found) if name == "targets" else value == found
    if value != default[name] and not same:
      raise ConfigError(
        f"{key}.{name}: {section.path} has {found!r}, got {value!r}; expected the same "
        "or nothing: a directory brings its own"
      )


def describe(role: str, lora: LoraSpec | None, spec: ModelSpec) -> list[str]:
  """One line for the user, if there are adapters."""
  if lora is None:
    return []
  shapes = jax.tree.leaves(adapters_lib.abstract_adapters(spec, lora))
  trained, whole = sum(x.size for x in shapes), params_lib.num_params(spec)
  return [
    f"LoRA of the {role}: rank {lora.rank}, scale {lora.scale:g}, on "
    f"{', '.join(lora.targets)}: {trained:,} parameters are trained "
    f"({trained / whole:.2%} of the model)"
  ]


def fresh(
  layout: AdapterLayout, *, seed: int, path: str = "", head: Params | None = None
) -> Params:
  """What a role starts to train, as stored.

  Args:
    layout: of its adapters.
    seed: of new ones.
    path: PEFT directory to take them from instead, a value head included if there
      is one.
    head: of a critic, the value head of the base; None: a new one.
  """
  shardings = shardings_of(layout.abstract_params())

  def init() -> Params:
    key = jax.random.key(seed)
    params = adapters_lib.init_adapters(layout.spec, layout.lora, key)
    if HEAD in shardings:
      params[HEAD] = params_lib.init_value_head(layout.spec)
    return params

  params = jax.jit(init, out_shardings=shardings)()
  if head is not None:
    params[HEAD] = head
  if path:
    params |= peft.load_adapters(path, layout.spec, layout.lora, shardings)
  return params


def freeze(layout: AdapterLayout, params: Params) -> Params:
  """Stored parameters, fp32 or rounded -> the frozen weights."""
  program = jax.jit(
    lambda params: layout.frozen_part(layout.base.prepare(params)),
    out_shardings=shardings_of(layout.abstract_frozen()),
  )
  return program(params)


def merge(layout: AdapterLayout, params: Params, adapters: Params) -> Params:
  """Stored fp32 parameters with stored adapters merged in; the former are given up."""
  program = jax.jit(
    lambda params, adapters: adapters_lib.merged(params, adapters, layout.lora),
    out_shardings=shardings_of(params),
    donate_argnums=0,
  )
  return program(params, adapters)
