"""Which projections have adapters, and the tree that holds these."""

import dataclasses
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[1] / "parity"))

from oracle import FAMILIES, SIZES

from jaxrl_hybrid.errors import ConfigError
from jaxrl_hybrid.models import adapters, families
from jaxrl_hybrid.models import params as params_lib
from jaxrl_hybrid.models.adapters import LoraSpec


def spec_of(family):
  transformers = pytest.importorskip("transformers")
  fields = SIZES | FAMILIES[family]
  config = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
  return families.spec_from_hf(config.to_dict())


def random_like(shapes):
  rng = np.random.default_rng(0)
  return jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), shapes)


def random_params(spec):
  return random_like(params_lib.abstract_params(spec, vocab=spec.vocab_size))


def paths(spec, *targets, dense=False):
  found = adapters.targets(spec, LoraSpec(2, targets=targets), dense=dense)
  return {"/".join(target.path) for target in found}


def test_targets_are_chosen_by_hf_name():
  spec = spec_of("llama")
  assert paths(spec, "q_proj", "v_proj") == {"attn/q", "attn/v"}
  assert paths(spec, "self_attn.o_proj", "down_proj") == {"attn/o", "mlp/down"}
  everything = {f"attn/{x}" for x in "qkvo"} | {"mlp/gate", "mlp/up", "mlp/down"}
  assert paths(spec, "all-linear") == everything


def test_all_linear_leaves_out_experts_and_routers():
  spec = spec_of("deepseek_v2")
  found = paths(spec, "all-linear")
  assert {"mlp/shared/gate", "attn/kv_down", "attn/q_down", "attn/q"} <= found
  assert not [path for path in found if "experts" in path or "router" in path]
  assert "mlp/gate" in paths(spec, "all-linear", dense=True)


@pytest.mark.parametrize(
  "family, target, said",
  [
    ("llama", "query", "'q_proj'"),
    ("mixtral", "w1", "routed experts"),
    ("qwen3_moe", "gate_proj", "routed experts"),
    ("llama", "roj", "'roj'"),
  ],
)
def test_a_target_that_is_none_is_named(family, target, said):
  with pytest.raises(ConfigError, match=said):
    paths(spec_of(family), target)


@pytest.mark.parametrize("family", ["qwen3", "deepseek_v2"])
def test_fresh_adapters_change_nothing_and_others_what_the_formula_says(family):
  spec = spec_of(family)
  lora = LoraSpec(4, alpha=6.0)
  params = random_params(spec)
  merge = jax.jit(lambda pairs: adapters.merged(params, pairs, lora))
  pairs = jax.jit(lambda key: adapters.init_adapters(spec, lora, key))(
    jax.random.key(1)
  )
  jax.tree.map(np.testing.assert_array_equal, merge(pairs), params)
  q = pairs["layers"]["attn"]["q"]
  width = q[adapters.A].shape[1]
  assert 0.8 < np.abs(q[adapters.A]).max() * width**0.5 <= 1.0
  pairs = random_like(pairs)
  merged = merge(pairs)
  for tree, row in (("q", False), ("o", True)):
    pair = pairs["layers"]["attn"][tree]
    delta = 1.5 * np.einsum("lor,lir->loi", pair[adapters.B], pair[adapters.A])
    delta = delta.swapaxes(1, 2) if row else delta
    got = (x["layers"]["attn"][tree]["kernel"] for x in (merged, params))
    np.testing.assert_allclose(np.subtract(*got), delta, rtol=1e-4, atol=1e-4)


def test_the_scale_is_alpha_over_the_rank_or_its_root():
  assert LoraSpec(16, alpha=32.0).scale == 2.0
  assert LoraSpec(16, alpha=32.0, rslora=True).scale == 8.0


def test_attached_pairs_can_be_picked_again_and_seeds_differ():
  spec = spec_of("deepseek_v2")
  lora = LoraSpec(2, dropout=0.1)
  pairs = random_like(adapters.abstract_adapters(spec, lora))
  params = random_params(spec)
  attached = adapters.attach(params, pairs, lora, seed=np.uint32(5))
  picked = adapters.pick(attached, pairs)
  assert jax.tree.all(jax.tree.map(lambda a, b: a is b, picked, pairs))
  kernels = jax.tree.leaves(attached, is_leaf=adapters.is_adapted)
  kernels = [x for x in kernels if adapters.is_adapted(x)]
  assert len(kernels) == len(jax.tree.leaves(pairs)) // 2
  seeds = np.concatenate([np.ravel(x.seed) for x in kernels])
  assert len(set(seeds.tolist())) == len(seeds)
  again = adapters.attach(attached, pairs, dataclasses.replace(lora, alpha=1.0))
  assert adapters.is_adapted(again["layers"]["attn"]["o"]["kernel"])
  assert not adapters.is_adapted(again["layers"]["attn"]["o"]["kernel"].value)
