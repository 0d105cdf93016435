"""Checksums of stacks of layers: what changes them and what does not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl_hybrid.parallel import digest

of_stack = jax.jit(digest.of_stack)
DTYPES = ("bfloat16", "float16", "float32")


def stack(dtype="float32", seed=0):
  """Two layers of two matrices and a vector; half of all bits are random."""
  rng = np.random.default_rng(seed)
  draw = lambda *shape: np.array(jnp.asarray(rng.normal(size=shape), dtype))
  return {"a": draw(2, 6, 64), "b": {"kernel": draw(2, 6, 64), "scale": draw(2, 6)}}


def scrambled(x):
  """The finalizer of MurmurHash3 on Python numbers."""
  x = (x ^ x >> 16) * 0x85EBCA6B % 2**32
  x = (x ^ x >> 13) * 0xC2B2AE35 % 2**32
  return x ^ x >> 16


def by_hand(layer_leaves):
  """The checksum of one layer, element by element, from unsigned numbers."""
  total = 0
  for salt, leaf in enumerate(layer_leaves):
    for place, bits in enumerate(leaf.reshape(-1).tolist()):
      factor = (scrambled(place) ^ scrambled(salt + 1)) | 1
      total += scrambled(bits) * factor
  return total % 2**32


def test_the_scrambling_is_that_of_the_published_hash():
  # MurmurHash3_x86_32 of an empty key is this step of its seed alone.
  assert scrambled(0) == 0
  assert scrambled(1) == 0x514E28B7


@pytest.mark.parametrize(
  "dtype,bits", [("float32", np.uint32), ("bfloat16", np.uint16)]
)
def test_the_value_by_hand(dtype, bits):
  tree = stack(dtype)
  leaves = [x.view(bits) for x in jax.tree.leaves(tree)]
  expected = [by_hand([leaf[layer] for leaf in leaves]) for layer in range(2)]
  assert of_stack(tree).tolist() == expected and of_stack(tree).dtype == jnp.uint32


def test_one_number_by_hand():
  one = np.array([[1.0]], np.float32)  # bits 0x3F800000, place 0, leaf 0
  factor = 0x514E28B7 | 1
  assert of_stack({"x": one}).tolist() == [scrambled(0x3F800000) * factor % 2**32]


def changed_layers(before, after):
  return np.flatnonzero(np.asarray(of_stack(before) != of_stack(after))).tolist()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layer", [0, 1])
def test_every_flipped_bit_of_an_element_changes_its_layer_alone(dtype, layer):
  bits = np.uint32 if dtype == "float32" else np.uint16
  for bit in range(np.dtype(bits).itemsize * 8):
    tree = stack(dtype)
    tree["b"]["kernel"].view(bits)[layer, 3, 17] ^= bits(1 << bit)
    assert changed_layers(stack(dtype), tree) == [layer], bit


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("axis,a,b", [(1, 0, 1), (1, 0, 4), (2, 3, 4), (2, 0, 32)])
def test_swapped_rows_or_columns_change_it(dtype, axis, a, b):
  tree = stack(dtype)
  moved = np.moveaxis(tree["a"], axis, 0)
  moved[[a, b]] = moved[[b, a]]
  assert changed_layers(stack(dtype), tree) == [0, 1]


def test_swapped_leaves_of_one_shape_change_it():
  tree = stack()
  swapped = {"a": tree["b"]["kernel"], "b": {**tree["b"], "kernel": tree["a"]}}
  assert changed_layers(tree, swapped) == [0, 1]


def test_swapped_layers_swap_it():
  tree = stack()
  swapped = jax.tree.map(lambda x: x[::-1], tree)
  assert of_stack(swapped).tolist() == of_stack(tree).tolist()[::-1]
  assert len(set(of_stack(tree).tolist())) == 2


def test_two_changed_signs_do_not_cancel():
  tree = stack()
  tree["a"][0, 2, 5] *= -1
  tree["a"][0, 4, 9] *= -1
  assert changed_layers(stack(), tree) == [0]


@pytest.mark.parametrize("rows", [1, 64, 128])
def test_numbers_with_zero_low_bits_count_in_full(rows):
  """bfloat16 numbers in float32, blocks swapped over a power of two."""
  rng = np.random.default_rng(0)
  coarse = np.array(jnp.asarray(rng.normal(size=(1, 256, 256)), "bfloat16"))
  before = {"a": coarse.astype(np.float32)}
  after = {"a": np.roll(before["a"], rows, axis=1)}
  assert changed_layers(before, after) == [0]


def test_zeros_do_not_count_wherever_they_are():
  tree = stack()
  rows = jax.tree.map(lambda x: np.arange(6), tree)
  longer = jax.tree.map(lambda x: np.insert(x, [2, 6], 0, axis=1), tree)
  moved = jax.tree.map(lambda x: np.array([0, 1, 0, 2, 3, 4, 5, 0]), tree)
  assert of_stack(tree).tolist() == of_stack(tree, rows).tolist()
  assert of_stack(longer, moved).tolist() == of_stack(tree).tolist()
  assert changed_layers(tree, longer) == [0, 1]  # without saying which row is which


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("spec", [P("l"), P(None, "x"), P("l", None, "y"), P("l", "x")])
def test_it_does_not_depend_on_the_sharding(spec, dtype):
  mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 2, 2), ("l", "x", "y"))
  tree = {"a": stack(dtype)["a"], "b": stack(dtype)["b"]["kernel"]}
  spread = jax.device_put(tree, NamedSharding(mesh, spec))
  assert of_stack(spread).tolist() == of_stack(tree).tolist()
