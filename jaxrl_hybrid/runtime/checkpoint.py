"""Saving and restoring the whole state of a run with orbax.

Arrays (parameters, optimizer moments) and a JSON part (step, data position,
counters) are one checkpoint; it exists only when it is complete.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from jaxrl_hybrid.errors import CheckpointError

FOLDER = "checkpoints"
_ARRAYS, _HOST = "arrays", "host"


class Checkpoints:
  """The checkpoints of one run directory.

  Args:
    run_dir: the run.
    max_to_keep: older ones are deleted after a newer one is complete.
  """

  def __init__(self, run_dir: str | Path, *, max_to_keep: int):
    self._folder = Path(run_dir).absolute() / FOLDER
    self._manager = ocp.CheckpointManager(
      self._folder,
      options=ocp.CheckpointManagerOptions(
        max_to_keep=max_to_keep, enable_async_checkpointing=False
      ),
    )

  @property
  def latest(self) -> int | None:
    """The last complete step; None if there is none."""
    return self._manager.latest_step()

  def save(self, step: int, arrays: Any, host: dict[str, Any]) -> None:
    """Writes one checkpoint and waits until it is complete."""
    self._manager.save(
      step,
      args=ocp.args.Composite(
        **{_ARRAYS: ocp.args.StandardSave(arrays), _HOST: ocp.args.JsonSave(host)}
      ),
    )
    self._manager.wait_until_finished()

  def restore(self, step: int, like: Any) -> tuple[Any, dict[str, Any]]:
    """Returns (arrays with the shardings of ``like``, host part).

    Raises:
      CheckpointError: the checkpoint does not fit this config, or is damaged.
    """
    abstract = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), like
    )
    restored = self._restore(
      step,
      **{_ARRAYS: ocp.args.StandardRestore(abstract), _HOST: ocp.args.JsonRestore()},
    )
    return restored[_ARRAYS], restored[_HOST]

  def restore_part(self, step: int, path: tuple[str, ...], like: Any) -> Any:
    """Restores only the arrays below ``path``, with the shardings of ``like``."""
    tree = like
    for key in reversed(path):
      tree = {key: tree}
    part = self._restore(
      step,
      **{
        _ARRAYS: ocp.args.PyTreeRestore(
          tree,
          restore_args=ocp.checkpoint_utils.construct_restore_args(tree),
          partial_restore=True,
        )
      },
    )[_ARRAYS]
    for key in path:
      part = part[key]
    return part

  def _restore(self, step: int, **args: Any) -> Any:
    try:
      return self._manager.restore(step, args=ocp.args.Composite(**args))
    except (ValueError, KeyError, TypeError, OSError) as error:
      raise CheckpointError(
        f"{self._folder}/{step} does not fit this config (model, algorithm, "
        f"optimizer) or is damaged: {error}; start afresh with another "
        "trainer.run_dir or trainer.resume_mode=disable"
      ) from error
