"""The reward model: a frozen sequence classifier that scores whole dialogues."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from jaxrl_hybrid.models.decoder import Decoder
from jaxrl_hybrid.models.params import Params
from jaxrl_hybrid.parallel import offload
from jaxrl_hybrid.parallel.rules import Layout
from jaxrl_hybrid.rewards.execution import Failure
from jaxrl_hybrid.types import Batch, Prompt
from jaxrl_hybrid.workers.scoring import Scorer

NAME = "reward_model"  # of its term, beside the reward functions
# (prompt, completion) -> the reward model's own ids of the dialogue, int32 [T]
Encode = Callable[[Prompt, str], np.ndarray]


class RewardModel:
  """Scores prompt and response at their last token, on the training mesh.

  Args:
    decoder: with a score head.
    weights: as programs compute with them; there are no others.
    layout: the training layout of this model.
    micro_rows: rows per micro-batch, over all batch shards.
    share_rows: whether sequences may share a row.
    max_length: most tokens of a dialogue; a longer one gets no score.
    encode: None: the token ids of prompt and response are the model's own too.
    on_host: keep the weights in host memory between uses.
  """

  def __init__(
    self,
    decoder: Decoder,
    weights: Params,
    layout: Layout,
    *,
    micro_rows: int,
    share_rows: bool = False,
    max_length: int,
    encode: Encode | None = None,
    on_host: bool = False,
  ):
    self._on_host = on_host
    self.weights = offload.to_host(weights) if on_host else weights
    self._encode, self._max_length = encode, max_length
    self.scores = Scorer(
      decoder.scores, layout, micro_rows=micro_rows, share=share_rows
    )

  def score(self, batch: Batch, texts: Sequence[str]) -> list[float | Failure]:
    """A score per row, or why there is none.

    Args:
      batch: N finished sequences.
      texts: their N completions, for a model with another tokenizer.
    """
    dialogues = [self._ids(batch, i, text) for i, text in enumerate(texts)]
    found: list[float | Failure] = [self._too_long(ids) for ids in dialogues]
    fitting = [i for i, ids in enumerate(dialogues) if len(ids) <= self._max_length]
    if fitting:
      scores = self.score_ids([dialogues[i] for i in fitting])
      for i, score in zip(fitting, scores.tolist(), strict=True):
        found[i] = score
    return found

  def score_ids(self, dialogues: Sequence[np.ndarray]) -> np.ndarray:
    """fp32 ``[N]``: scores of whole rows of this model's token ids."""
    weights = offload.to_device(self.weights) if self._on_host else self.weights
    return self.scores.at_last_token(weights, dialogues)

  def _ids(self, batch: Batch, i: int, text: str) -> np.ndarray:
    if self._encode is not None:
      return self._encode(batch.prompts[i], text)
    return np.concatenate([batch.prompts[i].ids, batch.response(i)])

  def _too_long(self, ids: np.ndarray) -> Failure:
    return Failure(
      f"expected at most reward_model.max_length={self._max_length} tokens, got "
      f"{len(ids)}"
    )
