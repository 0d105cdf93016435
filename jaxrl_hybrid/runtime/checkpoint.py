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
      item_handlers={
        _ARRAYS: ocp.PyTreeCheckpointHandler(),
        _HOST: ocp.JsonCheckpointHandler(),
      },
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
        **{_ARRAYS: ocp.args.PyTreeSave(arrays), _HOST: ocp.args.JsonSave(host)}
      ),
    )
    self._manager.wait_until_finished()

  def restore(self, step: int, like: Any) -> tuple[Any, dict[str, Any]]:
    """Returns (arrays with the shardings of ``like``, host part).

    Raises:
      CheckpointError: the checkpoint does not fit this config, or is damaged.
    """
    self._check_shapes(step, like)
    abstract = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), like
    )
    restored = self._restore(
      step, **{_ARRAYS: _restore_args(abstract), _HOST: ocp.args.JsonRestore()}
    )
    return restored[_ARRAYS], restored[_HOST]

  def restore_part(self, step: int, path: tuple[str, ...], like: Any) -> Any:
    """Restores only the arrays below ``path``, with the shardings of ``like``."""
    tree = like
    for key in reversed(path):
      tree = {key: tree}
    args = _restore_args(tree, partial_restore=True)
    part = self._restore(step, **{_ARRAYS: args})[_ARRAYS]
    for key in path:
      part = part[key]
    return part

  def _check_shapes(self, step: int, like: Any) -> None:
    """orbax reports a mismatch in a hundred lines; this names the first array."""
    try:
      saved = self._manager.item_metadata(step)[_ARRAYS].tree
    except Exception as error:  # whatever a damaged directory raises
      raise self._unusable(step, error) from error
    shapes = lambda tree: {
      jax.tree_util.keystr(path, simple=True, separator="/"): tuple(leaf.shape)
      for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }
    stored, wanted = shapes(saved), shapes(like)
    for name in wanted:
      if stored.get(name) != wanted[name]:
        raise self._unusable(
          step, f"{name} is {stored.get(name, 'absent')}, expected {wanted[name]}"
        )

  def _restore(self, step: int, **args: Any) -> Any:
    try:
      return self._manager.restore(step, args=ocp.args.Composite(**args))
    except (ValueError, KeyError, TypeError, OSError) as error:
      raise self._unusable(step, error) from error

  def _unusable(self, step: int, reason: object) -> CheckpointError:
    others = [s for s in self._manager.all_steps() if s != step]
    return CheckpointError(
      f"{self._folder}/{step} does not fit this config (model, algorithm, optimizer, "
      "offload of parameters or optimizer, offload.layers_per_chunk) or is damaged: "
      f"{reason}; other checkpoints here: {others} (delete the folder of a damaged one "
      "to resume from the one before), or start in another trainer.run_dir"
    )


def _restore_args(abstract: Any, **options: Any) -> ocp.args.PyTreeRestore:
  return ocp.args.PyTreeRestore(
    abstract,
    restore_args=ocp.checkpoint_utils.construct_restore_args(abstract),
    **options,
  )
