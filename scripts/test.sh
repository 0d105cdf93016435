#!/usr/bin/env bash
# Sets up what is needed, then runs the tests; without arguments the fast ones.
#   bash scripts/test.sh [pytest arguments]
# One process per core, at most four; JAXRL_TEST_PROCESSES says otherwise.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_bootstrap.sh"
bootstrap test
cd "$ROOT"
exec "$VENV_PYTHON" -m pytest --dist=loadfile --maxprocesses=4 \
  -n "${JAXRL_TEST_PROCESSES:-auto}" "$@"
