"""Continuous batching: refills, shared prompts, limits and stops change no row."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from test_engine import SPEC, as_is, naive, setup

from jaxrl_hybrid.errors import ConfigError
from jaxrl_hybrid.models import decoder
from jaxrl_hybrid.rollout import capacity, engine
from jaxrl_hybrid.rollout.engine import Engine
from jaxrl_hybrid.rollout.sampling import Sampling
from jaxrl_hybrid.rollout.stop import StopStrings
from jaxrl_hybrid.types import LENGTH, STOP, STOP_STRING

EOS = (2, 5, 9)


def many(count, seed=0, longest=14):
  """Prompts of mixed lengths, with their draw ids."""
  rng = np.random.default_rng(seed)
  prompts = [
    rng.integers(1, 37, rng.integers(1, longest)).astype(np.int32) for _ in range(count)
  ]
  return prompts, list(range(50, 50 + count))


def with_options(source, **options):
  """The engine of a ``setup`` with other sizes."""
  _, _, old, _ = source
  programs = old.programs.programs
  known = dict(eos_ids=programs.eos_ids, max_rows=64, seed=programs.seed)
  return Engine(old.decoder, programs.layout, **(known | options))


def assert_same_rows(a, b):
  np.testing.assert_array_equal(a.lengths, b.lengths)
  np.testing.assert_array_equal(a.ids, b.ids)
  np.testing.assert_allclose(a.log_probs, b.log_probs, atol=2e-5)
  np.testing.assert_array_equal(a.finish, b.finish)


@pytest.fixture(scope="module")
def one_device():
  return setup(eos=EOS)


def test_slots_recycled_many_times_leave_no_trace(one_device):
  """60 rows through 4 slots, with the rows that end first replaced first."""
  _, _, large, weights = one_device
  small = with_options(one_device, max_rows=4, prefill_tokens=32)
  prompts, draws = many(20)
  limits = np.random.default_rng(1).integers(1, 14, 60)
  options = dict(n=3, max_new=limits, sampling=Sampling())
  a = large.generate(weights, prompts, draws, **options)
  b = small.generate(weights, prompts, draws, **options)
  assert_same_rows(a, b)
  assert (a.lengths <= limits).all()
  assert {a.reason(i) for i in range(60)} == {STOP, LENGTH}
  # Again, with a used engine and other neighbours.
  order = np.random.default_rng(2).permutation(20)
  rows = (order[:, None] * 3 + np.arange(3)).reshape(-1)
  c = small.generate(
    weights,
    [prompts[i] for i in order],
    [draws[i] for i in order],
    **(options | {"max_new": limits[rows]}),
  )
  np.testing.assert_array_equal(a.ids[rows][:, : c.ids.shape[1]], c.ids)


def test_rows_equal_token_by_token_with_refills(one_device):
  spec, params, _, weights = one_device
  small = with_options(one_device, max_rows=3, prefill_tokens=16)
  prompts, draws = many(7)
  out = small.generate(weights, prompts, draws, n=1, max_new=9, sampling=Sampling())
  plain = decoder.Decoder(spec, jnp.float32, "xla", as_is)
  for i, (prompt, draw) in enumerate(zip(prompts, draws)):
    ids, log_probs = naive(plain, params, prompt, draw, 0, Sampling(), EOS, 9)
    assert out.ids[i, : out.lengths[i]].tolist() == ids
    np.testing.assert_allclose(out.log_probs[i, : len(ids)], log_probs, atol=1e-5)


@pytest.mark.parametrize(
  "mesh,generation", [((1, 2, 4), (1, 1)), ((2, 2, 2), (2, 1)), ((1, 4, 2), (1, 2))]
)
def test_refills_on_meshes(one_device, mesh, generation):
  _, _, reference, weights = one_device
  case = setup(mesh, generation, EOS)
  prompts, draws = many(11)
  limits = np.random.default_rng(3).integers(1, 12, 22)
  options = dict(n=2, max_new=limits, sampling=Sampling())
  shards = case[2].programs.programs.layout.batch_shards
  small = with_options(case, max_rows=2 * shards, prefill_tokens=16)
  assert_same_rows(
    reference.generate(weights, prompts, draws, **options),
    small.generate(case[3], prompts, draws, **options),
  )


@pytest.mark.parametrize(
  "spec",
  [
    SPEC,
    dataclasses.replace(SPEC, window=6, local_layers=(True, False)),
    dataclasses.replace(SPEC, attention_softcap=5.0),
  ],
  ids=["plain", "window", "softcap"],
)
def test_long_prompts_in_chunks(spec):
  case = setup(eos=EOS, spec=spec)
  _, _, whole, weights = case
  chunked = with_options(case, prefill_tokens=8)
  prompts, draws = many(4, longest=30)
  options = dict(n=2, max_new=5, sampling=Sampling())
  assert max(map(len, prompts)) > 16
  assert_same_rows(
    whole.generate(weights, prompts, draws, **options),
    chunked.generate(weights, prompts, draws, **options),
  )
  kinds = {key[0] for key in chunked.programs._found}
  assert "extend" in kinds


def test_the_last_rows_move_to_a_smaller_pool(one_device, monkeypatch):
  _, _, plain, weights = one_device
  monkeypatch.setattr(engine, "SMALLEST", 2)
  monkeypatch.setattr(engine, "CHUNK", 4)
  small = with_options(one_device, max_rows=8)
  prompts, draws = many(8)
  limits = np.array([2, 2, 2, 2, 2, 2, 2, 30])
  options = dict(n=1, max_new=limits, sampling=Sampling(temperature=0.8))
  shrunk = small.generate(weights, prompts, draws, **options)
  assert "shrink" in {key[0] for key in small.programs._found}
  assert_same_rows(plain.generate(weights, prompts, draws, **options), shrunk)


class Letters:
  """Token i is the i-th letter."""

  def decode(self, ids, *, skip_special_tokens):
    assert skip_special_tokens
    return "".join(chr(ord("a") + i) for i in ids)


def test_stop_strings_end_rows_where_they_are_complete(one_device):
  _, _, _, weights = one_device
  engine_ = with_options(one_device, max_rows=4, eos_ids=(99,))
  prompts, draws = many(6)
  options = dict(n=2, max_new=40, sampling=Sampling())
  free = engine_.generate(weights, prompts, draws, **options)
  text = Letters().decode(free.ids[0, 10:12].tolist(), skip_special_tokens=True)
  stopped = engine_.generate(
    weights, prompts, draws, stop=StopStrings(Letters(), (text,)), **options
  )
  ended = 0
  for row in range(12):
    whole = Letters().decode(free.ids[row].tolist(), skip_special_tokens=True)
    at = whole.find(text)
    expected = 40 if at < 0 else at + 2
    ended += at >= 0
    assert stopped.lengths[row] == expected
    assert stopped.reason(row) == (LENGTH if at < 0 else STOP_STRING)
    kept = stopped.ids[row, :expected]
    np.testing.assert_array_equal(kept, free.ids[row, :expected])
    assert not stopped.ids[row, expected:].any()
  assert ended


def test_finished_rows_are_told_once_and_whole(one_device):
  _, _, _, weights = one_device
  small = with_options(one_device, max_rows=4)
  prompts, draws = many(10)
  told = {}

  def on_finished(rows, completions):
    for row in rows:
      assert row not in told and completions.reason(row)
      told[row] = completions.ids[row, : completions.lengths[row]].tolist()

  out = small.generate(
    weights,
    prompts,
    draws,
    n=2,
    max_new=8,
    sampling=Sampling(),
    on_finished=on_finished,
  )
  assert told == {i: out.ids[i, : out.lengths[i]].tolist() for i in range(20)}


def test_repetition_penalty_knows_prompt_and_response(one_device):
  """Greedy with an enormous penalty never takes what is there already."""
  _, _, _, weights = one_device
  small = with_options(one_device, max_rows=2, eos_ids=(99,))
  prompts, draws = many(5)
  out = small.generate(
    weights,
    prompts,
    draws,
    n=1,
    max_new=12,
    sampling=Sampling(temperature=0.0, repetition_penalty=1e6),
  )
  plain = small.generate(
    weights, prompts, draws, n=1, max_new=12, sampling=Sampling(temperature=0.0)
  )
  repeats = lambda rows: sum(
    len(set(ids)) < len(ids) or bool(set(ids) & set(prompt.tolist()))
    for ids, prompt in zip(rows.ids.tolist(), prompts)
  )
  # Tokens with a negative logit are pushed down further, so none is repeated.
  assert repeats(plain) > 0 and repeats(out) == 0


def test_program_count_is_bounded_and_known(one_device):
  _, _, _, weights = one_device
  small = with_options(one_device, max_rows=4, prefill_tokens=64)
  for seed in range(4):
    prompts, draws = many(6 + seed, seed)
    small.generate(weights, prompts, draws, n=2, max_new=6, sampling=Sampling())
  first = small.programs.count
  for seed in range(4):
    prompts, draws = many(6 + seed, seed)
    small.generate(weights, prompts, draws, n=2, max_new=6, sampling=Sampling())
  assert small.programs.count == first <= 16
  assert small.programs.seconds > 0


def test_programs_are_made_for_the_longest_row_that_is_near(one_device):
  sizes = lambda longest, prompt: with_options(one_device, longest=longest).sizes(
    [prompt], 1, [10]
  )
  assert (sizes((60, 70), 40).width, sizes((60, 70), 40).length) == (64, 96)
  assert (sizes((60, 70), 20).width, sizes((60, 70), 20).length) == (24, 32)
  assert (sizes((0, 0), 40).width, sizes((0, 0), 40).length) == (48, 64)


def test_slots_follow_the_memory_that_is_free():
  fit = lambda free: capacity.fitting_slots(64, slot_bytes=10, free=free, shards=2)
  assert [fit(b) for b in (320, 319, 160, 20)] == [64, 32, 32, 4]
  with pytest.raises(ConfigError, match="expected room for the KV cache of 2 rows"):
    fit(19)


@pytest.mark.parametrize(
  "rows,most,shards,slots",
  [(1, 256, 1, 2), (5, 256, 1, 8), (300, 256, 1, 256), (5, 256, 4, 8), (40, 6, 4, 8)],
)
def test_wanted_slots(rows, most, shards, slots):
  assert capacity.wanted_slots(rows, most, shards) == slots
