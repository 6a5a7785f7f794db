#!/usr/bin/env bash
# Standard clients against a running system: `scripts/check_clients.sh [--http HOST:PORT --grpc HOST:PORT] [--tokenizer DIR]`.
# Without addresses it starts the demo's system and ends it. Makes the clients' environment, .cache/clients, first: their pins
# do not go together with ours. Needs .venv (make setup).
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$PWD/.cache/clients lock=requirements/clients.lock
SECONDS=0
say() { printf 'clients %3ds  %s\n' "$SECONDS" "$*"; }
[ -x .venv/bin/uv ] || { echo "check_clients: .venv is missing: make setup" >&2; exit 1; }

torch=$(cat requirements/torch-cpu.txt)
stamp=$(cat "$lock" requirements/torch-cpu.txt scripts/check_clients.sh | sha256sum | cut -c1-64)
if [ "$(cat "$venv/.stamp" 2>/dev/null)" = "$stamp" ]; then
  say "environment up to date"
else
  rm -rf "$venv"
  say "making .cache/clients"
  .venv/bin/python -m venv "$venv"
  # guidellm loads its data through torch. Its CPU build, from where scripts/setup.sh finds it.
  pip=("$venv/bin/python" -m pip --disable-pip-version-check --quiet)
  say "installing $torch"
  if ! log=$("${pip[@]}" install --no-deps "$torch" 2>&1); then
    "${pip[@]}" install --no-deps "$torch" --extra-index-url https://download.pytorch.org/whl/cpu || {
      printf '%s\n' "$log" >&2
      exit 1
    }
  fi
  export UV_HTTP_TIMEOUT=${UV_HTTP_TIMEOUT:-180} UV_NO_PROGRESS=1 VIRTUAL_ENV=$venv
  index=${PIP_INDEX_URL:-$("$venv/bin/python" -m pip config get global.index-url 2>/dev/null || true)}
  if [ -z "${UV_DEFAULT_INDEX:-}" ] && [ -n "$index" ]; then export UV_DEFAULT_INDEX=$index; fi
  say "installing $(grep -c '==' "$lock") packages of $lock"
  .venv/bin/uv pip install --quiet --no-deps --require-hashes -r "$lock"
  printf '%s\n' "$stamp" > "$venv/.stamp"
fi
say "ready"
exec .venv/bin/python -m scripts.check_clients --python "$venv/bin/python" "$@"
