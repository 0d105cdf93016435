"""Generation as a role: prompts to a ``Batch``, at one set of rollout settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from jaxrl_hybrid.models.params import Params
from jaxrl_hybrid.parallel.hybrid import HybridEngine
from jaxrl_hybrid.rollout.engine import Engine, OnFinished
from jaxrl_hybrid.rollout.sampling import Sampling
from jaxrl_hybrid.rollout.stop import StopStrings
from jaxrl_hybrid.types import Batch, Prompt

GREEDY = Sampling(temperature=0.0)


@dataclasses.dataclass(frozen=True)
class RolloutSettings:
  """How many samples, how long and from which distribution.

  ``mask_truncated`` keeps rows that hit ``max_new`` out of the loss; ``stop`` are
  strings that end a row; ``max_length`` bounds prompt and response together.
  """

  n: int
  max_new: int
  sampling: Sampling
  mask_truncated: bool = False
  stop: StopStrings | None = None
  max_length: int | None = None


class Generator:
  """The layout switch, the engine, and the weights that it currently holds.

  Args:
    switch: from the training to the generation layout.
    engine: generates.
    settings: of every rollout.
    merge: makes plain weights of those with adapters; None: they are plain.
  """

  def __init__(
    self,
    switch: HybridEngine,
    engine: Engine,
    settings: RolloutSettings,
    merge: Callable[[Params], Params] | None = None,
  ):
    self.switch, self.engine, self._merge = switch, engine, merge
    self.settings = settings
    self._weights: Params | None = None

  def drop_weights(self) -> None:
    """Forgets the generation copy: the training weights have changed."""
    self._weights = None

  def plain(self, weights: Params) -> Params:
    """What the switch takes; ``weights`` may be shapes."""
    return weights if self._merge is None else self._merge(weights)

  def generate(
    self,
    weights: Params,
    prompts: Sequence[Prompt],
    *,
    greedy: bool = False,
    on_finished: OnFinished | None = None,
    settings: RolloutSettings | None = None,
  ) -> Batch:
    """n samples per prompt, or one greedy completion each.

    Args:
      weights: as training holds them; switched to the generation layout unless
        the copy at hand is still fresh.
      prompts: one per draw.
      greedy: temperature 0 and n = 1.
      on_finished: is told the rows of the batch that have ended.
      settings: of this rollout, if they differ.
    """
    settings = settings or self.settings
    n, sampling = (1, GREEDY) if greedy else (settings.n, settings.sampling)
    if self._weights is None:
      self._weights, _ = self.switch.to_generation(self.plain(weights))
    out = self.engine.generate(
      self._weights,
      [p.ids for p in prompts],
      [p.draw_id for p in prompts],
      n=n,
      max_new=_limits(settings, prompts, n),
      sampling=sampling,
      stop=settings.stop,
      on_finished=on_finished,
    )
    self.switch.verify()
    loss_mask = None
    if settings.mask_truncated:
      loss_mask = np.broadcast_to(out.stopped[:, None], out.ids.shape)
    return Batch(
      prompts=[prompt for prompt in prompts for _ in range(n)],
      sample_ids=np.tile(np.arange(n, dtype=np.int32), len(prompts)),
      response_ids=out.ids,
      response_lengths=out.lengths,
      finish_reasons=[out.reason(row) for row in range(len(out.ids))],
      rollout_log_probs=out.log_probs,
      weight_version=self.switch.version,
      loss_mask=loss_mask,
    )


def _limits(
  settings: RolloutSettings, prompts: Sequence[Prompt], n: int
) -> int | list[int]:
  """Most new tokens of all rows, or of each of them."""
  if settings.max_length is None:
    return settings.max_new
  room = (settings.max_length - len(prompt.ids) for prompt in prompts)
  return [min(settings.max_new, left) for left in room for _ in range(n)]
