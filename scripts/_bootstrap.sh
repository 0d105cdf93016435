# Sourced by the other scripts: makes the virtual environment that they run in.
#
#   bootstrap [EXTRA]   sets VENV_PYTHON; EXTRA is an extra of pyproject.toml
#
# PYTHON=...       the Python to use; otherwise the first that works
# JAXRL_VENV=...   the environment; otherwise .venv in the root of the repository
#
# On a machine with a GPU this still installs the CPU variant of JAX; README.md
# names the extra to install by hand.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="${JAXRL_VENV:-$ROOT/.venv}"
# A path given relative to the caller's directory must survive a later cd.
case "$VENV" in /*) ;; *) VENV="$PWD/$VENV" ;; esac
VENV_PYTHON="$VENV/bin/python"
MADE="$VENV/.jaxrl-made" # only what holds this file is ever deleted
UNFINISHED="$VENV/.jaxrl-unfinished" # there while a set-up runs

die() {
  echo "error: $*" >&2
  exit 1
}

is_new_enough() {
  "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

# Makes an empty environment with the Python given. Fails where `venv` is broken,
# as it is with a system Python without ensurepip.
make_venv() {
  rm -rf "$VENV"
  mkdir -p "$VENV" && touch "$MADE" "$UNFINISHED" || die "cannot write $VENV"
  "$1" -m venv "$VENV" >/dev/null 2>&1 && "$VENV_PYTHON" -m pip --version >/dev/null
}

make_venv_with_any_python() {
  local candidate
  if [[ -n "${PYTHON:-}" ]]; then
    is_new_enough "$PYTHON" || die "PYTHON=$PYTHON is not a working Python >= 3.11"
    make_venv "$PYTHON" || die "\`$PYTHON -m venv $VENV\` fails: run it to see why"
    return
  fi
  # A candidate may be a version manager's shim that exists but does not run.
  for candidate in python3.13 python3.12 python3.11 python3 python; do
    if is_new_enough "$candidate" && make_venv "$candidate"; then
      return
    fi
  done
  rm -rf "$VENV"
  die "found no Python >= 3.11 that can make a virtual environment (tried" \
    "python3.13, python3.12, python3.11, python3, python). Install one, or point" \
    "PYTHON at it: PYTHON=/path/to/python3.12 bash $0"
}

ensure_venv() {
  # A set-up that was killed may have left half a package that pip takes for whole.
  if [[ -z "$(ls -A "$VENV" 2>/dev/null)" ]] ||
    { [[ -e "$MADE" ]] &&
      { [[ -e "$UNFINISHED" ]] || ! is_new_enough "$VENV_PYTHON"; }; }; then
    make_venv_with_any_python
  fi
  [[ -e "$VENV/pyvenv.cfg" ]] || die "$VENV is not a virtual environment: remove" \
    "it, or name another by JAXRL_VENV"
  is_new_enough "$VENV_PYTHON" || die "the Python in $VENV does not work or is" \
    "older than 3.11: remove $VENV and run again"
}

# Says what an environment was set up from: where, what, and with which extra.
fingerprint() {
  "$VENV_PYTHON" - "$ROOT" "$1" <<'PY'
import hashlib, pathlib, sys
root, extra = sys.argv[1:]
text = pathlib.Path(root, "pyproject.toml").read_text()
print(hashlib.sha256("\n".join([root, extra, text]).encode()).hexdigest())
PY
}

is_set_up() {
  local stamp="$VENV/.jaxrl-stamp${1:+-$1}"
  [[ ! -e "$UNFINISHED" && -e "$stamp" ]] && is_new_enough "$VENV_PYTHON" &&
    [[ "$(cat "$stamp")" == "$(fingerprint "$1")" ]]
}

bootstrap() {
  local extra="${1:-}"
  if is_set_up "$extra"; then
    return
  fi
  ensure_venv
  echo "setting up $VENV with $("$VENV_PYTHON" --version) (once; some minutes)"
  pip_install "$extra"
  fingerprint "" >"$VENV/.jaxrl-stamp"
  if [[ -n "$extra" ]]; then
    fingerprint "$extra" >"$VENV/.jaxrl-stamp-$extra"
  fi
}

pip_install() {
  trap 'exit 130' INT TERM # before pip's own exit status is looked at
  touch "$UNFINISHED"
  local status=0
  "$VENV_PYTHON" -m pip install --quiet --disable-pip-version-check \
    -e "$ROOT${1:+[$1]}" || status=$?
  trap - INT TERM
  rm "$UNFINISHED"
  [[ $status == 0 ]] || die "pip could not install the packages (see above); check" \
    "the network and run again"
}
