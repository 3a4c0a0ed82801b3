#!/usr/bin/env bash
# Runs Bazel with the arguments given, installing it where there is none.
#
# $BAZEL names the program; else a `bazel` on PATH is taken, else Debian's package is installed.
set -euo pipefail
cd "$(dirname "$0")/../.."

install() {
  local root=()
  if ! command -v apt-get >/dev/null; then
    echo "bazel: none on PATH, and no apt-get to install Debian's bazel-bootstrap with." \
      "Install Bazel, or name it: make bazel BAZEL=/path/to/bazel" >&2
    return 1
  fi
  if [ "$(id -u)" != 0 ]; then
    if ! command -v sudo >/dev/null || ! sudo -n true 2>/dev/null; then
      echo "bazel: none on PATH, and installing it needs root. Run" \
        "'apt-get install --no-install-recommends bazel-bootstrap' as root, or name" \
        "a Bazel of your own: make bazel BAZEL=/path/to/bazel" >&2
      return 1
    fi
    root=(sudo -n)
  fi
  echo "bazel: none on PATH; installing Debian's bazel-bootstrap" >&2
  if ! "${root[@]}" apt-get update -qq >&2 ||
    ! "${root[@]}" env DEBIAN_FRONTEND=noninteractive \
      apt-get install -y -qq --no-install-recommends bazel-bootstrap >&2 </dev/null; then
    echo "bazel: apt-get could not install bazel-bootstrap (its messages are above)." \
      "Install Bazel, or name it: make bazel BAZEL=/path/to/bazel" >&2
    return 1
  fi
}

bazel=${BAZEL:-bazel}
if ! command -v "$bazel" >/dev/null; then
  if [ -n "${BAZEL:-}" ]; then
    echo "bazel: BAZEL=$BAZEL is not a program" >&2
    exit 1
  fi
  install
fi

# The server would stay otherwise, with 250 MB.
trap '"$bazel" shutdown' EXIT
"$bazel" "$@"
