"""Loss, gradients and updates on a mesh equal those of one device.

By default a few meshes; ``pytest -m slow tests/parallel/test_mesh_parity.py`` goes
through all (pp, tp, dp) with a product of at most 16, which takes half an hour.
"""

import functools
import itertools
from dataclasses import dataclass

import hlo
import jax
import mesh_parity
import numpy as np
import pytest

STEPS = 3
# Largest difference of a gradient's entry, relative to its leaf's largest entry.
# Measured: 1.5e-6, 1.2e-2 and 2.1e-2; the order of sums changes what is rounded.
TOLERANCE = {"float32": 1e-5, "bfloat16": 3e-2, "float16": 3e-2}
# Adam divides each entry's gradient by its size, so entries near 0 may go either
# way; those above 1e-4 of the leaf's largest move alike. Measured: 9e-7.
UPDATE_TOLERANCE = 3e-3 * mesh_parity.LR


@dataclass(frozen=True)
class Case:
  """A model on a mesh (pp, tp, dp) and how the work is split there."""

  spec: str
  mesh: tuple[int, int, int] = (1, 1, 1)
  accumulate: int = 1
  microbatches: int = 1
  zero: int = 1
  sequence_parallel: bool = False
  remat: str = "full"
  dtype: str = "float32"

  def __str__(self) -> str:
    pp, tp, dp = self.mesh
    parts = [self.spec, f"pp{pp}-tp{tp}-dp{dp}", f"zero{self.zero}", self.remat]
    parts += [f"A{self.accumulate}"] * (self.accumulate > 1)
    parts += [f"M{self.microbatches}"] * (self.microbatches > 1)
    parts += ["sp"] * self.sequence_parallel
    parts += [self.dtype] * (self.dtype != "float32")
    return "-".join(parts)

  def state(self):
    return mesh_parity.make_state(
      mesh_parity.SPECS[self.spec],
      self.mesh,
      dtype=self.dtype,
      zero=self.zero,
      sequence_parallel=self.sequence_parallel,
      microbatches=self.microbatches,
      remat=self.remat,
    )

  @property
  def split(self):
    """Arguments that say how the rows are split."""
    multiple = self.mesh[2] * self.microbatches
    return dict(accumulate=self.accumulate, multiple=multiple)


@functools.cache
def on_one_device(spec, dtype):
  """(loss, gradients, parameters after the steps)."""
  state = Case(spec, dtype=dtype).state()
  loss, grads = mesh_parity.gradients(state)
  return loss, grads, mesh_parity.after_steps(state, STEPS)


def assert_same_gradients(case, state):
  loss, grads, _ = on_one_device(case.spec, case.dtype)
  got_loss, got = mesh_parity.gradients(state, **case.split)
  assert got_loss == pytest.approx(loss, abs=1e-5)
  assert min(np.abs(g).max() for g in jax.tree.leaves(grads)) > 0
  assert mesh_parity.worst(got, grads) <= TOLERANCE[case.dtype]


def assert_same_updates(case, state):
  _, grads, params = on_one_device(case.spec, case.dtype)
  got = mesh_parity.after_steps(state, STEPS, **case.split)

  def check(path, a, b, grad):
    sure = np.abs(grad) > 1e-4 * np.abs(grad).max()
    error = np.abs(a - b)[sure].max()
    assert error <= UPDATE_TOLERANCE, (jax.tree_util.keystr(path), error)

  jax.tree_util.tree_map_with_path(check, got, params, grads)
  start = mesh_parity.in_vocabulary(mesh_parity.host_params(SPECS[case.spec]))
  moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), got, start)
  assert min(jax.tree.leaves(moved)) > mesh_parity.LR


