#!/usr/bin/env bash
# Runs test tiers one after the other: `scripts/test.sh [TIER...]`, all of them without arguments. Goes on after a failing
# tier; ends with one line per tier and fails when any did. Budgets (minutes on 2 cores) are those of tests/README.md; a tier
# is stopped at one and a half times its budget, so that a hang cannot eat the hour that CI has.
set -uo pipefail
cd "$(dirname "$0")/.."
export PATH="$PWD/.venv/bin:$PATH" OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
declare -A budget_min=([unit]=4 [contract]=14 [property]=1 [engine]=6 [e2e]=34)
tiers=("$@")
[ ${#tiers[@]} -gt 0 ] || tiers=(unit contract property engine e2e)
for tier in "${tiers[@]}"; do
  [ -n "${budget_min[$tier]:-}" ] || { echo "no tier '$tier'; tiers: ${!budget_min[*]}" >&2; exit 2; }
done

log=$(mktemp)
trap 'rm -f "$log"' EXIT
lines=() status=0
for tier in "${tiers[@]}"; do
  case $tier in contract | engine | e2e) splitpoint models fetch smollm2 || exit 1 ;; esac
  begin=$SECONDS limit_min=${budget_min[$tier]}
  printf '\n=== %s (budget %d min) ===\n' "$tier" "$limit_min"
  timeout --kill-after=30 $((limit_min * 90)) python -m pytest "tests/$tier" --durations=5 --durations-min=2 2>&1 | tee "$log"
  code=${PIPESTATUS[0]} took=$((SECONDS - begin))
  word=ok
  # 5: nothing collected.
  if [ "$code" -ne 0 ]; then word=FAILED status=1; fi
  if [ "$code" -eq 124 ] || [ "$code" -eq 137 ]; then word=STOPPED; fi
  if [ "$took" -gt $((limit_min * 60)) ]; then word="$word, over budget"; fi
  closing=$(grep -E '^=+ .*(passed|failed|error|no tests ran).* =+$' "$log" | tail -n 1)
  lines+=("$(printf '%-9s %4ds of %2d min  %-8s %s' "$tier" "$took" "$limit_min" "$word" "${closing:-(no closing line, exit status $code)}")")
done
printf '\n'
printf '%s\n' "${lines[@]}"
exit "$status"
