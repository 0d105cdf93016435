"""Weights, pass rates, draws and the stream made of them."""

import json

import numpy as np
import pytest

from jaxrl_hybrid import config as config_lib
from jaxrl_hybrid import inspection
from jaxrl_hybrid.data.dynamic_stream import DynamicStream
from jaxrl_hybrid.data.prompts import PromptDataset, PromptRow
from jaxrl_hybrid.data.weighting import PassRates, WeightedDraws, base_weights
from jaxrl_hybrid.errors import ConfigError, DataError

ROWS = [
  {"prompt": "a", "response_length": 0, "domain": "code"},
  {"prompt": "b", "response_length": 1, "domain": "math"},
  {"prompt": "c", "response_length": 3, "domain": "prose"},
  {"prompt": "d", "response_length": 4},
]


def weigh(weight_fn=None, boost=None, rows=ROWS):
  return base_weights(rows, weight_fn, boost or {}, domain_key="domain", name="d.jsonl")


def rates_of(count, *, pass_score=1.0, floor=0.1, decay=0.5):
  return PassRates(count, pass_score=pass_score, floor=floor, decay=decay)


def test_weights_by_hand():
  np.testing.assert_array_equal(weigh(), [1, 1, 1, 1])
  shorter_first = lambda x: 1.0 / (x["response_length"] + 1)
  np.testing.assert_allclose(weigh(shorter_first), [1, 1 / 2, 1 / 4, 1 / 5])
  boost = {"code": 2.0, "math": 1.5}
  np.testing.assert_allclose(weigh(shorter_first, boost), [2, 3 / 4, 1 / 4, 1 / 5])


@pytest.mark.parametrize(
  "weight_fn,boost,error,words",
  [
    (lambda x: x["length"], None, DataError, "row 0.*KeyError.*response_length"),
    (lambda x: -1.0, None, DataError, "row 0: expected a finite weight >= 0, got -1"),
    (lambda x: float("nan"), None, DataError, "got nan"),
    (lambda x: 0.0, None, DataError, "a row of a weight above 0"),
    (None, {"cod": 2.0}, ConfigError, "'cod' in column 'domain'; there are code, math"),
    (None, {"code": 0.0}, ConfigError, "'code' > 0, got 0"),
  ],
)
def test_wrong_weights_are_named(weight_fn, boost, error, words):
  with pytest.raises(error, match=words):
    weigh(weight_fn, boost)


def test_pass_rates_by_hand():
  rates = rates_of(4)
  np.testing.assert_allclose(rates.factors, 1)  # p = 1/2 of rows never drawn
  # Row 1: 2 of 4; row 2: 0 of 4; row 3: 4 of 4. A score of 0.9 is no pass.
  rates.learn(np.repeat([1, 2, 3], 4), np.array([1, 1, 0.9, 0] + [0] * 4 + [1] * 4))
  np.testing.assert_allclose(rates.rates, [1 / 2, 3 / 6, 1 / 6, 5 / 6])
  edge = 0.1 + 0.9 * 4 * 5 / 36
  np.testing.assert_allclose(rates.factors, [1, 1, edge, edge])
  # Row 3 again, 0 of 2: right 0.5 * 4 + 0, tried 0.5 * 4 + 2.
  rates.learn(np.array([3, 3]), np.array([0.0, 0.0]))
  assert rates.rates[3] == pytest.approx((2 + 1) / (4 + 2))
  for _ in range(40):
    rates.learn(np.full(64, 2), np.zeros(64))
  assert 0.1 < rates.factors[2] < 0.13
  for wrong in (dict(floor=0.0), dict(decay=1.5), dict(pass_score=np.nan)):
    with pytest.raises(ConfigError, match="expected a finite pass_score, floor in"):
      rates_of(2, **wrong)


def test_draws_follow_the_weights_and_repeat_no_row():
  base = np.array([1.0, 2.0, 0.0, 4.0, 1.0])
  draws = WeightedDraws(base, rates_of(5), seed=3)
  first = np.array([draws.draw(1)[0] for _ in range(4000)])
  shares = np.bincount(first, minlength=5) / 4000
  np.testing.assert_allclose(shares, base / base.sum(), atol=0.03)  # 4 sigma
  for _ in range(20):
    assert len(set(draws.draw(4))) == 4
  eleven = draws.draw(11)  # of four rows: each of them in every round
  assert sorted(eleven[:4]) == sorted(eleven[4:8]) == [0, 1, 3, 4]
  assert set(draws.draw(6, among=np.array([2, 0, 4]))) == {0, 4}


