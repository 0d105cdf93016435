"""One family for everything that a user can mend.

A message says what was expected, what came, and which knob to turn. Broken
invariants of our own are plain ``AssertionError``; nothing else is raised on
purpose.
"""


class JaxrlError(Exception):
  """Base of all errors that are addressed to the user."""


class ConfigError(JaxrlError):
  """A config key, value or combination of values is wrong."""


class DataError(JaxrlError):
  """A data file or row is wrong; names the file and line, or the row."""


class ModelError(JaxrlError):
  """A checkpoint or model config is not supported or does not match."""


class RewardError(JaxrlError):
  """A reward function failed; names the function and the sample."""


class NumericsError(JaxrlError):
  """Training stopped because its numbers are no longer finite."""


class CheckpointError(JaxrlError):
  """A saved state cannot be written, found or restored."""


class SwitchError(JaxrlError):
  """The weights did not arrive unchanged in the generation layout."""
