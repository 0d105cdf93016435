#!/usr/bin/env bash
# Sets up what is needed, then runs the tests; without arguments the fast ones.
#   bash scripts/test.sh [pytest arguments]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_bootstrap.sh"
bootstrap test
cd "$ROOT"
exec "$VENV_PYTHON" -m pytest "$@"
