#!/usr/bin/env bash
# Sets up what is needed, then trains a tiny model on the CPU.
#   bash scripts/quickstart.sh [--config.some.key=value ...]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_bootstrap.sh"
bootstrap
cd "$ROOT"
exec "$VENV_PYTHON" -m jaxrl_hybrid.train --config configs/quickstart.py "$@"
