"""``DynamicDataSampler`` as printed, and what a training loop makes of it."""

import json

import numpy as np
import pytest

from jaxrl_hybrid import DynamicDataSampler
from jaxrl_hybrid.api.sequences import PromptReader
from jaxrl_hybrid.data.template import PromptEncoder
from jaxrl_hybrid.data.tokenizer import symbol_tokenizer
from jaxrl_hybrid.errors import JaxrlError
from jaxrl_hybrid.types import STOP, Batch

DOMAINS = ("code", "math", "prose")


@pytest.fixture
def data(tmp_path):
  path = tmp_path / "your_preference_data.jsonl"
  rows = [
    {"prompt": f"w{i}", "response_length": i % 4, "domain": DOMAINS[i % 3]}
    for i in range(24)
  ]
  path.write_text("\n".join(map(json.dumps, rows)))
  return str(path)


def as_printed(path):
  return DynamicDataSampler(
    dataset_path=path,
    difficulty_weight_fn=lambda x: 1.0 / (x["response_length"] + 1),
    domain_boost={"code": 2.0, "math": 1.5},
  )


def read(prompts):
  """What the actor's wrapper does with prompts."""
  encoder = PromptEncoder(
    symbol_tokenizer([f"w{i}" for i in range(24)]),
    chat_template=None,
    system_prompt=None,
  )
  reader = PromptReader(encoder, string_prompts="plain", max_length=4, vocab_size=40)
  return reader.read(prompts)


def answered(prompts, scores):
  ids = np.ones((len(prompts), 1), np.int32)
  return Batch(
    prompts,
    np.zeros(len(prompts), np.int32),
    ids,
    np.ones(len(prompts), np.int32),
    [STOP] * len(prompts),
    np.zeros(ids.shape, np.float32),
    scores=np.asarray(scores, np.float32),
  )


def test_the_lines_as_printed(data):
  sampler = as_printed(data)
  batch = sampler.sample(batch_size=12)
  assert len({p.row_id for p in batch}) == 12
  expected = [(2.0, 1.5, 1.0)[i % 3] / (i % 4 + 1) for i in range(24)]
  np.testing.assert_allclose(sampler.weights, expected)
  drawn = [p.row_id for _ in range(200) for p in sampler.sample(3)]
  shares = np.bincount(drawn, minlength=24) / len(drawn)
  assert np.corrcoef(shares, expected)[0, 1] > 0.95
  prompts = read(batch)
  assert [p.text for p in prompts] == [f"w{p.row_id}" for p in batch]
  assert all(len(p.ids) == 1 for p in prompts)
  assert prompts[0].columns["domain"] == DOMAINS[batch[0].row_id % 3]


def test_it_learns_and_its_state_goes_on(data):
  sampler, again = as_printed(data), as_printed(data)
  before = sampler.weights.copy()
  prompts = read(sampler.sample(2))
  batch = answered([p for p in prompts for _ in range(2)], [1, 1, 1, 0])
  sampler.learn(batch)
  solved, mixed = (p.row_id for p in prompts)
  ratio = sampler.weights / before
  # 2 of 2: p = 3/4; 1 of 2: p = 1/2.
  assert ratio[solved] == pytest.approx(0.1 + 0.9 * 4 * 3 / 16)
  assert ratio[mixed] == 1 and (np.delete(ratio, [solved, mixed]) == 1).all()
  again.restore(json.loads(json.dumps(sampler.state())))
  rows = lambda sampler: [[p.row_id for p in sampler.sample(5)] for _ in range(3)]
  assert rows(again) == rows(sampler)
  other = DynamicDataSampler(data)
  with pytest.raises(JaxrlError, match="other rows or weights"):
    other.restore(sampler.state())


def test_wrong_use_is_named(data, tmp_path):
  sampler = as_printed(data)
  foreign = answered(read(["w1", "w2"]), [1, 0])
  unscored = answered(read(sampler.sample(2)), [1, 0]).with_fields(scores=None)
  for call, words in (
    (lambda: sampler.sample(0), "batch_size: expected at least 1"),
    (lambda: sampler.learn(foreign), "prompts that sample returned"),
    (lambda: sampler.learn(unscored), "with scores"),
    (lambda: DynamicDataSampler(data, prompt_key="promt"), "row 0.*did|closest is"),
    (lambda: DynamicDataSampler(tmp_path / "no.jsonl"), "no such file"),
    (lambda: DynamicDataSampler(data, floor=2.0), "floor in"),
  ):
    with pytest.raises(JaxrlError, match=words):
      call()