SPECS = mesh_parity.SPECS
FEW = [
  Case("odd", (4, 1, 2), microbatches=8, zero=3, remat="stage"),
  Case("odd", (3, 4, 1), microbatches=2, sequence_parallel=True, remat="stage"),
  Case("even", (2, 2, 4), 2, microbatches=2, zero=3, sequence_parallel=True),
  Case("even", (1, 1, 16), zero=3, remat="none"),
  Case("grouped", (1, 8, 2)),
  Case("grouped", (2, 4, 2), microbatches=4, zero=3, remat="none"),
]
UPDATES = [
  Case("odd", (2, 2, 2), microbatches=2),
  Case("even", (1, 4, 2), accumulate=2, sequence_parallel=True),
]
HALF = Case("grouped", (2, 2, 2), 2, 2, sequence_parallel=True, dtype="bfloat16")
MORE_HALF = [
  Case("odd", (2, 4, 2), microbatches=4, zero=3, dtype="bfloat16"),
  Case("odd", (1, 4, 2), sequence_parallel=True, dtype="float16"),
  Case("even", (4, 1, 2), microbatches=8, zero=3, dtype="float16"),
  Case("grouped", (1, 8, 2), accumulate=2, dtype="float16"),
]


def every_mesh():
  """All meshes of up to 16 devices; every other option takes turns."""
  sizes = itertools.product(range(1, 17), repeat=3)
  meshes = [mesh for mesh in sizes if np.prod(mesh) <= 16]
  for i, mesh in enumerate(meshes):
    pp = mesh[0]
    yield Case(
      list(SPECS)[i % 3],
      mesh,
      accumulate=(1, 2, 4, 1)[i // 2 % 4],
      microbatches=1 if pp == 1 else (pp, 2 * pp, 1, 3)[i % 4],
      zero=(1, 3)[i % 2],
      sequence_parallel=bool(i // 3 % 2),
      remat=("full", "stage", "none")[i // 2 % 3],
    )


@pytest.mark.parametrize("case", FEW, ids=str)
def test_gradients_equal_those_of_one_device(case):
  assert_same_gradients(case, case.state())


@pytest.mark.parametrize("case", UPDATES, ids=str)
def test_gradients_and_updates_equal_those_of_one_device(case):
  state = case.state()
  assert_same_gradients(case, state)
  assert_same_updates(case, state)


@pytest.mark.parametrize(
  "case",
  [HALF, *(pytest.param(case, marks=pytest.mark.slow) for case in MORE_HALF)],
  ids=str,
)
def test_16_bit_gradients_differ_by_their_rounding(case):
  assert_same_gradients(case, case.state())


@pytest.mark.slow
@pytest.mark.parametrize("case", every_mesh(), ids=str)
def test_every_mesh_gives_the_same_gradients_and_updates(case):
  state = case.state()
  assert_same_gradients(case, state)
  assert_same_updates(case, state)


def test_the_test_would_see_a_wrong_gradient():
  _, grads, _ = on_one_device("even", "float32")
  wrong = jax.tree.map(np.copy, grads)
  wrong["layers"]["attn"]["q"]["kernel"][1, 2, 3] *= 1.1
  wrong["layers"]["attn"]["q"]["kernel"][1, 4:8] *= 1.01
  assert mesh_parity.worst(wrong, grads) > 1e-5


@pytest.mark.parametrize(
  "case",
  [
    Case("even", (2, 2, 2), accumulate=4, microbatches=2),
    Case("even", (4, 1, 2), 4, microbatches=2, zero=3, dtype="bfloat16"),
  ],
  ids=str,
)
def test_stages_pass_activations_to_their_neighbour_and_keep_their_layers(case):
  state, (pp, tp, _) = case.state(), case.mesh
  compiled = mesh_parity.compiled_gradients(state, **case.split)
  devices = state._layout.train.mesh.devices
  stage = {d.id: i for i, row in enumerate(devices) for d in row.flat}
  weights = jax.tree.leaves(state._layout.abstract_weights()["layers"])
  stack = min(x.size * x.dtype.itemsize // tp for x in weights if x.ndim == 3)
  passed = 0
  for found in hlo.collectives(compiled.as_text(), hlo.device_ids(compiled)):
    pairs = [pair for group in found.groups for pair in itertools.pairwise(group)]
    steps = {(stage[b] - stage[a]) % pp for a, b in pairs}
    if found.kind == "collective-permute":
      assert steps <= {0, 1, pp - 1}, found
      passed += bool(steps - {0})
    elif steps - {0}:  # sums over the vocabulary and of what only one stage knows
      assert found.kind == "all-reduce" and found.bytes_out < stack, found
  assert passed >= 2  # there, and in the backward pass back
