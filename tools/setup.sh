#!/usr/bin/env bash
# Makes .venv hold what requirements.txt pins, and this checkout as an editable package.
#
# A .venv that works is kept; a broken one, or one of a Python that does not fit, is made again, by
# $PYTHON or the first fitting one on PATH. To change the Python of one that works, delete it first.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=.venv

fits() {
  "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null
}

find_python() {
  local name
  for name in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
    if fits "$name"; then
      printf '%s\n' "$name"
      return
    fi
  done
  echo "setup: Python 3.11 to 3.13 is needed, and ${PYTHON:-no python3 on PATH} is" \
    "not one. Install one, or name it: make setup PYTHON=/path/to/python3.12" >&2
  return 1
}

if ! fits "$venv/bin/python" || ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
  python=$(find_python)
  echo "setup: making $venv with $("$python" --version)"
  "$python" -m venv --clear "$venv"
fi

pip=("$venv/bin/python" -m pip --disable-pip-version-check)
echo "setup: installing requirements.txt into $venv"
# uv installs the set in seconds, pip in a minute; both read the same file.
if "${pip[@]}" install --quiet "$(grep -E '^uv==' requirements.txt)"; then
  install=("$venv/bin/uv" pip install --quiet --python "$venv/bin/python")
  # Compiled once here: where Python writes no compiled modules, each process would compile
  # TensorFlow's again, which takes longer than importing them.
  "${install[@]}" --compile-bytecode -r requirements.txt
else
  echo "setup: uv cannot be had; going on with pip" >&2
  install=("${pip[@]}" install --quiet)
  "${install[@]}" -r <(grep -vE '^uv==' requirements.txt)
fi
"${install[@]}" --no-deps --no-build-isolation -e .
echo "setup: done"