def dataset(count=12, offset=0):
  rows = [
    PromptRow(
      np.array([i + offset], np.int32), f"p{i}", f"t{i}", 2 * i, {"level": 1 + i // 6}
    )
    for i in range(count)
  ]  # every other row of the source was dropped
  return PromptDataset("d.jsonl", rows, 2 * count, "t0")


def stream_of(data=None, *, seed=0, learn=True, base=None, curriculum=(), size=4):
  data = data or dataset()
  draws = WeightedDraws(
    np.ones(len(data)) if base is None else base,
    rates_of(len(data), floor=0.1 if learn else 1.0),
    seed=seed,
  )
  return DynamicStream(data, draws, batch_size=size, curriculum=curriculum)


def play(stream, steps, first=0):
  """Draws and answers: even prompts half right, the others always wrong."""
  drawn = []
  for step in range(first, first + steps):
    prompts = [p for p in stream.next(step) for _ in range(4)]
    even = np.array([p.row_id % 4 == 0 for p in prompts])
    stream.learn(prompts, np.where(even, np.arange(len(prompts)) % 2, 0.0))
    drawn += [(p.draw_id, p.row_id) for p in prompts[::4]]
  return drawn


def test_a_stream_draws_what_teaches_and_goes_on_where_it_was():
  stream = stream_of()
  drawn = play(stream, 60)
  assert [draw for draw, _ in drawn] == list(range(240)) and stream.epoch == 20
  late = [row % 4 == 0 for _, row in drawn[120:]]
  assert np.mean(late) > 0.6  # of always wrong ones the factor goes to 0.42
  state = json.loads(json.dumps(stream.state()))
  assert play(stream_of(), 60) == drawn
  assert play(stream_of(seed=1), 60) != drawn
  on = play(stream, 5, 60)
  other = stream_of()
  other.restore(state)
  assert play(other, 5, 60) == on
  fresh = stream_of(learn=False)
  even = np.mean([row % 4 == 0 for _, row in play(fresh, 60)])
  assert abs(even - 0.5) < 0.1


def test_metrics_and_curriculum():
  stream = stream_of(base=np.r_[3.0, np.ones(11)], curriculum=((0, 1), (2, 2)))
  first = [p for step in range(2) for p in stream.next(step)]
  assert {p.columns["level"] for p in first} == {1}
  metrics = stream.learn(first[:1] * 2, np.array([1.0, 0.0]))
  assert metrics["data/effective_rows"] == pytest.approx(14**2 / (9 + 11))
  assert metrics["data/expected_pass_rate"] == 0.5
  late = [p for step in range(2, 6) for p in stream.next(step)]
  assert {p.columns["level"] for p in late} == {1, 2}
  with pytest.raises(DataError, match="weight above 0 in every stage"):
    stream_of(base=np.r_[np.zeros(6), np.ones(6)], curriculum=((0, 1), (2, 2)))


def test_a_state_of_something_else_is_refused():
  state = stream_of().state()
  for other, words in (
    (stream_of(dataset(offset=1)), "fingerprint was"),
    (stream_of(curriculum=((0, 2),)), "curriculum was"),
    (stream_of(base=np.r_[2.0, np.ones(11)]), "other rows or weights"),
  ):
    with pytest.raises(DataError, match=words):
      other.restore(state)
  with pytest.raises(DataError, match="lacks sampler.*another data.sampler.name"):
    stream_of().restore({k: v for k, v in state.items() if k != "sampler"})


def test_a_config_names_the_weight_function(tmp_path):
  (tmp_path / "mine.py").write_text("def easy(row):\n  return row['level'] == 1\n")
  config = config_lib.base()
  config.data.sampler.name = "dynamic"
  config.data.sampler.weight_fn = f"{tmp_path}/mine.py:easy"
  drawn = inspection.make_stream(config, dataset()).next(1)
  assert len(drawn) == 32 and {p.columns["level"] for p in drawn} == {1}
  config.data.sampler.weight_fn = f"{tmp_path}/mine.py:esay"
  with pytest.raises(ConfigError, match="weight_fn.*'esay'.*did you mean 'easy'"):
    inspection.make_stream(config, dataset())
